"""The users of a store that have a live aggregate: what neighbours are sought among."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from state.answers import unfilled_lookup
from state.api import F32, I64, U64, StoreDims
from state.cache import Loaded, arena_of
from state.store import RocksStore
from topics.packed import decode_embedding

_BATCH, _BATCH_BYTES = 256, 1 << 20
"""users answered at once: at most so many, of about that size together, some times which is held for them"""


@dataclass(slots=True)
class Profiles:
    """M users, columns aligned; profiles have length 1."""

    users: U64
    """[M]"""
    profiles: F32
    """[M, p]"""
    aggregates: F32
    """[M, d]"""
    ts_ms: I64
    """[M] newest event time in the aggregate"""
    left_out: int
    """users with a live aggregate but no profile, or one that is zero or not finite"""

    def __len__(self) -> int:
        return len(self.users)

    @classmethod
    def empty(cls, dims: StoreDims) -> Profiles:
        return cls(
            np.zeros(0, np.uint64), np.zeros((0, dims.profile), np.float32), np.zeros((0, dims.dim), np.float32),
            np.zeros(0, np.int64), 0,
        )  # fmt: skip

    @classmethod
    def joined(cls, parts: Sequence[Profiles]) -> Profiles:
        return cls(
            np.concatenate([p.users for p in parts]),
            np.concatenate([p.profiles for p in parts]),
            np.concatenate([p.aggregates for p in parts]),
            np.concatenate([p.ts_ms for p in parts]),
            sum(p.left_out for p in parts),
        )


class Stopped(Exception):
    """Collecting was asked to stop."""


def unit(vectors: F32) -> tuple[F32, np.ndarray]:
    """Vectors scaled to length 1, and which of them can be: those that are neither zero nor have a NaN or infinity."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        norms = np.linalg.norm(vectors.astype(np.float64), axis=1)
        good = np.isfinite(norms) & (norms > 1e-12)
        scaled = vectors / np.where(good, norms, 1.0)[:, None]
    return np.where(good[:, None], scaled, 0).astype(np.float32), good


def collect(
    store: RocksStore, now_ms: int, model: int, dims: StoreDims, stop: Callable[[], bool] = lambda: False
) -> Profiles:
    """All users with an aggregate that is live at `now_ms` and a usable profile (the newest one of the window).

    Reads a snapshot beside the store's own work and leaves its cache alone. Raises `Stopped`.
    """
    parts = [Profiles.empty(dims)]
    loaded = Loaded()
    for user, chunks in store.scan_users():
        for offset, value in chunks:
            loaded.chunk(offset, value)
        loaded.end_user(user)
        if len(loaded.users) == _BATCH or loaded.size >= _BATCH_BYTES:
            parts.append(_collect_batch(store, loaded, now_ms, model, dims))
            loaded = Loaded()
            if stop():
                raise Stopped
    if loaded.users:
        parts.append(_collect_batch(store, loaded, now_ms, model, dims))
    return Profiles.joined(parts)


def _collect_batch(store: RocksStore, loaded: Loaded, now_ms: int, model: int, dims: StoreDims) -> Profiles:
    users = np.array(loaded.users, np.uint64)
    n = len(users)
    out = unfilled_lookup(n, 0, dims)
    # As in a look-up, but a profile counts as long as the aggregate does.
    store.answer(
        arena_of(loaded), users, np.zeros(n + 1, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.uint32),
        np.full(n, now_ms, np.int64), model, dims, out, ttl_ms=store.settings.window_ms,
    )  # fmt: skip
    profiles, good = unit(out.profile)
    live = out.aggregate_count > 0
    keep = live & good
    return Profiles(
        users[keep], profiles[keep], out.aggregate[keep], out.aggregate_ts_ms[keep], int((live & ~good).sum())
    )


def newest_model(store: RocksStore) -> tuple[int, StoreDims] | None:
    """FM version and lengths that most chunks with pairs have; None in a store without any."""
    seen: Counter[tuple[int, StoreDims]] = Counter()
    longest: dict[int, tuple[int, int]] = {}
    for _, _, _, _, value in store.scan():
        c = decode_embedding(value)
        s, p = longest.get(c.model, (0, 0))
        longest[c.model] = max(s, len(c.state)), max(p, len(c.profile))
        if len(c.items):
            seen[c.model, StoreDims(c.vectors.shape[1], 0, 0)] += 1
    if not seen:
        return None
    (model, dims), _ = seen.most_common(1)[0]
    return model, StoreDims(dims.dim, *longest[model])
