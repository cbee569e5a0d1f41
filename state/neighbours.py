"""Similar users: a nearest-neighbour index over profile vectors, local to one partition.

`NeighbourIndex` is built once and never changed, because hnswlib is unsafe for inserting and searching at once;
`Neighbours` builds the next one in the background and swaps it whole. Similarity is the cosine.

On disk (`save`) an index is two data files and ``neighbours.json``, which names them with their checksums and is
renamed into place last: a crash leaves the former index or the new one, never a mixture.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hnswlib
import numpy as np

from state import artifact
from state.api import F32, I32, I64, U64, StoreDims
from state.profiles import Profiles, Stopped, collect, unit
from state.store import RocksStore
from topics.errors import StoreFormatError

log = logging.getLogger(__name__)

MANIFEST = "neighbours.json"
KIND = "solaris-neighbours"


@dataclass(frozen=True, slots=True)
class NeighbourSettings:
    k: int = 10
    """neighbours in a mean, at most"""
    min_similarity: float = 0.5
    """cosine below which a user is no neighbour"""
    ef: int = 64
    """breadth of a search"""
    ef_construction: int = 100
    links: int = 16
    """hnswlib's M"""
    threads: int = 1
    """threads that build; more than one makes the index depend on their timing"""


@dataclass(slots=True)
class Similar:
    """Q answers. Where there is no neighbour numbers are zero and the time is -1."""

    aggregate: F32
    """[Q, d] mean of the neighbours' aggregates, weighted by similarity"""
    similarity: F32
    """[Q] mean cosine of the neighbours used"""
    ts_ms: I64
    """[Q] newest event time in the neighbours' aggregates"""
    count: I32
    """[Q] neighbours used"""

    @classmethod
    def none(cls, queries: int, dim: int) -> Similar:
        return cls(
            np.zeros((queries, dim), np.float32), np.zeros(queries, np.float32), np.full(queries, -1, np.int64),
            np.zeros(queries, np.int32),
        )  # fmt: skip


class NeighbourIndex:
    """Searches may come from several threads."""

    def __init__(
        self,
        data: Profiles,
        model: int,
        window_ms: int,
        settings: NeighbourSettings = NeighbourSettings(),
        index: hnswlib.Index | None = None,
    ) -> None:
        self.data, self.model, self.window_ms, self.settings = data, model, window_ms, settings
        self._index = index
        if index is None and len(data):
            self._index = hnswlib.Index(space="ip", dim=data.profiles.shape[1])
            self._index.init_index(
                max_elements=len(data), M=settings.links, ef_construction=settings.ef_construction, random_seed=7
            )
            self._index.add_items(data.profiles, np.arange(len(data)), num_threads=settings.threads)
        if self._index is not None:
            self._index.set_ef(max(settings.ef, 2 * settings.k))
            self._index.set_num_threads(1)

    def __len__(self) -> int:
        return len(self.data)

    def similar(self, profiles: F32, now_ms: I64, users: U64 | None = None) -> Similar:
        """profiles [Q, p], now [Q]; `users` [Q], where given, are not their own neighbours.

        Up to k users whose aggregate is live and not of the future at `now` and whose cosine reaches the floor.
        A profile that is zero or not finite has no neighbours. Raises ValueError for another length than the index's.
        """
        q, p = profiles.shape
        width = self.data.profiles.shape[1]
        if p != width:
            raise ValueError(f"profile vectors of {p} numbers, the index has {width}")
        out = Similar.none(q, self.data.aggregates.shape[1])
        queries, good = unit(profiles)
        rows = np.flatnonzero(good)
        if not len(self.data) or not len(rows):
            return out
        labels, cosine = self._search(queries[rows], min(len(self.data), 2 * self.settings.k))
        ts = self.data.ts_ms[labels]
        now = np.asarray(now_ms, np.int64)[rows, None]
        usable = (cosine >= self.settings.min_similarity) & (ts <= now) & (now < ts + self.window_ms)
        if users is not None:
            usable &= self.data.users[labels] != np.asarray(users, np.uint64)[rows, None]
        usable &= np.cumsum(usable, axis=1) <= self.settings.k
        # A floor below zero admits users of opposite taste; they must not weigh negatively.
        weights = np.where(usable, np.maximum(cosine, 1e-6), 0).astype(np.float32)
        count = usable.sum(axis=1)
        some = count > 0
        total = np.where(some, weights.sum(axis=1), 1)
        means = np.einsum("qk,qkd->qd", weights, self.data.aggregates[labels]) / total[:, None]
        out.aggregate[rows] = np.where(some[:, None], means, 0)
        out.similarity[rows] = np.where(some, np.where(usable, cosine, 0).sum(axis=1) / np.maximum(count, 1), 0)
        out.ts_ms[rows] = np.where(some, np.where(usable, ts, -1).max(axis=1), -1)
        out.count[rows] = count
        return out

    def _search(self, queries: F32, k: int) -> tuple[I64, F32]:
        """labels [Q, k] and cosines [Q, k], best first."""
        assert self._index is not None
        try:
            labels, distances = self._index.knn_query(queries, k=k)
        except RuntimeError:
            # hnswlib gives up when its graph reaches fewer than k elements; looking at all of them always works.
            cosines = queries @ self.data.profiles.T
            found = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
            return found.astype(np.int64), np.take_along_axis(cosines, found, axis=1)
        return labels.astype(np.int64), (1 - distances).astype(np.float32)

    def save(self, directory: Path) -> None:
        files: dict[str, Callable[[Path], None]] = {
            "table": lambda path: artifact.save_arrays(path, _arrays(self.data))
        }
        if self._index is not None:
            index = self._index
            files["index"] = lambda path: index.save_index(str(path))
        artifact.publish(
            directory,
            MANIFEST,
            files,
            {
                "kind": KIND, "format": 1, "space": "cosine", "dim": self.data.profiles.shape[1],
                "aggregate_dim": self.data.aggregates.shape[1], "count": len(self.data), "model": f"{self.model:016x}",
                "window_ms": self.window_ms, "left_out": self.data.left_out,
            },
        )  # fmt: skip


