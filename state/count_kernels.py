# mypy: ignore-errors
# (numba gives these functions their types)
"""Compiled loops of the rolling counts.

**Users and pairs** are counted from the user's own chunks (`topics.packed_counts`, kind ``C``) in a store's arena
(`state.kernels` has its layout).

**Items** lie in a table of their own: an item has a *row*, a row has a block of entries in a pool, in ascending order
of their buckets. An entry is three uint32: bucket number (event time / `BUCKET_MS`), and how often the item was shown
and clicked in this bucket and all before it in the block. So what was counted between two times is one difference,
whatever the times are and in whatever order the deltas came; sums that overflow wrap round and their differences are
right.
A block that is full moves to one of twice the size at the pool's end; `compact` takes back what is left behind.
"""

from __future__ import annotations

import numpy as np

from state.jit import kernel

BUCKET_MS = 300_000
HOUR_MS = 3_600_000
DAY_MS = 86_400_000
PER_HOUR = 12
LEAST_BLOCK = 4

ROWS, USED, REFUSED = range(3)
"""int64[3]: rows taken, pool entries taken, events refused for want of a row"""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M32 = np.uint64(0xFFFFFFFF)
_1 = np.uint64(1)
_LINK_WORDS = 3


@kernel
def scan(chunks, starts, sizes, max_ts, users, ts, pairs, fine):
    """Reads and checks the headers of padded count chunks; arguments and meaning as `state.kernels.scan`."""
    want = np.uint64(0x53) | np.uint64(0x4C << 8) | np.uint64(0x52 << 16) | np.uint64(0x43 << 24) | np.uint64(1 << 32)
    for r in range(len(starts)):
        fine[r] = False
        if sizes[r] < 32:
            continue
        w = starts[r] >> 3
        if chunks[w] & ~np.uint64(1 << 40) != want:
            continue
        n = np.int64(chunks[w + 3] & _M32)
        users[r] = chunks[w + 1]
        ts[r] = np.int64(chunks[w + 2])
        pairs[r] = n
        fine[r] = sizes[r] == 32 + 8 * n and users[r] != np.uint64(0) and ts[r] >= 0 and ts[r] <= max_ts


@kernel
def count_pairs(
    first, last, splits, items, asked, known, dead_ts, buf, heads,
    pair_shown, pair_clicked, pair_ts, user_shown, user_clicked,
):  # fmt: skip
    """Answers requests first..last-1 that are `known` from their users' chunks: those of asked - day < ts <= asked and
    above `dead_ts`. heads [B] is where each user's chunks begin in `buf`. The outputs come as of nothing counted."""
    t_item = np.empty(256, np.uint64)
    t_stamp = np.full(256, -1, np.int64)
    t_row = np.empty(256, np.int64)
    for b in range(first, last):
        c = heads[b]
        if c < 0 or not known[b]:
            continue
        lo, hi = splits[b], splits[b + 1]
        if 2 * (hi - lo) > len(t_item):
            size = 2 * len(t_item)
            while size < 2 * (hi - lo):
                size *= 2
            t_item = np.empty(size, np.uint64)
            t_stamp = np.full(size, -1, np.int64)
            t_row = np.empty(size, np.int64)
        mask = np.uint64(len(t_item) - 1)
        for y in range(lo, hi):
            q = (items[y] * _GOLDEN) >> np.uint64(32) & mask
            while t_stamp[q] == b and t_item[q] != items[y]:
                q = (q + _1) & mask
            if t_stamp[q] != b:
                t_stamp[q] = b
                t_item[q] = items[y]
                t_row[q] = y
        shown, clicked = np.int64(0), np.int64(0)
        newest = asked[b]
        oldest = max(newest - DAY_MS, dead_ts)
        while c >= 0:
            v = (c >> 3) + _LINK_WORDS
            c = np.int64(buf[v - _LINK_WORDS])
            ts = np.int64(buf[v + 2])
            if ts > newest or ts <= oldest:
                continue
            n = np.int64(buf[v + 3] & _M32)
            click = (buf[v] >> np.uint64(40)) & _1 == _1
            if click:
                clicked += n
            else:
                shown += n
            for x in range(v + 4, v + 4 + n):
                q = (buf[x] * _GOLDEN) >> np.uint64(32) & mask
                while t_stamp[q] == b and t_item[q] != buf[x]:
                    q = (q + _1) & mask
                if t_stamp[q] == b:
                    y = t_row[q]
                    if click:
                        pair_clicked[y] += np.uint32(1)
                    else:
                        pair_shown[y] += np.uint32(1)
                        pair_ts[y] = max(pair_ts[y], ts)
        user_shown[b] = shown
        user_clicked[b] = clicked
        for y in range(lo, hi):  # an ad that the request has twice
            q = (items[y] * _GOLDEN) >> np.uint64(32) & mask
            while t_item[q] != items[y]:
                q = (q + _1) & mask
            k = t_row[q]
            pair_shown[y], pair_clicked[y], pair_ts[y] = pair_shown[k], pair_clicked[k], pair_ts[k]


@kernel
def slot(keys, key):
    """Index of `key` (not 0) in an open-addressing table of a power-of-two size, or of the free place for it."""
    mask = np.uint64(len(keys) - 1)
    i = ((key * _GOLDEN) >> np.uint64(32)) & mask
    while keys[i] != np.uint64(0) and keys[i] != key:
        i = (i + _1) & mask
    return np.int64(i)


