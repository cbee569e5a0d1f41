# mypy: ignore-errors
# (numba gives these functions their types)
"""Compiled loops of the store: over users, chunks and pairs, on raw buffers.

An *arena* is a uint64 buffer of cached chunks with an open-addressing table of users (`state.cache` owns both).
A cached chunk at byte offset c (a multiple of 8) is

    ======  ====  =================================================================
    c       i64   byte offset of the user's next cached chunk, -1 at the end
    c + 8   i64   changelog offset
    c + 16  i64   bytes of the value that follow (event id left off, padded to 8)
    c + 24        the record as it came (`topics.packed`, kind ``E``), 56-byte header first
    ======  ====  =================================================================

A user's head is the byte offset of a chunk, `EMPTY` (known to have none) or `ABSENT` (not known here).

Vectors are finite (`state.chunk` rejects others), which makes the float16 decoding exact without special cases.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from state.jit import kernel

EMPTY = -1
ABSENT = -2

LINK_WORDS = 3
"""uint64 words before the value of a cached chunk"""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF_SCALE = np.float32(2.0**112)
_U32 = np.uint64(32)
_U48 = np.uint64(48)
_M32 = np.uint64(0xFFFFFFFF)
_M16 = np.uint64(0xFFFF)


@intrinsic
def _float_of_bits(typing_context: Any, bits: Any) -> Any:
    """float32 with the bit pattern of a uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return numba.float32(numba.uint32), codegen


@kernel
def half(h):
    """float32 of the bits of a finite float16, exactly: its exponent and mantissa moved into place, then rescaled
    (which also normalises subnormals). Plain arithmetic, so loops over it vectorise on every machine."""
    w = np.uint32(h)
    bits = ((w & np.uint32(0x7FFF)) << np.uint32(13)) | ((w & np.uint32(0x8000)) << np.uint32(16))
    return _float_of_bits(np.uint32(bits)) * _HALF_SCALE


@kernel
def _half_at(u8, at):
    return np.uint16(u8[at]) | (np.uint16(u8[at + 1]) << np.uint16(8))


@kernel
def slot(keys, key):
    """Index of `key` in an open-addressing table of a power-of-two size, or of the free place where it belongs."""
    mask = np.uint64(len(keys) - 1)
    i = ((key * _GOLDEN) >> _U32) & mask
    while keys[i] != np.uint64(0) and keys[i] != key:
        i = (i + np.uint64(1)) & mask
    return np.int64(i)


@kernel
def put_heads(keys, heads, users, values):
    """Sets the heads of users; returns how many were new to the table."""
    fresh = 0
    for j in range(len(users)):
        i = slot(keys, users[j])
        if keys[i] == np.uint64(0):
            keys[i] = users[j]
            fresh += 1
        heads[i] = values[j]
    return fresh


@kernel
def ensure(users, start, buf, keys, heads, counts, old_buf, old_keys, old_heads, dead_ts, missing):
    """Brings users[start:] into the young arena where they are in the old one.

    `counts`: int64[2], bytes used and table entries of the young arena, updated. Chunks of event time <= `dead_ts`
    are left behind. `missing` (int64[B]) gets the indexes of users in neither. Returns (how many missing, first
    index for which there was no room, or B).
    """
    n_missing = 0
    capacity = 8 * len(buf)
    for b in range(start, len(users)):
        user = users[b]
        i = slot(keys, user)
        if keys[i] == user and heads[i] != ABSENT:
            continue
        o = slot(old_keys, user)
        if old_keys[o] != user or old_heads[o] == ABSENT:
            missing[n_missing] = b
            n_missing += 1
            continue
        need = 0
        c = old_heads[o]
        while c >= 0:
            w = c >> 3
            if np.int64(old_buf[w + LINK_WORDS + 2]) > dead_ts:
                need += 8 * LINK_WORDS + np.int64(old_buf[w + 2])
            c = np.int64(old_buf[w])
        if counts[0] + need > capacity or 2 * counts[1] >= len(keys):
            return n_missing, b
        head = EMPTY
        last = -1
        c = old_heads[o]
        while c >= 0:
            w = c >> 3
            if np.int64(old_buf[w + LINK_WORDS + 2]) > dead_ts:
                words = LINK_WORDS + (np.int64(old_buf[w + 2]) >> 3)
                to = counts[0] >> 3
                for k in range(words):
                    buf[to + k] = old_buf[w + k]
                buf[to] = np.uint64(np.int64(-1))
                if last < 0:
                    head = counts[0]
                else:
                    buf[last] = np.uint64(counts[0])
                last = to
                counts[0] += 8 * words
            c = np.int64(old_buf[w])
        if keys[i] == np.uint64(0):
            keys[i] = user
            counts[1] += 1
        heads[i] = head
    return n_missing, len(users)


