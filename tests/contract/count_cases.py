"""What the tests of the rolling counts share: a log of events as the counter writes it, and the reference beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from state.api import ChangelogRecord
from state.counts import BUCKET_MS, HOUR_MS, Counts, CountSettings
from state.counts_reference import ReferenceCounts
from topics.packed_counts import CountChunk, ItemDeltas, encode_count, encode_items

T0 = 1_767_225_600_000
SETTINGS = CountSettings(lag_ms=10_000)
COLUMNS = tuple(Counts.__dataclass_fields__)
COUNTED = tuple(name for name in COLUMNS if name != "known")


@dataclass(frozen=True)
class Seen:
    """One impression or one feedback."""

    user: int
    ts_ms: int
    clicked: bool
    items: tuple[int, ...]


@dataclass
class CountLog:
    """`counts` and `item-counts` of one partition; offsets have gaps, as transactions leave them."""

    chunks: list[ChangelogRecord] = field(default_factory=list)
    deltas: list[ChangelogRecord] = field(default_factory=list)
    reference: ReferenceCounts = field(default_factory=lambda: ReferenceCounts(SETTINGS))

    def write(self, events: Sequence[Seen]) -> None:
        """One batch of the counter."""
        sums: dict[int, tuple[Counter[int], Counter[int]]] = {}
        for e in events:
            items = np.array(e.items, np.uint64)
            self.chunks.append(
                ChangelogRecord(3 * len(self.chunks), encode_count(CountChunk(e.user, e.ts_ms, e.clicked, items)))
            )
            sums.setdefault(e.ts_ms - e.ts_ms % BUCKET_MS, (Counter(), Counter()))[e.clicked].update(e.items)
            (self.reference.clicked if e.clicked else self.reference.shown)(e.user, items, e.ts_ms)
        for bucket, (shown, clicked) in sums.items():
            names = np.array(sorted(shown | clicked), np.uint64)
            columns = (np.array([c[int(i)] for i in names], np.uint32) for c in (shown, clicked))
            self.deltas.append(ChangelogRecord(2 * len(self.deltas), encode_items(ItemDeltas(bucket, names, *columns))))


def question(asked: Sequence[tuple[int, tuple[int, ...], int]]) -> tuple[np.ndarray, ...]:
    """(user, items, now) of each request -> the arguments of `lookup`."""
    users = np.array([u for u, _, _ in asked], np.uint64)
    splits = np.cumsum([0, *(len(i) for _, i, _ in asked)]).astype(np.int64)
    items = np.array([i for _, of_user, _ in asked for i in of_user], np.uint64)
    return users, splits, items, np.array([now for _, _, now in asked], np.int64)


def assert_same(got: Counts, want: Counts, splits: np.ndarray, context: object = "") -> None:
    """Equal where `got` is known, zero where it is not."""
    pairs = np.repeat(got.known, np.diff(splits))
    for name in COUNTED:
        mine, theirs = getattr(got, name), getattr(want, name)
        known = got.known if name.startswith("user") else pairs
        nothing = -1 if name == "pair_ts_ms" else 0
        assert mine.dtype == theirs.dtype, name
        assert mine.tolist() == np.where(known, theirs, nothing).tolist(), (name, context)


def newest_bucket(log: CountLog) -> int:
    return max((ts - ts % BUCKET_MS for _, _, ts, _ in log.reference.events), default=-1)


HALF_HOUR = HOUR_MS // 2