@kernel
def add(begin, bucket, items, shown, clicked, refuse, keys, rows, names, starts, lengths, caps, pool, meta):
    """Adds one record of deltas, items[begin:]. Returns where it stopped for want of a row or of room in the pool,
    len(items) when all is done. `refuse`: items without a row are left out and counted while no row is free."""
    for i in range(begin, len(items)):
        q = slot(keys, items[i])
        if keys[q] == np.uint64(0):
            row = meta[ROWS]
            if row == len(names):
                if not refuse:
                    return i
                meta[REFUSED] += np.int64(shown[i]) + np.int64(clicked[i])
                continue
            if meta[USED] + LEAST_BLOCK > len(pool):
                return i
            keys[q] = items[i]
            rows[q] = row
            names[row] = items[i]
            starts[row] = meta[USED]
            lengths[row] = 0
            caps[row] = LEAST_BLOCK
            meta[ROWS] += 1
            meta[USED] += LEAST_BLOCK
        row = rows[q]
        base, n = starts[row], lengths[row]
        p = n
        while p > 0 and pool[base + p - 1, 0] > bucket:
            p -= 1
        if p > 0 and pool[base + p - 1, 0] == bucket:
            p -= 1
        else:
            if n == caps[row]:
                if meta[USED] + 2 * n > len(pool):
                    return i
                to = meta[USED]
                for e in range(n):
                    for k in range(3):
                        pool[to + e, k] = pool[base + e, k]
                starts[row] = to
                caps[row] = 2 * n
                meta[USED] += 2 * n
                base = to
            for e in range(n, p, -1):
                for k in range(3):
                    pool[base + e, k] = pool[base + e - 1, k]
            pool[base + p, 0] = bucket
            for k in range(1, 3):
                pool[base + p, k] = pool[base + p - 1, k] if p > 0 else np.uint32(0)
            n += 1
            lengths[row] = n
        for e in range(p, n):
            pool[base + e, 1] += shown[i]
            pool[base + e, 2] += clicked[i]
    return len(items)


@kernel
def _block(n):
    """Size of a block that takes n entries."""
    cap = LEAST_BLOCK
    while cap < n:
        cap *= 2
    return cap


@kernel
def _kept_as(bucket, oldest, coarse):
    """The bucket an entry of this one is kept under, -1 for not at all."""
    if bucket < oldest:
        return np.int64(-1)
    return bucket - bucket % PER_HOUR if bucket < coarse else bucket


@kernel
def survey(oldest, coarse, n, names, starts, lengths, pool):
    """(rows, entries of blocks) that `compact` will make of n rows."""
    rows, entries = 0, 0
    for row in range(n):
        last, kept = np.int64(-1), 0
        for e in range(starts[row], starts[row] + lengths[row]):
            bucket = _kept_as(np.int64(pool[e, 0]), oldest, coarse)
            kept += bucket > last
            last = bucket
        if kept > 0:
            rows += 1
            entries += _block(kept)
    return rows, entries


@kernel
def compact(oldest, coarse, old_n, old_names, old_starts, old_lengths, old_pool,
            keys, rows, names, starts, lengths, caps, pool, meta):  # fmt: skip
    """Copies all rows into empty arrays, large enough by `survey`: without buckets before `oldest`, without rows that
    have no other, and with one entry an hour for buckets before `coarse`."""
    for old in range(old_n):
        shown_before, clicked_before = np.uint32(0), np.uint32(0)
        at, n = meta[USED], 0
        for e in range(old_starts[old], old_starts[old] + old_lengths[old]):
            bucket = _kept_as(np.int64(old_pool[e, 0]), oldest, coarse)
            if bucket < 0:
                shown_before, clicked_before = old_pool[e, 1], old_pool[e, 2]
                continue
            if n == 0 or pool[at + n - 1, 0] != bucket:
                n += 1
                pool[at + n - 1, 0] = bucket
            pool[at + n - 1, 1] = old_pool[e, 1] - shown_before
            pool[at + n - 1, 2] = old_pool[e, 2] - clicked_before
        if n == 0:
            continue
        row = meta[ROWS]
        names[row] = old_names[old]
        starts[row] = at
        lengths[row] = n
        caps[row] = _block(n)
        meta[ROWS] += 1
        meta[USED] += caps[row]
        q = slot(keys, names[row])
        keys[q] = names[row]
        rows[q] = row


@kernel
def _first(pool, base, n, bucket):
    """How many of n entries are of buckets before `bucket`."""
    lo, hi = 0, n
    while lo < hi:
        mid = (lo + hi) >> 1
        if np.int64(pool[base + mid, 0]) < bucket:
            lo = mid + 1
        else:
            hi = mid
    return lo


@kernel
def count_items(splits, items, asked, known, keys, rows, starts, lengths, pool,
                shown_hour, clicked_hour, shown_day, clicked_day):  # fmt: skip
    """Answers the requests that are `known`; the outputs come as zeros."""
    zero = np.uint32(0)
    for b in range(len(asked)):
        if not known[b]:
            continue
        until = asked[b] // BUCKET_MS
        day = (asked[b] // HOUR_MS - 23) * PER_HOUR
        for y in range(splits[b], splits[b + 1]):
            q = slot(keys, items[y])
            if keys[q] != items[y] or items[y] == np.uint64(0):
                continue
            row = rows[q]
            base, n = starts[row], lengths[row]
            e = _first(pool, base, n, until)
            if e == 0:
                continue
            h = _first(pool, base, e, until - PER_HOUR)
            d = _first(pool, base, e, day)
            shown, clicked = pool[base + e - 1, 1], pool[base + e - 1, 2]
            shown_hour[y] = shown - (pool[base + h - 1, 1] if h > 0 else zero)
            clicked_hour[y] = clicked - (pool[base + h - 1, 2] if h > 0 else zero)
            shown_day[y] = shown - (pool[base + d - 1, 1] if d > 0 else zero)
            clicked_day[y] = clicked - (pool[base + d - 1, 2] if d > 0 else zero)