@kernel
def append(users, offsets, starts, sizes, chunks, known_below, buf, keys, heads, counts, old_keys, old_heads):
    """Adds new chunks to the cached users among `users`; a user it cannot keep right becomes `ABSENT`.

    `chunks` uint64 words of padded records, record r at byte starts[r], `sizes[r]` bytes of it kept. Only an offset
    below `known_below` can be there already and is looked for.
    """
    capacity = 8 * len(buf)
    for r in range(len(users)):
        user = users[r]
        o = slot(old_keys, user)
        i = slot(keys, user)
        if keys[i] != user or heads[i] == ABSENT:
            if old_keys[o] == user:
                old_heads[o] = ABSENT
            continue
        src = starts[r] >> 3
        if offsets[r] < known_below:
            c = heads[i]
            seen = False
            while c >= 0 and not seen:
                w = c >> 3
                seen = np.int64(buf[w + 1]) == offsets[r] and buf[w + LINK_WORDS + 2] == chunks[src + 2]
                c = np.int64(buf[w])
            if seen:
                continue
        size = (sizes[r] + 7) & ~7
        if counts[0] + 8 * LINK_WORDS + size > capacity:
            heads[i] = ABSENT
            if old_keys[o] == user:
                old_heads[o] = ABSENT
            continue
        to = counts[0] >> 3
        buf[to] = np.uint64(heads[i])
        buf[to + 1] = np.uint64(offsets[r])
        buf[to + 2] = np.uint64(size)
        for k in range(size >> 3):
            buf[to + LINK_WORDS + k] = chunks[src + k]
        heads[i] = counts[0]
        counts[0] += 8 * LINK_WORDS + size


@kernel
def _sort_newest_first(ptrs, m, buf):
    """Shell sort by (event time, offset), newest first; lists arrive nearly sorted, so this is mostly one pass."""
    gap = 1
    while gap < m // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for a in range(gap, m):
            p = ptrs[a]
            ts = buf[(p >> 3) + LINK_WORDS + 2]
            off = buf[(p >> 3) + 1]
            b = a
            while b >= gap:
                q = ptrs[b - gap] >> 3
                t2 = buf[q + LINK_WORDS + 2]
                if t2 > ts or (t2 == ts and buf[q + 1] >= off):
                    break
                ptrs[b] = ptrs[b - gap]
                b -= gap
            ptrs[b] = p
        gap = gap // 3


