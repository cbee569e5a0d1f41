"""Rolling counts: how often an item, a user and a pair of both were shown and clicked before a moment.

Fed by impressions (every ad shown) and feedback (every ad clicked); a click counts from the feedback's own event time
on, not from the impression's. All times are event time, and what a look-up at `now` counts is a pure function of the
events, whenever they were written and in whatever order, so training, backtest and serving agree as long as the
pipeline keeps up within `CountSettings.lag_ms`. With ``asked = now - lag_ms``:

- *item, hour*: events with ``bucket(asked) - HOUR_MS <= ts < bucket(asked)``, where `bucket` rounds down to 5 minutes.
  An item's counts are over all users and come from other partitions in batches, hence the steps;
- *item, day*: events with ``hour(asked) - 23 h <= ts < bucket(asked)``, where `hour` rounds down to the hour;
- *user and pair*: events with ``asked - DAY_MS < ts <= asked``.

An ad twice in one impression counts twice; an event delivered twice by its source counts twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from topics.packed_counts import BUCKET_MS as BUCKET_MS

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


LAG_MS = 10_000


@dataclass(frozen=True, slots=True)
class CountSettings:
    lag_ms: int = LAG_MS
    """what is newer is not counted yet; as long as the pipeline is quicker, counts do not depend on its speed"""
    max_items: int = 1_000_000
    """items whose counts are kept in memory; beyond it new ones are not counted, and that is counted"""

    @classmethod
    def as_trained(cls, lag_ms: int | None) -> CountSettings:
        """For a bundle whose VM was trained with that lag; None: it does not say."""
        return cls(LAG_MS if lag_ms is None else lag_ms)


@dataclass(slots=True)
class Counts:
    """Answers aligned with the question: N pairs, B requests. All zero where nothing was counted."""

    known: npt.NDArray[np.bool_]
    """[B] False where there are no counts to ask: in a role that does not follow them, before they are restored, while
    no counter runs (nothing was counted for more than an hour), and for requests hours behind the stream"""
    item_shown_hour: U32
    """[N]"""
    item_clicked_hour: U32
    """[N]"""
    item_shown_day: U32
    """[N]"""
    item_clicked_day: U32
    """[N]"""
    pair_shown: U32
    """[N]"""
    pair_clicked: U32
    """[N]"""
    pair_ts_ms: I64
    """[N] event time of the newest impression of the pair that counts, -1 for none"""
    user_shown: U32
    """[B] ads shown to the user"""
    user_clicked: U32
    """[B]"""

    @staticmethod
    def unknown(requests: int, pairs: int) -> Counts:
        n, b = (lambda: np.zeros(pairs, np.uint32)), (lambda: np.zeros(requests, np.uint32))
        return Counts(np.zeros(requests, bool), n(), n(), n(), n(), n(), n(), np.full(pairs, -1, np.int64), b(), b())


PER_REQUEST = frozenset({"known", "user_shown", "user_clicked"})
"""Columns of `Counts` that have one value a request; the others have one a pair."""


class CountSource(Protocol):
    """One partition's users and all partitions' items."""

    def lookup(self, users: U64, splits: I64, items: U64, now_ms: I64) -> Counts:
        """users [B], splits [B+1], items [N], now_ms [B]."""
        ...
