"""Rolling counts to columns: the one feature code of training, backtest and serving.

`ROLLING`, with ``L(n) = log1p(n)``:

====================  =================================================================================================
known                 1 where there are counts; else the pair's whole row is 0, as in a role that follows none
item_shown_hour       L(shown), and so for the other counts: all users, last hour
item_clicked_hour     L(clicked)
item_rate_hour        ``L(clicked) - L(shown + 19) + L(19)``: see below
item_shown_day        all users, last day
item_clicked_day
item_rate_day
pair_shown            this item to this user, last day
pair_clicked
pair_age              log1p of the minutes since the pair's newest impression that counts, 0 where there is none
user_shown            all ads to this user, last day
user_clicked
user_rate
====================  =================================================================================================

A rate is the logarithm of ``(clicked + 1) / (shown + 20)`` over its prior of one click in 20: 0 where nothing was
counted, and the more of it the more was seen. All columns but `known` are 0 where nothing was counted.
"""

from __future__ import annotations

import math

import numpy as np

from models.api import F32, I64, U32
from state.counts import Counts
from state.jit import kernel

ROLLING = (
    "known",
    "item_shown_hour",
    "item_clicked_hour",
    "item_rate_hour",
    "item_shown_day",
    "item_clicked_day",
    "item_rate_day",
    "pair_shown",
    "pair_clicked",
    "pair_age",
    "user_shown",
    "user_clicked",
    "user_rate",
)
PRIOR_SHOWN = 20
"""impressions, with one click, that every rate begins with"""
_LOGS = np.log1p(np.arange(8192.0)).astype(np.float32)


def rolling_features(counts: Counts, splits: I64, now_ms: I64) -> F32:
    """[N, len(ROLLING)] of the pairs of B requests with `splits` [B + 1], asked at `now_ms` [B] event time."""
    out = np.zeros((int(splits[-1]), len(ROLLING)), np.float32)
    if counts.known.any():
        _fill(
            splits, now_ms, counts.known, counts.item_shown_hour, counts.item_clicked_hour, counts.item_shown_day,
            counts.item_clicked_day, counts.pair_shown, counts.pair_clicked, counts.pair_ts_ms, counts.user_shown,
            counts.user_clicked, _LOGS, out,
        )  # fmt: skip
    return out


def pick(counts: Counts, rows: I64, pairs: I64) -> Counts:
    """The answers of the requests `rows` with their `pairs` (indices, any order)."""
    return Counts(
        counts.known[rows], counts.item_shown_hour[pairs], counts.item_clicked_hour[pairs],
        counts.item_shown_day[pairs], counts.item_clicked_day[pairs], counts.pair_shown[pairs],
        counts.pair_clicked[pairs], counts.pair_ts_ms[pairs], counts.user_shown[rows], counts.user_clicked[rows],
    )  # fmt: skip


@kernel
def _log(n: np.int64, logs: F32) -> np.float32:
    return logs[n] if n < len(logs) else np.float32(math.log1p(n))


@kernel
def _count(out: F32, at: int, shown: np.int64, clicked: np.int64, logs: F32) -> None:
    """shown, clicked, rate"""
    clicks = _log(clicked, logs)
    out[at] = _log(shown, logs)
    out[at + 1] = clicks
    out[at + 2] = (clicks - _log(shown + PRIOR_SHOWN - 1, logs)) + logs[PRIOR_SHOWN - 1]


@kernel
def _fill(
    splits: I64, now_ms: I64, known: np.ndarray, item_shown_hour: U32, item_clicked_hour: U32, item_shown_day: U32,
    item_clicked_day: U32, pair_shown: U32, pair_clicked: U32, pair_ts_ms: I64, user_shown: U32, user_clicked: U32,
    logs: F32, out: F32,
) -> None:  # fmt: skip
    for b in range(len(splits) - 1):
        if not known[b]:
            continue
        user = np.empty(3, np.float32)
        _count(user, 0, np.int64(user_shown[b]), np.int64(user_clicked[b]), logs)
        for i in range(splits[b], splits[b + 1]):
            row = out[i]
            row[0] = 1.0
            _count(row, 1, np.int64(item_shown_hour[i]), np.int64(item_clicked_hour[i]), logs)
            _count(row, 4, np.int64(item_shown_day[i]), np.int64(item_clicked_day[i]), logs)
            row[7] = _log(np.int64(pair_shown[i]), logs)
            row[8] = _log(np.int64(pair_clicked[i]), logs)
            if pair_ts_ms[i] >= 0:
                row[9] = np.float32(math.log1p(max(now_ms[b] - pair_ts_ms[i], 0) / 60_000.0))
            row[10:13] = user
