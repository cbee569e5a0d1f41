"""The store's contract. RocksDB (`state.store`) and the in-memory reference (`state.reference`) keep it alike.

A store holds one changelog partition: embedding chunks (`topics.packed.EmbeddingChunk`) of that partition's users.

Time is event time. For a look-up at `now` a chunk of event time `ts` is

- *visible* when ``ts <= now``: a request never sees what was computed from later events, however late it is ranked;
- *live* for direct entries and the user state when ``now < ts + ttl_ms``, for aggregates when ``now < ts + window_ms``.

`expire(clock)` moves a floor: from then on `now` is taken as at least `clock - grace_ms` when liveness is judged, and
whole segments below it leave memory and disk. Expired data is never returned.

Model version: only chunks of the version asked for are seen.

A pair written twice gives its newest chunk by (event time, changelog offset). Aggregates are means over the user's
visible live *pairs* (each pair once, its newest vector), so repeats do not weigh double.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from topics.fields import setting

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]

_YEAR_MS = 366 * 86_400_000


@dataclass(frozen=True, slots=True)
class StoreSettings:
    ttl_ms: int = setting(6 * 3_600_000, "how long an embedding and a user state are served", low=1, high=_YEAR_MS)
    window_ms: int = setting(24 * 3_600_000, "how long a pair counts in the means", low=1, high=_YEAR_MS)
    grace_ms: int = setting(
        3_600_000, "how far behind the clock a late look-up may still see what was live at its own time",
        low=0, high=_YEAR_MS,
    )  # fmt: skip
    segments_per_ttl: int = setting(
        4, "parts of a TTL that are dropped whole when their time is over", low=1, high=1000
    )
    cache_bytes: int = setting(
        64 << 20, "memory of a partition's store: users ready for look-up, blocks, write buffers", low=1 << 20
    )
    lock_timeout_s: float = setting(10.0, "wait for a store that another process holds, before a stand-in", low=0)
    sync: bool = setting(False, "wait for the disk at every write; off, the changelog brings back what is lost")


@dataclass(slots=True)
class ChangelogRecord:
    offset: int
    value: bytes


@dataclass(slots=True)
class ApplyResult:
    applied: int
    pairs: int
    expired: int
    """records that were already expired and not written"""
    rejected: list[tuple[int, str]]
    """(offset, reason) of records that are not chunks; they are skipped and counted, the rest is applied"""


@dataclass(slots=True)
class Lookup:
    """Answers aligned with the question: N pairs, B users. -1 in a time says "none"; its numbers are zero."""

    vectors: F32
    """[N, d]"""
    ts_ms: I64
    """[N] event time of the vector"""
    topic: F32
    """[N, d] mean over the user's live pairs of the pair's topic"""
    topic_count: I32
    """[N]"""
    topic_ts_ms: I64
    """[N] newest event time in the mean"""
    aggregate: F32
    """[B, d]"""
    aggregate_count: I32
    """[B]"""
    aggregate_ts_ms: I64
    """[B]"""
    state: F32
    """[B, s] newest live user state"""
    state_ts_ms: I64
    """[B]"""
    fingerprint: U64
    """[B] history fingerprint of the newest live state, 0 for none"""
    profile: F32
    """[B, p] profile vector of the newest live state"""
    pair_fingerprint: U64
    """[N] history fingerprint of the chunk that gave the vector, 0 for none"""


@dataclass(frozen=True, slots=True)
class StoreDims:
    """Lengths of the model that asks; a chunk of other lengths is another model's and is not seen.

    A chunk may leave out its state, its profile or its pairs (length 0): pair chunks carry no state, state chunks no
    pairs. `Lookup.state`, `fingerprint` and `profile` come from the newest visible live chunk that has them."""

    dim: int
    state: int
    profile: int


class EmbeddingStore(Protocol):
    @property
    def position(self) -> int | None:
        """Next changelog offset to apply; None in a new store."""
        ...

    @property
    def clock_ms(self) -> int:
        """Largest clock given to `expire`; -1 in a new store."""
        ...

    def apply(self, records: Sequence[ChangelogRecord], next_offset: int | None = None) -> ApplyResult:
        """One WriteBatch: chunks, position and clock. Idempotent; any order within a replay. `next_offset` defaults to
        the last record's offset + 1 and never moves the position backwards."""
        ...

    def lookup(
        self, users: U64, splits: I64, items: U64, topics: U32, now_ms: I64, model: int, dims: StoreDims
    ) -> Lookup:
        """One answer for each request and item; nothing known is an answer too (-1 in its time), not an error.

        users [B] (a user may come twice), splits [B+1] (items of request b are splits[b]:splits[b+1], ascending from 0
        to N), items [N], topics [N] of the items, now_ms [B], model: version hash of the FM that asks. Takes other
        dtypes and layouts, at the price of a copy. Every answer is an array of its own.

        Raises `ValueError` when lengths do not fit or splits do not ascend within the items; `StoreError` when the
        store is closed or its disk cannot be read (damage is marked: the next opening rebuilds it)."""
        ...

    def expire(self, clock_ms: int) -> int:
        """Moves the clock (never backwards) and drops dead segments; returns how many segments went."""
        ...

    def stats(self) -> dict[str, int]: ...

    def checkpoint(self, path: Path) -> None: ...

    def close(self) -> None: ...
