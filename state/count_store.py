"""`ItemCounts` and `PairCounts`: the rolling counts of `state.counts` as serving keeps them.

Both are built from logs alone (`topics.packed_counts`), by partition and offset, and a record given twice changes
nothing. Nothing is ever added up on disk:

- a user's events are chunks in a `RocksStore` (key user, event time, offset; segments, position, wipe and rebuild as
  for embeddings), and a look-up counts them;
- item counts are sums over records of all partitions, held in memory and rebuilt from `item-counts` when a process
  starts. They take an entry of 12 bytes for each item and 5 minutes in which it was shown, an hour once that is
  `EXACT_MS` old.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from state import count_kernels, kernels
from state.api import ChangelogRecord, StoreSettings
from state.cache import Arena
from state.chunk import Batch, parse_with
from state.counts import BUCKET_MS, DAY_MS, HOUR_MS, I64, U64, Counts, CountSettings
from state.store import RocksStore
from topics.errors import DecodeError
from topics.packed_counts import decode_count, decode_items

log = logging.getLogger(__name__)

EXACT_MS = 2 * HOUR_MS
"""how far behind the newest item counts a look-up may be; it asks for nothing older than this and a day"""
SILENT_MS = HOUR_MS
"""counts that end this long before the moment asked for are not answered with: the counter does not run"""
_SHOWN_REASONS = 3


def store_settings(store: StoreSettings, counts: CountSettings) -> StoreSettings:
    """Of a store of count chunks: they live as long as a look-up may count them. Chunks are small, a quarter of the
    cache holds as many users as the whole of it holds users with embeddings."""
    life = DAY_MS + counts.lag_ms
    return dataclasses.replace(
        store, ttl_ms=life, window_ms=life, cache_bytes=max(1 << 20, store.cache_bytes // 4)
    )  # fmt: skip


def parse_counts(records: Sequence[ChangelogRecord]) -> Batch:
    """Checks and columns of a batch of count chunks, for `RocksStore`."""
    return parse_with(records, count_kernels.scan, _facts)


def _facts(value: bytes | None) -> tuple[int, int, int]:
    chunk = decode_count(value)
    return chunk.user, chunk.ts_ms, len(chunk.items)


class ItemCounts:
    """Counts of all items, of all partitions. Used by one thread.

    `clock`: takes the time of each record's bucket and returns the stream's event time, -1 while that is not known; it
    decides what is old enough to leave memory. Look-ups do not depend on it but for how far back they may ask.
    `room`: items that there is room for at first.
    """

    def __init__(self, settings: CountSettings, clock: Callable[[int], int], room: int = 1024) -> None:
        self._settings, self._clock, self._least = settings, clock, room
        self.restored = False
        """to be set when the log was read to its end; nothing is known before"""
        self.clock_ms = -1
        self.newest_ms = -1
        """newest bucket that was counted in"""
        self.position: dict[int, int] = {}
        """partition -> next offset"""
        self.counters = dict.fromkeys(("records", "repeated", "rejected", "refused", "compactions"), 0)
        self._full_hour = -1
        self._make(room, 4 * room)

    def _make(self, rows: int, entries: int) -> None:
        rows = min(rows, self._settings.max_items)
        self._keys = np.zeros(1 << (2 * rows - 1).bit_length(), np.uint64)
        self._rows = np.zeros(len(self._keys), np.int32)
        self._names = np.zeros(rows, np.uint64)
        self._starts = np.zeros(rows, np.int64)
        self._lengths, self._caps = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self._pool = np.empty((entries, 3), np.uint32)
        self._meta = np.zeros(3, np.int64)

    @property
    def items(self) -> int:
        return int(self._meta[count_kernels.ROWS])

    @property
    def nbytes(self) -> int:
        parts = (self._keys, self._rows, self._names, self._starts, self._lengths, self._caps, self._pool)
        return sum(p.nbytes for p in parts)

    def apply(self, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], next_offset: int) -> None:
        """Records of one partition of `item-counts`, in order. What is no record of deltas is passed over, counted."""
        position = self.position.get(partition, 0)
        for offset, value in zip(offsets, values, strict=True):
            if offset < position:
                self.counters["repeated"] += 1
                continue
            try:
                d = decode_items(value)
            except DecodeError as e:
                self.counters["rejected"] += 1
                if self.counters["rejected"] <= _SHOWN_REASONS:
                    log.warning("item counts: partition %d offset %d passed over: %s", partition, offset, e)
                continue
            self.clock_ms = max(self.clock_ms, self._clock(d.bucket_ms))
            self.newest_ms = max(self.newest_ms, d.bucket_ms)
            self._add(d.bucket_ms // BUCKET_MS, d.items, d.shown, d.clicked)
            self.counters["records"] += 1
        self.position[partition] = max(position, next_offset)

    def _add(self, bucket: int, *columns: Any) -> None:
        items, shown, clicked = (np.require(c, requirements=["A", "W"]) for c in columns)
        at = 0
        while at < len(items):
            full = self.items == self._settings.max_items and self._full_hour == self.clock_ms // HOUR_MS
            at = count_kernels.add(
                at, bucket, items, shown, clicked, full, self._keys, self._rows, self._names, self._starts,
                self._lengths, self._caps, self._pool, self._meta,
            )  # fmt: skip
            if at < len(items):
                self._make_room()
        self.counters["refused"] += int(self._meta[count_kernels.REFUSED])
        self._meta[count_kernels.REFUSED] = 0

    def _make_room(self) -> None:
        """Into new arrays that are a third full: what is old stays behind."""
        hour, back, exact = self.clock_ms // HOUR_MS, (EXACT_MS + DAY_MS) // HOUR_MS, EXACT_MS // HOUR_MS
        oldest, coarse = (hour - back, hour - exact - 1) if self.clock_ms >= 0 else (-1, -1)
        limits = oldest * count_kernels.PER_HOUR, coarse * count_kernels.PER_HOUR
        old = self.items, self._names, self._starts, self._lengths, self._pool
        rows, entries = count_kernels.survey(*limits, *old)
        self._make(max(self._least, 3 * rows), 3 * entries + 4 * self._least)
        count_kernels.compact(
            *limits, *old, self._keys, self._rows, self._names, self._starts, self._lengths, self._caps, self._pool,
            self._meta,
        )  # fmt: skip
        self.counters["compactions"] += 1
        if rows == self._settings.max_items:
            self._full_hour = hour  # nothing more comes free before the next hour

    def known(self, asked: I64) -> np.ndarray:
        """[B] whether there is something to answer a look-up as of `asked` with."""
        if not self.restored or self.newest_ms < 0:
            return np.zeros(len(asked), bool)
        return (asked <= self.newest_ms + BUCKET_MS + SILENT_MS) & (asked >= self.clock_ms - EXACT_MS)

    def lookup(self, splits: I64, items: U64, asked: I64, out: Counts) -> None:
        """Fills the item columns of `out` for the requests that are `known`."""
        count_kernels.count_items(
            splits, items, asked, out.known, self._keys, self._rows, self._starts, self._lengths, self._pool,
            out.item_shown_hour, out.item_clicked_hour, out.item_shown_day, out.item_clicked_day,
        )  # fmt: skip


class PairCounts:
    """A `CountSource`: one partition's users from `store` (opened with `parse_counts`), all items from `items`."""

    def __init__(self, store: RocksStore, items: ItemCounts, settings: CountSettings) -> None:
        self.store, self.items, self._settings = store, items, settings
        self.restored = False
        """to be set when the partition's log was read to its end; nothing is known before"""

    def lookup(self, users: U64, splits: I64, items: U64, now_ms: I64) -> Counts:
        """users [B], splits [B+1], items [N], now_ms [B]. A request is `known` when both sides are restored, the
        counter runs, and `now` is not so far behind that what it asks for has left memory or disk."""
        if len(splits) != len(users) + 1 or len(now_ms) != len(users) or (len(splits) and splits[-1] != len(items)):
            raise ValueError(f"{len(users)} users, {len(splits)} splits, {len(now_ms)} times, {len(items)} items")
        out = Counts.unknown(len(users), len(items))
        if not self.restored or not len(users):
            return out
        users, items = (np.require(a, np.uint64, ["C", "A", "W"]) for a in (users, items))
        splits, now_ms = (np.require(a, np.int64, ["C", "A", "W"]) for a in (splits, now_ms))
        asked = now_ms - self._settings.lag_ms
        floor = self.store.floor_ms
        out.known = self.items.known(asked) & (now_ms >= floor)
        if not out.known.any():
            return out
        self.items.lookup(splits, items, asked, out)
        dead_ts = floor - self.store.settings.ttl_ms
        heads = np.empty(len(users), np.int64)

        def count(arena: Arena, first: int, last: int) -> None:
            kernels.heads_of(users, first, last, arena.keys, arena.heads, heads)
            count_kernels.count_pairs(
                first, last, splits, items, asked, out.known, dead_ts, arena.buf, heads,
                out.pair_shown, out.pair_clicked, out.pair_ts_ms, out.user_shown, out.user_clicked,
            )  # fmt: skip

        self.store.visit(users, count)
        return out
