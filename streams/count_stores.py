"""The rolling counts of a ranker: a store of count chunks for each partition held, and the items of all partitions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from state.count_store import ItemCounts, PairCounts, parse_counts, store_settings
from state.count_warm import warm_counts
from streams.clock import EventClock
from streams.settings import Settings
from streams.stores import Stores

log = logging.getLogger(__name__)


class CountStores:
    """`trained_lag_ms`: of the bundle, where it says so."""

    def __init__(self, folder: Path, settings: Settings, trained_lag_ms: int | None = None) -> None:
        warm_counts()
        self._settings = settings.counter.counts(trained_lag_ms)
        log.info("rolling counts: as of %d ms before each impression, %d items at most",
                 self._settings.lag_ms, self._settings.max_items)  # fmt: skip
        self._stores = Stores(folder, settings, store_settings(settings.store, self._settings), parse_counts)
        self.items = ItemCounts(self._settings, EventClock().see)
        self.by_partition: dict[int, PairCounts] = {}

    def open(self, partition: int, log_bounds: tuple[int, int]) -> int:
        start = self._stores.open(partition, log_bounds)
        self.by_partition[partition] = PairCounts(self._stores.by_partition[partition], self.items, self._settings)
        return start

    def close(self, partition: int) -> None:
        self.by_partition.pop(partition, None)
        self._stores.close(partition)

    def follow(self, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], next_offset: int) -> None:
        self._stores.follow(partition, offsets, values, next_offset)

    def restored(self, partition: int) -> None:
        self._stores.restored(partition)
        self.by_partition[partition].restored = True

    def advance(self, partition: int, clock_ms: int) -> None:
        """`clock_ms`: event time of the partition's impressions."""
        self._stores.expire(partition, clock_ms)

    def totals(self) -> dict[str, int]:
        stores = {f"counts_{name}": n for name, n in self._stores.counters.items()}
        items = {f"item_counts_{name}": n for name, n in self.items.counters.items()}
        held = {"item_counts_items": self.items.items, "item_counts_bytes": self.items.nbytes}
        return {**stores, **items, **held, "item_counts_restored": int(self.items.restored)}
