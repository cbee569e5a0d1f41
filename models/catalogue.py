"""What is known of items: the feature columns of a `FeatureSpec`, by item hash, in memory and bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from models import kernels
from models.api import CATEGORY_BUCKETS, F32, U32, U64, Feature, FeatureSpec
from topics.errors import SettingsError
from topics.events import FeatureValue, Item
from topics.ids import hash_id

FLOAT32_MAX = 3.4e38
_RECENT_WRITES = 256


class Values:
    """Turns feature values into float32 columns, the same everywhere.

    A number passes (booleans as 0/1, clipped to what float32 holds); a category becomes ``1 + xxh3 % 2**20``, where 1,
    1.0 and True are the same category. Missing is 0. A value of the wrong kind counts in `mistyped` and is 0.
    """

    def __init__(self, capacity: int = 1 << 18) -> None:
        self._capacity = capacity
        self._memo: dict[str | int | float, float] = {}
        self.mistyped = 0

    def one(self, feature: Feature, value: FeatureValue) -> float:
        if value is None:
            return 0.0
        kind = type(value)
        if feature.kind == "category":
            if kind is list:
                self.mistyped += 1
                return 0.0
            return self._category(value)  # type: ignore[arg-type]
        if kind is float or kind is int or kind is bool:
            if -FLOAT32_MAX < value < FLOAT32_MAX:  # type: ignore[operator]
                return float(value)  # type: ignore[arg-type]
            if value != value:
                self.mistyped += 1
                return 0.0
            return FLOAT32_MAX if value > 0 else -FLOAT32_MAX  # type: ignore[operator]
        self.mistyped += 1
        return 0.0

    def _category(self, value: str | int | float) -> float:
        memo = self._memo
        bucket = memo.get(value)
        if bucket is None:
            key = value
            if type(key) is bool or (type(key) is float and key.is_integer()):
                key = int(key)
            bucket = float(1 + hash_id(str(key)) % CATEGORY_BUCKETS)
            if len(memo) >= self._capacity:
                memo.clear()
            if type(value) is not str or len(value) <= 256:
                memo[value] = bucket
        return bucket


class Catalogue:
    """Item features as columns. Not thread-safe: the owner updates between batches.

    The last record of an id replaces the one before, as on a compacted topic; an item that was deleted is as one that
    was never there. At most `capacity` items are kept; beyond it the quarter that was written longest ago is dropped
    and counted in `evicted`.
    """

    def __init__(self, spec: FeatureSpec, capacity: int = 1 << 22) -> None:
        names = [f.name for f in spec.item]
        if len(set(names)) < len(names) or len({f.name for f in spec.request}) < len(spec.request):
            raise SettingsError("spec", names, "a feature is named twice; name each once")
        self.topic_column = -1
        if spec.topic is not None:
            if Feature(spec.topic, "category") not in spec.item:
                raise SettingsError("spec.topic", spec.topic, f"name a category among the item features {names}")
            self.topic_column = names.index(spec.topic)
        if capacity < 4:
            raise SettingsError("catalogue.capacity", capacity, "keep at least 4 items")
        self.spec = spec
        self.values = Values()
        self.evicted = 0
        self.version = 0
        """grows with every update that changed something; results that depend on the catalogue are stale then"""
        self._capacity = capacity
        self._keys = np.zeros(16, np.uint64)
        self._rows = np.zeros(16, np.int32)
        self._size = 0
        self._slots = 0
        """of the hash table in use: those of the items, and of ids deleted since it was made, whose row is -1"""
        self._ids = np.zeros(8, np.uint64)
        self._columns = np.zeros((8, len(spec.item)), np.float32)
        self._written = np.zeros(8, np.int64)
        self._clock = 0
        self._recent: deque[tuple[int, U64]] = deque()
        """(version, ids written then) of the last writes"""
        self._forgotten = 0
        """writes up to this version are not in `_recent`"""

    def __len__(self) -> int:
        return self._size

    def update(self, items: Iterable[Item]) -> int:
        """Takes the records in order; returns how many there were."""
        n = 0

        def each() -> Iterator[tuple[int, Item]]:
            nonlocal n
            for item in items:
                n += 1
                yield hash_id(item.id), item

        self.apply(each())
        return n

    def apply(self, changes: Iterable[tuple[int, Item | None]]) -> None:
        """(id's hash, its record) in order; None for the record: the item was deleted."""
        latest: dict[int, Item | None] = {}
        for h, item in changes:
            latest.pop(h, None)  # so that the order is that of the last write
            latest[h] = item
            if len(latest) >= self._capacity // 2:
                self._take(latest)
                latest = {}
        self._take(latest)

    def features(self, items: U64) -> F32:
        """float32[c, n] columns of `spec.item`; zeros for an unknown item."""
        return kernels.take_columns(self._columns, self.rows(items))

    def topics(self, items: U64) -> U32:
        """uint32[n] topic ids of `spec.topic`; 0 where unknown or the spec names none."""
        if self.topic_column < 0:
            return np.zeros(len(items), np.uint32)
        rows = self.rows(items)
        column = self._columns[:, self.topic_column]
        return np.where(rows >= 0, column[rows], 0).astype(np.uint32)

    def changed_since(self, version: int) -> U64 | None:
        """uint64[n] ids whose records came, or that were deleted, after that `version`, each once; None: not known any
        more, take all for changed."""
        if version < self._forgotten:
            return None
        return np.unique(np.concatenate([np.zeros(0, np.uint64), *(ids for v, ids in self._recent if v > version)]))

    def known(self, items: U64) -> np.ndarray:
        """bool[n]: which items have a record."""
        known: np.ndarray = self.rows(items) >= 0
        return known

    def rows(self, items: U64) -> np.ndarray:
        rows: np.ndarray = kernels.table_find(self._keys, self._rows, np.ascontiguousarray(items, np.uint64))
        return rows

    def _take(self, latest: dict[int, Item | None]) -> None:
        written = {h: item for h, item in latest.items() if item is not None}
        if len(written) < len(latest):
            self._delete(np.fromiter((h for h, item in latest.items() if item is None), np.uint64))
        if written:
            self._write(written)

    def _delete(self, ids: U64) -> None:
        """The last rows take the places of those that go."""
        ids = ids[self.rows(ids) >= 0]
        if not len(ids):
            return
        gone = self.rows(ids)
        size = self._size - len(ids)
        places = gone[gone < size]
        last = np.arange(size, self._size, dtype=np.int32)
        moved = last[~np.isin(last, gone)]
        for column in (self._ids, self._columns, self._written):
            column[places] = column[moved]
        kernels.table_insert(self._keys, self._rows, self._ids[places], places)
        kernels.table_insert(self._keys, self._rows, ids, np.full(len(ids), -1, np.int32))
        self._size = size
        self._changed(ids)

    def _write(self, latest: dict[int, Item]) -> None:
        one, spec = self.values.one, self.spec.item
        ids = np.fromiter(latest, np.uint64, len(latest))
        values = np.array(
            [[one(f, i.features.get(f.name)) for f in spec] for i in latest.values()], np.float32
        ).reshape(len(ids), len(spec))
        rows = self.rows(ids)
        new = rows < 0
        if self._size + int(new.sum()) > self._capacity:
            self._evict(int(new.sum()))
            rows = self.rows(ids)
            new = rows < 0
        added = int(new.sum())
        self._grow(self._size + added)
        rows[new] = np.arange(self._size, self._size + added, dtype=np.int32)
        self._ids[rows] = ids
        self._columns[rows] = values
        self._written[rows] = np.arange(self._clock, self._clock + len(ids))
        self._clock += len(ids)
        kernels.table_insert(self._keys, self._rows, ids[new], rows[new])
        self._size += added
        self._slots += added
        self._changed(ids)

    def _changed(self, ids: U64) -> None:
        self.version += 1
        self._recent.append((self.version, ids))
        if len(self._recent) > _RECENT_WRITES:
            self._forgotten = self._recent.popleft()[0]

    def _grow(self, size: int) -> None:
        if size > len(self._ids):
            rows = max(2 * len(self._ids), size)
            for name in ("_ids", "_columns", "_written"):
                old = getattr(self, name)
                grown = np.zeros((rows, *old.shape[1:]), old.dtype)
                grown[: self._size] = old[: self._size]
                setattr(self, name, grown)
        if 2 * (self._slots + size - self._size) > len(self._keys):
            self._rebuild(size)

    def _rebuild(self, size: int) -> None:
        # With room beyond the half for ids that come while others are deleted, or it would be made anew for each few.
        room = 2 if self._slots == self._size else 3
        length = 1 << max(4, (room * size).bit_length())
        self._slots = self._size
        self._keys = np.zeros(length, np.uint64)
        self._rows = np.zeros(length, np.int32)
        kernels.table_insert(self._keys, self._rows, self._ids[: self._size], np.arange(self._size, dtype=np.int32))

    def _evict(self, coming: int) -> None:
        drop = min(self._size, max(self._capacity // 4, self._size + coming - self._capacity))
        keep = np.sort(np.argsort(self._written[: self._size], kind="stable")[drop:])
        n = len(keep)
        for name in ("_ids", "_columns", "_written"):
            column = getattr(self, name)
            column[:n] = column[keep]
        self._slots = self._size = n
        self.evicted += drop
        self._recent.clear()
        self._forgotten = self.version + 1  # with the write that is going on
        self._rebuild(n)
