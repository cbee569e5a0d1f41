"""`OfflineCounts`: rolling counts over a whole log in memory, for training and backtest.

Events lie in sorted runs, about 40 bytes an ad; a look-up is a few binary searches in each. Added events make a run of
their own and runs of like size are put together, so there are few of them however the events come. Look-ups are exactly
those of `state.counts`: `ReferenceCounts` gives the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from state.counts import BUCKET_MS, DAY_MS, HOUR_MS, I64, U32, U64, Counts, CountSettings
from state.jit import kernel


class OfflineCounts:
    """`CountSource` without limits on items, users and time. Not thread-safe."""

    def __init__(self, settings: CountSettings = CountSettings()) -> None:
        self.settings = settings
        self._shown: list[_Run] = []
        self._clicked: list[_Run] = []
        self._oldest_ms = -(2**63)

    def shown(self, users: U64, ts_ms: I64, splits: I64, items: U64) -> None:
        """Impressions of users [E] at ts_ms [E], with the ads ``items[splits[e]:splits[e + 1]]`` each."""
        _push(self._shown, users, ts_ms, splits, items, self._oldest_ms)

    def clicked(self, users: U64, ts_ms: I64, splits: I64, items: U64) -> None:
        """Feedback, likewise with the ads clicked."""
        _push(self._clicked, users, ts_ms, splits, items, self._oldest_ms)

    def expire(self, now_ms: int) -> None:
        """No look-up before `now_ms` follows: what none would count is forgotten, in time."""
        self._oldest_ms = now_ms - self.settings.lag_ms - DAY_MS - HOUR_MS
        for runs in (self._shown, self._clicked):
            runs[:] = [run for run in runs if run.newest_ms >= self._oldest_ms]

    def lookup(self, users: U64, splits: I64, items: U64, now_ms: I64) -> Counts:
        """users [B], splits [B+1], items [N], now_ms [B]."""
        out = Counts.unknown(len(users), len(items))
        out.known[:] = True
        asked = now_ms - self.settings.lag_ms
        for run in self._shown:
            _count(
                run.users, run.user_starts, run.user_ts, run.pair_items, run.pair_ts, run.items, run.item_starts,
                run.item_ts, users, splits, items, asked, out.user_shown, out.pair_shown, out.pair_ts_ms,
                out.item_shown_hour, out.item_shown_day,
            )  # fmt: skip
        nothing = np.zeros(len(items), np.int64)
        for run in self._clicked:
            _count(
                run.users, run.user_starts, run.user_ts, run.pair_items, run.pair_ts, run.items, run.item_starts,
                run.item_ts, users, splits, items, asked, out.user_clicked, out.pair_clicked, nothing,
                out.item_clicked_hour, out.item_clicked_day,
            )  # fmt: skip
        return out


@dataclass(slots=True)
class _Run:
    """E ads of one kind, sorted in three ways; users [U] and items [I] ascend."""

    users: U64
    user_starts: I64
    """[U+1] into the next three, which are sorted by user first"""
    user_ts: I64
    """[E] by user and time"""
    pair_items: U64
    """[E] by user, item and time"""
    pair_ts: I64
    """[E] likewise"""
    items: U64
    item_starts: I64
    """[I+1]"""
    item_ts: I64
    """[E] by item and time"""
    newest_ms: int

    @classmethod
    def of(cls, users: U64, items: U64, ts_ms: I64) -> _Run:
        """users, items and ts_ms [E]"""
        by_item = np.lexsort((ts_ms, items))
        by_user = np.lexsort((ts_ms, users))
        by_pair = np.lexsort((ts_ms, items, users))
        keys, starts = _groups(users[by_user])
        item_keys, item_starts = _groups(items[by_item])
        return cls(
            keys, starts, ts_ms[by_user], items[by_pair], ts_ms[by_pair], item_keys, item_starts, ts_ms[by_item],
            int(ts_ms.max()),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.user_ts)

    def with_(self, other: _Run, oldest_ms: int) -> _Run:
        """Both, without what is older than `oldest_ms`; `other` has something that is not."""
        users = np.concatenate([np.repeat(run.users, np.diff(run.user_starts)) for run in (self, other)])
        items = np.concatenate([self.pair_items, other.pair_items])
        ts_ms = np.concatenate([self.pair_ts, other.pair_ts])
        keep = ts_ms >= oldest_ms
        return _Run.of(users[keep], items[keep], ts_ms[keep])


def _push(runs: list[_Run], users: U64, ts_ms: I64, splits: I64, items: U64, oldest_ms: int) -> None:
    sizes = np.diff(splits)
    ts_ms = np.repeat(ts_ms, sizes)
    keep = ts_ms >= oldest_ms
    if not keep.any():
        return
    run = _Run.of(np.repeat(users, sizes)[keep], items[keep], ts_ms[keep])
    while runs and len(runs[-1]) < 2 * len(run):
        run = runs.pop().with_(run, oldest_ms)
    runs.append(run)


def _groups(keys: U64) -> tuple[U64, I64]:
    """Sorted keys -> the distinct ones and where each begins, with the end."""
    begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[begins], np.append(begins, len(keys)).astype(np.int64)


@kernel
def _before(values: npt.NDArray[np.generic], lo: int, hi: int, limit: int) -> int:
    """First place in the sorted values[lo:hi] that is not below `limit`, counted from 0."""
    while lo < hi:
        middle = (lo + hi) // 2
        if values[middle] < limit:
            lo = middle + 1
        else:
            hi = middle
    return lo


@kernel
def _count(
    run_users: U64, user_starts: I64, user_ts: I64, pair_items: U64, pair_ts: I64, run_items: U64, item_starts: I64,
    item_ts: I64, users: U64, splits: I64, items: U64, asked_ms: I64, user_n: U32, pair_n: U32, pair_newest: I64,
    hour_n: U32, day_n: U32,
) -> None:  # fmt: skip
    """Adds what the run counts to the last five arguments."""
    for b in range(len(users)):
        asked = asked_ms[b]
        bucket, hour = asked - asked % BUCKET_MS, asked - asked % HOUR_MS
        user = _before(run_users, 0, len(run_users), users[b])
        known = user < len(run_users) and run_users[user] == users[b]
        if known:
            first, last = user_starts[user], user_starts[user + 1]
            end = _before(user_ts, first, last, asked + 1)
            user_n[b] += end - _before(user_ts, first, last, asked - DAY_MS + 1)
        for n in range(splits[b], splits[b + 1]):
            k = _before(run_items, 0, len(run_items), items[n])
            if k == len(run_items) or run_items[k] != items[n]:
                continue
            end = _before(item_ts, item_starts[k], item_starts[k + 1], bucket)
            hour_n[n] += end - _before(item_ts, item_starts[k], end, bucket - HOUR_MS)
            day_n[n] += end - _before(item_ts, item_starts[k], end, hour - 23 * HOUR_MS)
            if not known:
                continue
            begin = _before(pair_items, first, last, items[n])
            stop = begin
            while stop < last and pair_items[stop] == items[n] and pair_ts[stop] <= asked:
                if pair_ts[stop] > asked - DAY_MS:
                    pair_n[n] += 1
                    pair_newest[n] = max(pair_newest[n], pair_ts[stop])
                stop += 1