@kernel
def lookup(
    first, last, users, splits, items, topics, now, model, dim, state_dim, profile_dim, ttl, window, floor,
    buf, keys, heads,
    vectors, ts_out, pair_fingerprint, topic_mean, topic_count, topic_ts,
    aggregate, aggregate_count, aggregate_ts, state, state_ts, fingerprint, profile,
):  # fmt: skip
    """Answers requests first..last-1, whose users are all in the arena, into zeroed outputs (times: -1)."""
    u32 = buf.view(np.uint32)
    u16 = buf.view(np.uint16)
    f32 = buf.view(np.float32)
    i8 = buf.view(np.int8)
    u8 = buf.view(np.uint8)
    horizon = max(ttl, window)

    ptrs = np.empty(64, np.int64)
    # Pairs of the user by item, newest chunk first: table of (item, stamp, chunk, index in chunk).
    t_item = np.empty(512, np.uint64)
    t_stamp = np.full(512, -1, np.int64)
    t_chunk = np.empty(512, np.int64)
    t_index = np.empty(512, np.int64)
    # Topics asked for in the request: table of (topic, stamp, row), rows of sums.
    a_topic = np.empty(128, np.uint32)
    a_stamp = np.full(128, -1, np.int64)
    a_row = np.empty(128, np.int64)
    sums = np.empty((64, dim), np.float32)
    counts = np.empty(64, np.int64)
    newest = np.empty(64, np.int64)
    ad_row = np.empty(64, np.int64)

    for b in range(first, last):
        t = now[b]
        alive_at = max(t, floor)
        i = slot(keys, users[b])
        c = heads[i]
        m = 0
        pairs = 0
        while c >= 0:
            w = c >> 3
            v = w + LINK_WORDS
            ts = np.int64(buf[v + 2])
            # n is the low half of word 5, d its next 16 bits, s the top 16; p the low 16 bits of word 6.
            # A chunk may leave out its pairs, its state or its profile.
            s = np.int64(buf[v + 5] >> _U48)
            p = np.int64(buf[v + 6] & _M16)
            d = np.int64((buf[v + 5] >> _U32) & _M16)
            fits = (
                (d == dim or (d == 0 and buf[v + 5] & _M32 == np.uint64(0)))
                and (s == state_dim or s == 0)
                and (p == profile_dim or p == 0)
            )
            if ts <= t and alive_at - horizon < ts and buf[v + 3] == model and fits:
                if m == len(ptrs):
                    grown = np.empty(2 * m, np.int64)
                    grown[:m] = ptrs
                    ptrs = grown
                ptrs[m] = c
                m += 1
                pairs += np.int64(buf[v + 5] & _M32)
            c = np.int64(buf[w])
        if m == 0:
            continue
        _sort_newest_first(ptrs, m, buf)

        need_state = state_dim > 0
        need_profile = profile_dim > 0
        for q in range(m):
            v = (ptrs[q] >> 3) + LINK_WORDS
            ts = np.int64(buf[v + 2])
            if alive_at - ttl >= ts or not (need_state or need_profile):
                break
            s = np.int64(buf[v + 5] >> _U48)
            p = np.int64(buf[v + 6] & _M16)
            n = np.int64(buf[v + 5] & _M32)
            at = 8 * v + 56 + 12 * n
            at += (4 * n + n * dim) if (buf[v] >> np.uint64(40)) & np.uint64(1) else 2 * n * dim
            # int8 columns of an odd number of bytes leave the halves unaligned: they are read byte by byte.
            odd = at & 1
            if need_state and s > 0:
                need_state = False
                state_ts[b] = ts
                fingerprint[b] = buf[v + 4]
                for k in range(s):
                    state[b, k] = half(_half_at(u8, at + 2 * k) if odd else u16[(at >> 1) + k])
            if need_profile and p > 0:
                need_profile = False
                at += 2 * s
                for k in range(p):
                    profile[b, k] = half(_half_at(u8, at + 2 * k) if odd else u16[(at >> 1) + k])
        if pairs == 0:
            continue

        lo = splits[b]
        hi = splits[b + 1]
        n_ads = hi - lo
        if 2 * n_ads > len(a_topic):
            size = 2 * len(a_topic)
            while size < 2 * n_ads:
                size *= 2
            a_topic = np.empty(size, np.uint32)
            a_stamp = np.full(size, -1, np.int64)
            a_row = np.empty(size, np.int64)
            sums = np.empty((size // 2, dim), np.float32)
            counts = np.empty(size // 2, np.int64)
            newest = np.empty(size // 2, np.int64)
            ad_row = np.empty(size // 2, np.int64)
        a_mask = np.uint64(len(a_topic) - 1)
        rows = 0
        for j in range(n_ads):
            topic = topics[lo + j]
            q = np.int64(((np.uint64(topic) * _GOLDEN) >> _U32) & a_mask)
            while a_stamp[q] == b and a_topic[q] != topic:
                q = np.int64(np.uint64(q + 1) & a_mask)
            if a_stamp[q] != b:
                a_stamp[q] = b
                a_topic[q] = topic
                a_row[q] = rows
                counts[rows] = 0
                newest[rows] = -1
                for k in range(dim):
                    sums[rows, k] = 0.0
                rows += 1
            ad_row[j] = a_row[q]

        if 2 * pairs > len(t_item):
            size = 2 * len(t_item)
            while size < 2 * pairs:
                size *= 2
            t_item = np.empty(size, np.uint64)
            t_stamp = np.full(size, -1, np.int64)
            t_chunk = np.empty(size, np.int64)
            t_index = np.empty(size, np.int64)
        t_mask = np.uint64(len(t_item) - 1)
        total = 0
        total_ts = np.int64(-1)
        for a in range(m):
            v = (ptrs[a] >> 3) + LINK_WORDS
            ts = np.int64(buf[v + 2])
            n = np.int64(buf[v + 5] & _M32)
            in_window = alive_at - window < ts
            int8 = (buf[v] >> np.uint64(40)) & np.uint64(1)
            topics_at = 2 * (v + 7 + n)
            for x in range(n):
                item = buf[v + 7 + x]
                q = np.int64(((item * _GOLDEN) >> _U32) & t_mask)
                while t_stamp[q] == b and t_item[q] != item:
                    q = np.int64(np.uint64(q + 1) & t_mask)
                if t_stamp[q] == b:
                    continue
                t_stamp[q] = b
                t_item[q] = item
                t_chunk[q] = ptrs[a]
                t_index[q] = x
                if not in_window:
                    continue
                if total == 0:
                    total_ts = ts
                total += 1
                row = -1
                topic = u32[topics_at + x]
                q = np.int64(((np.uint64(topic) * _GOLDEN) >> _U32) & a_mask)
                while a_stamp[q] == b and a_topic[q] != topic:
                    q = np.int64(np.uint64(q + 1) & a_mask)
                if a_stamp[q] == b:
                    row = a_row[q]
                    if counts[row] == 0:
                        newest[row] = ts
                    counts[row] += 1
                if int8:
                    scale = f32[topics_at + n + x]
                    at = 4 * (topics_at + 2 * n) + x * dim
                    for k in range(dim):
                        aggregate[b, k] += np.float32(i8[at + k]) * scale
                    if row >= 0:
                        for k in range(dim):
                            sums[row, k] += np.float32(i8[at + k]) * scale
                else:
                    at = 2 * (topics_at + n) + x * dim
                    for k in range(dim):
                        aggregate[b, k] += half(u16[at + k])
                    if row >= 0:
                        for k in range(dim):
                            sums[row, k] += half(u16[at + k])
        if total > 0:
            for k in range(dim):
                aggregate[b, k] /= np.float32(total)
            aggregate_count[b] = total
            aggregate_ts[b] = total_ts
            for r in range(rows):
                if counts[r] > 0:
                    for k in range(dim):
                        sums[r, k] /= np.float32(counts[r])

        for j in range(n_ads):
            y = lo + j
            row = ad_row[j]
            if counts[row] > 0:
                topic_count[y] = counts[row]
                topic_ts[y] = newest[row]
                for k in range(dim):
                    topic_mean[y, k] = sums[row, k]
            item = items[y]
            q = np.int64(((item * _GOLDEN) >> _U32) & t_mask)
            while t_stamp[q] == b and t_item[q] != item:
                q = np.int64(np.uint64(q + 1) & t_mask)
            if t_stamp[q] != b:
                continue
            v = (t_chunk[q] >> 3) + LINK_WORDS
            ts = np.int64(buf[v + 2])
            if alive_at - ttl >= ts:
                continue
            ts_out[y] = ts
            pair_fingerprint[y] = buf[v + 4]
            n = np.int64(buf[v + 5] & _M32)
            x = t_index[q]
            if (buf[v] >> np.uint64(40)) & np.uint64(1):
                scale = f32[2 * (v + 7 + n) + n + x]
                at = 8 * (v + 7 + n) + 8 * n + x * dim
                for k in range(dim):
                    vectors[y, k] = np.float32(i8[at + k]) * scale
            else:
                at = 4 * (v + 7 + n) + 2 * n + x * dim
                for k in range(dim):
                    vectors[y, k] = half(u16[at + k])


@kernel
def scan(chunks, starts, sizes, max_ts, users, ts, pairs, kept, fine):
    """Reads the headers of padded records (record r at byte starts[r] of `chunks`) and checks them.

    Fills users, ts, pairs, kept (bytes without the event id) and fine: whether the record is certainly a good chunk.
    The others need a closer look (`state.chunk.decode_chunk`), which says what is wrong, if anything.
    """
    u8 = chunks.view(np.uint8)
    u16 = chunks.view(np.uint16)
    u32 = chunks.view(np.uint32)
    f32 = chunks.view(np.float32)
    # "SLR", kind E, version 1, flags 0 or 1 (int8), two zero bytes
    want = np.uint64(0x53) | np.uint64(0x4C << 8) | np.uint64(0x52 << 16) | np.uint64(0x45 << 24) | np.uint64(1 << 32)
    for r in range(len(starts)):
        fine[r] = False
        if sizes[r] < 56:
            continue
        w = starts[r] >> 3
        flag = np.int64((chunks[w] >> np.uint64(40)) & np.uint64(0xFF))
        if flag > 1 or chunks[w] != (want | (np.uint64(flag) << np.uint64(40))):
            continue
        users[r] = chunks[w + 1]
        ts[r] = np.int64(chunks[w + 2])
        n = np.int64(u32[2 * w + 10])
        d = np.int64(u16[4 * w + 22])
        s = np.int64(u16[4 * w + 23])
        p = np.int64(u16[4 * w + 24])
        k = np.int64(u16[4 * w + 25])
        if ts[r] < 0 or ts[r] > max_ts or users[r] == np.uint64(0):
            continue
        body = 56 + 12 * n + (4 * n + n * d if flag else 2 * n * d)
        if sizes[r] != body + 2 * s + 2 * p + k:
            continue
        ok = True
        for x in range(1, n):
            ok &= chunks[w + 7 + x] > chunks[w + 6 + x]
        base = starts[r]
        if flag:
            at = (base >> 2) + 14 + 3 * n
            for x in range(n):
                ok &= np.isfinite(f32[at + x])
        else:
            at = (base >> 1) + 28 + 6 * n
            for x in range(n * d):
                ok &= (u16[at + x] & np.uint16(0x7C00)) != np.uint16(0x7C00)
        for x in range(s + p):
            ok &= (u8[base + body + 2 * x + 1] & np.uint8(0x7C)) != np.uint8(0x7C)
        for x in range(k):
            ok &= u8[base + body + 2 * s + 2 * p + x] < np.uint8(0x80)
        pairs[r] = n
        kept[r] = sizes[r] - k
        fine[r] = ok
