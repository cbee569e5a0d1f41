"""The state stores of the partitions that a role holds: opened, followed, expired and closed with them."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from state.api import ChangelogRecord, StoreSettings
from state.chunk import parse_batch
from state.restore import RestoreReporter, plan_restore
from state.store import Parser, RocksStore
from streams import failpoints
from streams.clock import EventClock
from streams.places import close_place, open_place
from streams.settings import Settings

log = logging.getLogger(__name__)

_SECOND_WAIT_S = 0.5


class Stores:
    """The state stores of the partitions held, one RocksDB each, and their event clocks."""

    def __init__(
        self, folder: Path, settings: Settings, store: StoreSettings | None = None, parse: Parser = parse_batch
    ) -> None:
        """`store`: other settings than `settings.store`; `parse`: what the stores hold, see `RocksStore`."""
        self.folder, self._settings, self._store, self._parse = folder, settings, store or settings.store, parse
        self.by_partition: dict[int, RocksStore] = {}
        self._clocks: dict[int, EventClock] = {}
        self._own: dict[int, set[int]] = {}
        self._restores: dict[int, RestoreReporter] = {}
        self._stood_in_s = float("-inf")
        """when a stand-in was last taken"""
        self.counters: Counter[str] = Counter()

    def open(self, partition: int, log_bounds: tuple[int, int]) -> int:
        """Returns where to follow the log from."""
        store = self._open_place(partition)
        plan = plan_restore(store.position, *log_bounds)
        if plan.action == "wipe":
            store.wipe(plan.reason)
            self.counters["stores_wiped"] += 1
        self._restores[partition] = RestoreReporter(f"{self.folder.name}/{partition}", plan)
        self.by_partition[partition] = store
        self._clocks[partition] = EventClock(store.clock_ms)
        self._own[partition] = set()
        return plan.start

    def _open_place(self, partition: int) -> RocksStore:
        """A frozen process holds all of its stores: it is waited for once, not once per partition."""
        settings = self._store
        if time.monotonic() - self._stood_in_s < 3 * settings.lock_timeout_s:
            settings = dataclasses.replace(settings, lock_timeout_s=_SECOND_WAIT_S)
        store = open_place(self.folder, partition, settings, self._parse)
        if store.path.name != str(partition):
            self._stood_in_s = time.monotonic()
            self.counters["stores_stood_in"] += 1
        return store

    def close(self, partition: int) -> None:
        store = self.by_partition.pop(partition, None)
        self._clocks.pop(partition, None)
        self._own.pop(partition, None)
        self._restores.pop(partition, None)
        if store is not None:
            close_place(store, self._settings.loop.shutdown_deadline_s)

    def follow(self, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], next_offset: int) -> None:
        own = self._own[partition]
        records = []
        for offset, value in zip(offsets, values, strict=True):
            if offset in own:
                own.discard(offset)
            else:
                records.append(ChangelogRecord(offset, value or b""))
        failpoints.hit_soon("in_write")
        result = self.by_partition[partition].apply(records, next_offset)
        self._tally(result.applied, result.pairs, result.expired, result.rejected, partition)
        restore = self._restores.get(partition)
        if restore is not None:
            restore.update(next_offset)

    def restored(self, partition: int) -> None:
        self._restores.pop(partition, None)

    def apply_own(self, partition: int, records: Sequence[ChangelogRecord]) -> None:
        """Our own committed outputs, ahead of the follower: the position stays where the follower is."""
        store = self.by_partition.get(partition)
        if store is None:
            return
        behind = store.position or 0
        ahead = [r for r in records if r.offset >= behind]
        failpoints.hit_soon("in_write")
        store.apply(ahead, next_offset=behind)
        self._own[partition].update(r.offset for r in ahead)

    def advance(self, partition: int, ts_ms: Sequence[int]) -> None:
        """Event times of this partition's input, in order: they move its clock, and the clock expires segments."""
        clock = self._clocks[partition]
        before, late, doubted = clock.now_ms, clock.late, clock.jumps_doubted
        for ts in ts_ms:
            clock.see(ts)
        self.counters["events_late"] += clock.late - late
        self.counters["jumps_doubted"] += clock.jumps_doubted - doubted
        if clock.now_ms > before:
            self.expire(partition, clock.now_ms)

    def expire(self, partition: int, clock_ms: int) -> None:
        """Gives the store its clock, now and then."""
        step = self._store.ttl_ms // (8 * self._store.segments_per_ttl)
        store = self.by_partition[partition]
        if clock_ms >= store.clock_ms + step:
            self.counters["segments_dropped"] += store.expire(clock_ms)

    def clock_ms(self, partition: int) -> int:
        """Event time of the partition's input, -1 before its first events."""
        return self._clocks[partition].now_ms

    def _tally(self, applied: int, pairs: int, expired: int, rejected: list[tuple[int, str]], partition: int) -> None:
        self.counters["chunks_applied"] += applied
        self.counters["pairs_applied"] += pairs
        self.counters["chunks_expired"] += expired
        self.counters["chunks_rejected"] += len(rejected)
        for offset, reason in rejected[:3]:
            log.warning("changelog partition %d offset %d is no chunk: %s; passed over", partition, offset, reason)
