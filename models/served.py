"""Slots as serving would fill them, for training and evaluation.

The candidates events of a log go through the embedder's own core into a state store; then every impression looks up
what was visible at its time. A look-up is a pure function of event time (`state.api`), so the order of writing does
not matter, and a delay from event to servable vector is a look-up that much earlier. A test holds the slots equal to
those of `streams.backtest` with an open gate.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.api import F32, I64, PairBatch, Runtime, Slots
from models.catalogue import Catalogue
from models.features import Encoder, requests
from models.similar import Form, SimilarInTime, nobody
from models.slots import SimilarUsers, build_slots
from state.api import ChangelogRecord, Lookup, StoreDims, StoreSettings
from topics.packed import encode_embedding

REQUESTS = 512
F16_MAX = 65_504.0
PARTITION = 0


class ServedStore:
    """A store in a temporary folder, filled from candidates events."""

    def __init__(
        self, runtime: Runtime, catalogue: Catalogue, settings: StoreSettings = StoreSettings(cache_bytes=256 << 20)
    ) -> None:
        from state.store import RocksStore
        from streams.embedder import Embedder

        info = runtime.info
        self.runtime = runtime
        self.dims = StoreDims(info.dim, info.state_dim, info.profile_dim)
        self._folder = tempfile.TemporaryDirectory(prefix="solaris-served-")
        self.store = RocksStore(Path(self._folder.name) / "store", settings)
        self._encoder = Encoder(info.spec, catalogue)
        self._embedder = Embedder(runtime, self._encoder, "on_change", settings.ttl_ms)
        self._similar = SimilarInTime(self.store, info.fm_hash, self.dims)
        self._offset = 0

    @property
    def pairs(self) -> int:
        """Pairs embedded: one heavy FM call each."""
        return self._embedder.counters["pairs_embedded"]

    @property
    def states(self) -> int:
        """User states computed: one cheap FM pass each."""
        return self._embedder.counters["states"]

    def add(self, candidates: PairBatch, progress: Callable[[int], None] | None = None) -> None:
        """Candidates events [B] through the embedder, everything accepted; refreshed when the history has moved."""
        for start in range(0, candidates.requests, REQUESTS):
            part = requests(candidates, start, min(start + REQUESTS, candidates.requests))
            scores = self.runtime.score(part)
            everything = np.split(np.arange(part.pairs), part.splits[1:-1])
            todo = self._encoder.to_precompute(part, everything, scores.logit, scores.profile, [""] * part.requests)
            chunks = self._embedder.states(todo)
            chunks += self._embedder.pairs(todo, [PARTITION] * len(todo), {PARTITION: self.store})[0]
            records = []
            for chunk in chunks:
                if chunk is not None:
                    records.append(ChangelogRecord(self._offset, encode_embedding(chunk)))
                    self._offset += 1
            self.store.apply(records)
            if progress is not None:
                progress(part.requests)

    def slots(
        self,
        impressions: PairBatch,
        delay_ms: I64,
        form: Form = "neighbours",
        ask: npt.NDArray[np.bool_] | None = None,
        cold: npt.NDArray[np.bool_] | None = None,
    ) -> Slots:
        """[N] slots of the impressions when vectors become servable `delay_ms` [B] after their event.

        Similar users are sought for users without an aggregate, as the ranker does; `ask` [B] names others to seek
        them for too. Requests that are `cold` [B] are answered as for a user of whom the store knows nothing.
        """
        info = self.runtime.info
        vectors, topics = self.runtime.item_vectors(impressions.items, impressions.item_features)
        found = self.store.lookup(
            impressions.users, impressions.splits, impressions.items, topics, impressions.ts_ms - delay_ms,
            info.fm_hash, self.dims,
        )  # fmt: skip
        if cold is not None:
            _forget(found, cold, impressions.splits)
        similar = None
        if "similar" in info.slots:
            wanted = found.aggregate_ts_ms < 0
            similar = self._similar_users(impressions, wanted if ask is None else wanted | ask, delay_ms, form)
        slots = build_slots(found, impressions, vectors, self.runtime, impressions.ts_ms, similar)
        ttl_ms = self.store.settings.ttl_ms
        for name in ("direct", "state"):  # what came late does not live longer for it
            age = getattr(slots, name + "_age_ms")
            dead = age >= ttl_ms
            if dead.any():
                age[dead] = -1
                getattr(slots, name)[dead] = 0
        return slots

    def _similar_users(
        self, impressions: PairBatch, wanted: npt.NDArray[np.bool_], delay_ms: I64, form: Form
    ) -> SimilarUsers:
        out = nobody(impressions.requests, self.dims.dim)
        rows = np.flatnonzero(wanted)
        if len(rows):
            profiles = self.runtime.score(impressions).profile[rows]
            got = self._similar.similar(
                profiles, impressions.ts_ms[rows], impressions.users[rows], int(np.median(delay_ms)), form
            )
            out.vector[rows], out.ts_ms[rows], out.score[rows] = got.aggregate, got.ts_ms, got.similarity
        return out

    def close(self) -> None:
        self.store.close()
        self._folder.cleanup()


def _forget(found: Lookup, cold: npt.NDArray[np.bool_], splits: I64) -> None:
    pairs = np.repeat(cold, np.diff(splits))
    found.ts_ms[pairs] = -1
    found.topic_ts_ms[pairs] = -1
    found.state_ts_ms[cold] = -1
    found.aggregate_ts_ms[cold] = -1


def fresh_slots(runtime: Runtime, impressions: PairBatch) -> Slots:
    """Slots with an embedding and a state computed at the impression itself: the ceiling, not what serving sees."""
    info = runtime.info
    slots = Slots.empty(impressions.pairs, info.dim, info.dots)
    if "direct" in info.slots:
        slots.direct = _f16(runtime.embed(impressions)).astype(np.float32)
        slots.direct_age_ms[:] = 0
    if "state" in info.slots and info.state_dim:
        vectors, _ = runtime.item_vectors(impressions.items, impressions.item_features)
        state = _f16(runtime.user_state(impressions)).astype(np.float32)
        slots.state = runtime.dots(state, vectors, impressions.splits)
        slots.state_age_ms[:] = 0
    return slots


def _f16(values: F32) -> np.ndarray:
    return np.clip(values, -F16_MAX, F16_MAX).astype(np.float16)