def load(
    directory: Path, model: int, dims: StoreDims, settings: NeighbourSettings = NeighbourSettings()
) -> NeighbourIndex:
    """The saved index. Raises `StoreFormatError`, saying which, when it is missing, damaged, of a newer format, or of
    another model, dim or count than it says or than is asked: the remedy is always to build it again."""
    manifest, files = artifact.read(directory, MANIFEST, KIND, 1)
    want = {"space": "cosine", "dim": dims.profile, "aggregate_dim": dims.dim, "model": f"{model:016x}"}
    for key, value in want.items():
        if manifest.get(key) != value:
            raise StoreFormatError(f"{directory / MANIFEST}: {key} is {manifest.get(key)!r}, expected {value!r}")
    arrays = artifact.load_arrays(files["table"])
    data = Profiles(
        arrays["users"], arrays["profiles"], arrays["aggregates"], arrays["ts_ms"], int(manifest.get("left_out", 0))
    )
    n = int(manifest["count"])
    shapes = {"users": (n,), "profiles": (n, dims.profile), "aggregates": (n, dims.dim), "ts_ms": (n,)}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise StoreFormatError(f"{files['table']}: {name} has shape {arrays[name].shape}, expected {shape}")
    index = None
    if n:
        index = hnswlib.Index(space="ip", dim=dims.profile)
        try:
            index.load_index(str(files["index"]), max_elements=n)
        except (RuntimeError, KeyError) as e:
            raise StoreFormatError(f"{directory}: the index cannot be read: {e}") from None
        if index.get_current_count() != n:
            raise StoreFormatError(f"{files['index']} has {index.get_current_count()} elements, expected {n}")
        # hnswlib loads a file of another dim without a word; a vector that comes back as it went in rules that out.
        if not np.allclose(index.get_items([0, n - 1]), data.profiles[[0, n - 1]], atol=1e-6):
            raise StoreFormatError(f"{files['index']} does not hold the vectors of its table (another dim?)")
    return NeighbourIndex(data, model, int(manifest["window_ms"]), settings, index)


def _arrays(data: Profiles) -> dict[str, np.ndarray]:
    return {"users": data.users, "profiles": data.profiles, "aggregates": data.aggregates, "ts_ms": data.ts_ms}


class Neighbours:
    """The index in use, and the building of the next one. Close it before its store."""

    def __init__(
        self, store: RocksStore, model: int, dims: StoreDims, settings: NeighbourSettings = NeighbourSettings(),
        directory: Path | None = None,
    ) -> None:  # fmt: skip
        """With `directory` an index is saved after every build, and the saved one is used at once."""
        self._store, self._model, self._dims, self._settings = store, model, dims, settings
        self._directory = directory
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.built = 0
        self.failed = 0
        self.build_s = 0.0
        self.index = NeighbourIndex(Profiles.empty(dims), model, store.settings.window_ms, settings)
        if directory is not None and (directory / MANIFEST).exists():
            try:
                self.index = load(directory, model, dims, settings)
            except StoreFormatError as e:
                log.warning("neighbours: %s; it will be built again", e)

    def similar(self, profiles: F32, now_ms: I64, users: U64 | None = None) -> Similar:
        """As `NeighbourIndex.similar`, from the index in use."""
        return self.index.similar(profiles, now_ms, users)

    def rebuild(self, now_ms: int) -> bool:
        """Begins to build from the store as it is now; False when a build is running already."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread = threading.Thread(target=self._build, args=(now_ms,), name="neighbours-build", daemon=True)
        self._thread.start()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether no build is running (any more)."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        self._stop.set()
        if not self.wait(timeout_s):
            log.error("neighbours: a build did not stop within %g s", timeout_s)

    def _build(self, now_ms: int) -> None:
        began = time.monotonic()
        try:
            data = collect(self._store, now_ms, self._model, self._dims, self._stop.is_set)
            index = NeighbourIndex(data, self._model, self._store.settings.window_ms, self._settings)
            if self._directory is not None:
                index.save(self._directory)
            self.index = index
            self.built += 1
            self.build_s = time.monotonic() - began
            log.info("neighbours: %d users in %.1f s, %d left out", len(index), self.build_s, data.left_out)
        except Stopped:
            pass
        except Exception:
            # The index in use stays; whoever reads `failed` knows that it ages.
            self.failed += 1
            log.exception("neighbours: build failed, the former index stays in use")
