"""Compiled loops over columns, each beside a plain reference that gives the same numbers (tests compare them).

Hash tables are open addressing with linear probing over two arrays: `keys` uint64 (0 = free, which no id is) and
`rows` int32, both of a power-of-two length.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
I8 = npt.NDArray[np.int8]
U64 = npt.NDArray[np.uint64]

COUNTERS = (
    "item_touches",
    "item_recency",
    "item_age",
    "topic_touches",
    "topic_recency",
    "topic_age",
    "history_length",
    "user_age",
)
"""Columns of `history_counters`. Touches and lengths are log1p of a count; recency is 1 / (1 + rank) of the newest
touch (rank 0 = last event), 0 without one; ages are log1p of minutes, 0 where unknown."""

MINUTE_MS = np.float32(60_000.0)


@numba.njit(cache=True)
def table_insert(keys: U64, rows: I32, items: U64, values: I32) -> None:
    """Stores `values[i]` under `items[i]`, in place of what was there. The caller keeps the table half empty."""
    mask = np.uint64(len(keys) - 1)
    for i in range(len(items)):
        slot = items[i] & mask
        while keys[slot] != 0 and keys[slot] != items[i]:
            slot = (slot + np.uint64(1)) & mask
        keys[slot] = items[i]
        rows[slot] = values[i]


@numba.njit(cache=True)
def table_find(keys: U64, rows: I32, items: U64) -> I32:
    """Row of each item, -1 where it is not in the table."""
    mask = np.uint64(len(keys) - 1)
    out = np.empty(len(items), np.int32)
    for i in range(len(items)):
        item = items[i]
        slot = item & mask
        while keys[slot] != 0 and keys[slot] != item:
            slot = (slot + np.uint64(1)) & mask
        out[i] = rows[slot] if keys[slot] == item and item != 0 else -1
    return out


@numba.njit(cache=True)
def take_columns(values: F32, rows: I32) -> F32:
    """values [capacity, c], rows [n] -> [c, n]; a row of -1 gives zeros."""
    c = values.shape[1]
    out = np.zeros((c, len(rows)), np.float32)
    for i in range(len(rows)):
        r = rows[i]
        if r >= 0:
            for j in range(c):
                out[j, i] = values[r, j]
    return out


@numba.njit(cache=True)
def counters(
    splits: I64,
    items: U64,
    topics: F32,
    ts_ms: I64,
    history_splits: I64,
    history: U64,
    history_topics: F32,
    history_ts: I64,
) -> F32:
    """[N, len(COUNTERS)]. A topic of 0 is unknown and matches nothing."""
    out = np.zeros((len(items), 8), np.float32)
    one = np.float32(1.0)
    for b in range(len(splits) - 1):
        h0, h1 = history_splits[b], history_splits[b + 1]
        now = ts_ms[b]
        length = np.log1p(np.float32(h1 - h0))
        user_age = np.float32(0.0)
        if h1 > h0 and history_ts[h1 - 1] >= 0:
            user_age = np.log1p(np.float32(max(now - history_ts[h1 - 1], 0)) / MINUTE_MS)
        for i in range(splits[b], splits[b + 1]):
            item, topic = items[i], topics[i]
            item_n, topic_n = 0, 0
            item_last, topic_last = h0, h0
            for h in range(h0, h1):
                if history[h] == item:
                    item_n += 1
                    item_last = h
                if topic != 0 and history_topics[h] == topic:
                    topic_n += 1
                    topic_last = h
            if item_n:
                out[i, 0] = np.log1p(np.float32(item_n))
                out[i, 1] = one / np.float32(h1 - item_last)
                if history_ts[item_last] >= 0:
                    out[i, 2] = np.log1p(np.float32(max(now - history_ts[item_last], 0)) / MINUTE_MS)
            if topic_n:
                out[i, 3] = np.log1p(np.float32(topic_n))
                out[i, 4] = one / np.float32(h1 - topic_last)
                if history_ts[topic_last] >= 0:
                    out[i, 5] = np.log1p(np.float32(max(now - history_ts[topic_last], 0)) / MINUTE_MS)
            out[i, 6] = length
            out[i, 7] = user_age
    return out


def counters_reference(
    splits: I64,
    items: U64,
    topics: F32,
    ts_ms: I64,
    history_splits: I64,
    history: U64,
    history_topics: F32,
    history_ts: I64,
) -> F32:
    """What `counters` computes, pair by pair in numpy."""
    out = np.zeros((len(items), 8), np.float32)

    def age(now: int, then: int) -> np.float32:
        return np.float32(0) if then < 0 else np.log1p(np.float32(max(now - then, 0)) / MINUTE_MS)

    for b in range(len(splits) - 1):
        past = slice(int(history_splits[b]), int(history_splits[b + 1]))
        ids, kinds, times = history[past], history_topics[past], history_ts[past]
        now = int(ts_ms[b])
        for i in range(int(splits[b]), int(splits[b + 1])):
            same = np.flatnonzero(ids == items[i])
            like = np.flatnonzero((kinds == topics[i]) & (kinds != 0))
            for first, found in ((0, same), (3, like)):
                if len(found):
                    out[i, first] = np.log1p(np.float32(len(found)))
                    out[i, first + 1] = np.float32(1) / np.float32(len(ids) - found[-1])
                    out[i, first + 2] = age(now, int(times[found[-1]]))
            out[i, 6] = np.log1p(np.float32(len(ids)))
            out[i, 7] = age(now, int(times[-1])) if len(ids) else 0
    return out


@numba.njit(cache=True)
def hash_codes(items: U64) -> F32:
    """[n, 64] fixed unit vector of each id: the 64 bits of its hash as signs, over 8. Id 0 (none) gives zeros.

    Two different ids have a cosine of about N(0, 1/64): identity without a table and without learning.
    """
    out = np.zeros((len(items), 64), np.float32)
    for i in range(len(items)):
        item = items[i]
        if item != 0:
            for j in range(64):
                bit = (item >> np.uint64(j)) & np.uint64(1)
                out[i, j] = np.float32(0.125) if bit else np.float32(-0.125)
    return out


def hash_codes_reference(items: U64) -> F32:
    bits = (items[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    out = np.where(bits == 1, np.float32(0.125), np.float32(-0.125)).astype(np.float32)
    out[items == 0] = 0
    return out


@numba.njit(cache=True)
def fill_slots(
    splits: I64,
    now_ms: I64,
    dim: int,
    begins: I64,
    vectors: F32,
    ts_ms: I64,
    topic: F32,
    topic_ts_ms: I64,
    dots: F32,
    state_ts_ms: I64,
    aggregate: F32,
    aggregate_ts_ms: I64,
    similar: F32,
    similar_ts_ms: I64,
    columns: F32,
    ages_ms: I64,
    source: I8,
    age_ms: I64,
) -> None:
    """Vectors and flags of every slot into `columns` [N, W], whose slot k begins at ``begins[k]`` (-1: not in the
    bundle), and ages [5, N], first slot filled [N] and its age [N] beside them. `columns` comes zeroed."""
    for b in range(len(splits) - 1):
        now = now_ms[b]
        for i in range(splits[b], splits[b + 1]):
            best = 5
            for k in range(5):
                begin = begins[k]
                then = np.int64(-1)
                if begin >= 0:
                    if k == 0:
                        then = ts_ms[i]
                    elif k == 1:
                        then = topic_ts_ms[i]
                    elif k == 2:
                        then = state_ts_ms[b]
                    elif k == 3:
                        then = aggregate_ts_ms[b]
                    else:
                        then = similar_ts_ms[b]
                if then < 0:
                    ages_ms[k, i] = -1
                    continue
                age = max(now - then, 0)
                ages_ms[k, i] = age
                if best == 5:
                    best = k
                    age_ms[i] = age
                if k == 2:
                    for j in range(dots.shape[1]):
                        columns[i, begin + j] = dots[i, j]
                    columns[i, begin + dots.shape[1]] = 1.0
                else:
                    if k == 0:
                        for j in range(dim):
                            columns[i, begin + j] = vectors[i, j]
                    elif k == 1:
                        for j in range(dim):
                            columns[i, begin + j] = topic[i, j]
                    elif k == 3:
                        for j in range(dim):
                            columns[i, begin + j] = aggregate[b, j]
                    else:
                        for j in range(dim):
                            columns[i, begin + j] = similar[b, j]
                    columns[i, begin + dim] = 1.0
            source[i] = best
            if best == 5:
                age_ms[i] = -1


@numba.njit(cache=True)
def order_by_value(splits: I64, values: F32) -> I64:
    """[N] pairs of each request by value, best first; ties in the order given, what is not finite last."""
    out = np.empty(len(values), np.int64)
    for b in range(len(splits) - 1):
        lo, hi = splits[b], splits[b + 1]
        if hi - lo > 128:
            keys = np.empty(hi - lo, np.float32)
            for i in range(lo, hi):
                keys[i - lo] = -values[i] if np.isfinite(values[i]) else np.inf
            out[lo:hi] = lo + np.argsort(keys, kind="mergesort")
            continue
        for i in range(lo, hi):  # insertion: few, and often nearly in order
            v = values[i] if np.isfinite(values[i]) else -np.inf
            at = i
            while at > lo:
                j = out[at - 1]
                w = values[j] if np.isfinite(values[j]) else -np.inf
                if w >= v:
                    break
                out[at] = j
                at -= 1
            out[at] = i
    return out


def order_by_value_reference(splits: I64, values: F32) -> I64:
    rows = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
    order: I64 = np.lexsort((np.arange(len(values)), np.where(np.isfinite(values), -values, np.inf), rows))
    return order
