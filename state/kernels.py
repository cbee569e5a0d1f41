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

All kernels lie in this one file because numba notices a change only in the file of the kernel itself.
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
def slot(keys, key):
    """Index of `key` in an open-addressing table of a power-of-two size, or of the free place where it belongs."""
    mask = np.uint64(len(keys) - 1)
    i = ((key * _GOLDEN) >> _U32) & mask
    while keys[i] != np.uint64(0) and keys[i] != key:
        i = (i + np.uint64(1)) & mask
    return np.int64(i)


@kernel
def _lengths(buf, v):
    """pairs, dim, state length and profile length of the record at word v."""
    w = buf[v + 5]
    return np.int64(w & _M32), np.int64((w >> _U32) & _M16), np.int64(w >> _U48), np.int64(buf[v + 6] & _M16)


@kernel
def _is_int8(buf, v):
    return (buf[v] >> np.uint64(40)) & np.uint64(1) == np.uint64(1)


@kernel
def admit(users, chunk_splits, offsets, starts, chunks, buf, keys, heads, counts):
    """Puts users with all their chunks into the arena: user u's are records chunk_splits[u]:chunk_splits[u+1], oldest
    first, record r at byte starts[r] of `chunks`. Returns how many users there was room for."""
    capacity = 8 * len(buf)
    for u in range(len(users)):
        need = 0
        for r in range(chunk_splits[u], chunk_splits[u + 1]):
            need += 8 * LINK_WORDS + _kept(chunks, starts[r] >> 3)
        if counts[0] + need > capacity or 2 * counts[1] >= len(keys):
            return u
        head = np.int64(EMPTY)
        for r in range(chunk_splits[u], chunk_splits[u + 1]):
            head = _place(buf, counts, head, offsets[r], chunks, starts[r] >> 3)
        i = slot(keys, users[u])
        if keys[i] == np.uint64(0):
            keys[i] = users[u]
            counts[1] += 1
        heads[i] = head
    return len(users)


@kernel
def _kept(chunks, w):
    """Bytes of the record at word w without its event id, padded to 8."""
    n, d, s, p = _lengths(chunks, w)
    size = 56 + 12 * n + ((4 + d) * n if _is_int8(chunks, w) else 2 * n * d) + 2 * s + 2 * p
    return (size + 7) & ~7


@kernel
def _place(buf, counts, head, offset, chunks, w):
    """Copies the record at word w of `chunks` to the end of the arena, before `head`; returns its byte offset."""
    size = _kept(chunks, w)
    at = counts[0]
    to = at >> 3
    buf[to] = np.uint64(head)
    buf[to + 1] = np.uint64(offset)
    buf[to + 2] = np.uint64(size)
    for k in range(size >> 3):
        buf[to + LINK_WORDS + k] = chunks[w + k]
    counts[0] = at + 8 * LINK_WORDS + size
    return at


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
def append(users, offsets, starts, chunks, known_below, buf, keys, heads, counts, old_keys, old_heads):
    """Adds new chunks to the cached users among `users`; a user it cannot keep right becomes `ABSENT`.

    `chunks`: uint64 words of padded records, record r at byte starts[r]. Only an offset below `known_below` can be
    there already and is looked for.
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
        if counts[0] + 8 * LINK_WORDS + _kept(chunks, src) > capacity:
            heads[i] = ABSENT
            if old_keys[o] == user:
                old_heads[o] = ABSENT
            continue
        heads[i] = _place(buf, counts, heads[i], offsets[r], chunks, src)


# Loops that run over whole slices vectorise; with computed indexes, each of which may be negative, they do not.


@kernel
def _decode(halves, out):
    for k in range(len(halves)):
        out[k] = half(halves[k])


@kernel
def _copy(what, out):
    for k in range(len(what)):
        out[k] = what[k]


@kernel
def _zero(out):
    for k in range(len(out)):
        out[k] = 0.0


@kernel
def _scale(numbers, scale, out):
    for k in range(len(numbers)):
        out[k] = np.float32(numbers[k]) * scale


@kernel
def _add(to, what):
    for k in range(len(what)):
        to[k] += what[k]


@kernel
def _halves(u8, u16, at, out):
    """float16 numbers at byte `at`, which int8 columns of an odd number of bytes leave unaligned."""
    if at & 1:
        for k in range(len(out)):
            out[k] = half(np.uint16(u8[at + 2 * k]) | (np.uint16(u8[at + 2 * k + 1]) << np.uint16(8)))
    else:
        _decode(u16[at >> 1 : (at >> 1) + len(out)], out)


@kernel
def _sort_newest_first(ptrs, m, buf):
    """Shell sort of records (at words ptrs[:m]) by event time and offset, newest first. Lists arrive nearly sorted,
    so that this is mostly one pass."""
    gap = 1
    while gap < m // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for a in range(gap, m):
            p = ptrs[a]
            ts = buf[p + 2]
            offset = buf[p + 1 - LINK_WORDS]
            b = a
            while b >= gap:
                q = ptrs[b - gap]
                if buf[q + 2] > ts or (buf[q + 2] == ts and buf[q + 1 - LINK_WORDS] >= offset):
                    break
                ptrs[b] = q
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
    """Answers requests first..last-1, whose users are all in the arena. Writes every number of their outputs."""
    u32 = buf.view(np.uint32)
    u16 = buf.view(np.uint16)
    f32 = buf.view(np.float32)
    i8 = buf.view(np.int8)
    u8 = buf.view(np.uint8)
    flat_vectors = vectors.reshape(vectors.size)
    flat_topic_mean = topic_mean.reshape(topic_mean.size)
    horizon = max(ttl, window)

    ptrs = np.empty(64, np.int64)
    # The user's pairs, newest chunk first: a table of (item, request it was filled for, chunk's place, index in it).
    t_item = np.empty(256, np.uint64)
    t_stamp = np.full(256, -1, np.int32)
    t_chunk = np.empty(256, np.int32)
    t_index = np.empty(256, np.int32)
    # The topics asked for: a table of (topic, request, row) and sums by row. Row 0 takes all other topics, so that
    # every pair is added once and the plain aggregate is the sum of the rows.
    a_topic = np.empty(128, np.uint32)
    a_stamp = np.full(128, -1, np.int32)
    a_row = np.empty(128, np.int32)
    sums = np.empty(65 * dim, np.float32)
    counts = np.empty(65, np.int32)
    newest = np.empty(65, np.int64)
    ad_row = np.empty(64, np.int32)
    values = np.empty(64 * dim, np.float32)

    for b in range(first, last):
        lo = splits[b]
        hi = splits[b + 1]
        if lo < 0 or hi < lo or hi > len(items):
            raise ValueError("splits do not ascend within the items")
        _zero(flat_vectors[lo * dim : hi * dim])
        _zero(flat_topic_mean[lo * dim : hi * dim])
        ts_out[lo:hi] = -1
        topic_ts[lo:hi] = -1
        topic_count[lo:hi] = 0
        pair_fingerprint[lo:hi] = 0
        _zero(aggregate[b])
        aggregate_count[b] = 0
        aggregate_ts[b] = -1
        _zero(state[b])
        state_ts[b] = -1
        fingerprint[b] = 0
        _zero(profile[b])

        t = now[b]
        alive_at = max(t, floor)
        c = heads[slot(keys, users[b])]
        m = 0
        pairs = 0
        while c >= 0:
            v = (c >> 3) + LINK_WORDS
            ts = np.int64(buf[v + 2])
            n, d, s, p = _lengths(buf, v)
            # A chunk may leave out its pairs, its state or its profile.
            fits = (d == dim or (d == 0 and n == 0)) and (s == state_dim or s == 0) and (p == profile_dim or p == 0)
            if ts <= t and alive_at - horizon < ts and buf[v + 3] == model and fits:
                if m == len(ptrs):
                    grown = np.empty(2 * m, np.int64)
                    grown[:m] = ptrs
                    ptrs = grown
                ptrs[m] = v
                m += 1
                pairs += n
            c = np.int64(buf[v - LINK_WORDS])
        if m == 0:
            continue
        _sort_newest_first(ptrs, m, buf)

        need_state = state_dim > 0
        need_profile = profile_dim > 0
        for a in range(m):
            v = ptrs[a]
            ts = np.int64(buf[v + 2])
            if alive_at - ttl >= ts or not (need_state or need_profile):
                break
            n, d, s, p = _lengths(buf, v)
            at = 8 * v + 56 + 12 * n + ((4 + dim) * n if _is_int8(buf, v) else 2 * n * dim)
            if need_state and s > 0:
                need_state = False
                state_ts[b] = ts
                fingerprint[b] = buf[v + 4]
                _halves(u8, u16, at, state[b])
            if need_profile and p > 0:
                need_profile = False
                _halves(u8, u16, at + 2 * s, profile[b])
        if pairs == 0:
            continue

        n_ads = hi - lo
        if 2 * n_ads > len(a_topic):
            size = 2 * len(a_topic)
            while size < 2 * n_ads:
                size *= 2
            a_topic = np.empty(size, np.uint32)
            a_stamp = np.full(size, -1, np.int32)
            a_row = np.empty(size, np.int32)
            sums = np.empty((size // 2 + 1) * dim, np.float32)
            counts = np.empty(size // 2 + 1, np.int32)
            newest = np.empty(size // 2 + 1, np.int64)
            ad_row = np.empty(size // 2, np.int32)
        a_mask = np.uint64(len(a_topic) - 1)
        rows = 1
        for j in range(n_ads):
            topic = topics[lo + j]
            q = np.int64(((np.uint64(topic) * _GOLDEN) >> _U32) & a_mask)
            while a_stamp[q] == b and a_topic[q] != topic:
                q = np.int64(np.uint64(q + 1) & a_mask)
            if a_stamp[q] != b:
                a_stamp[q] = b
                a_topic[q] = topic
                a_row[q] = rows
                rows += 1
            ad_row[j] = a_row[q]
        _zero(sums[: rows * dim])
        counts[:rows] = 0

        if 2 * pairs > len(t_item):
            size = 2 * len(t_item)
            while size < 2 * pairs:
                size *= 2
            t_item = np.empty(size, np.uint64)
            t_stamp = np.full(size, -1, np.int32)
            t_chunk = np.empty(size, np.int32)
            t_index = np.empty(size, np.int32)
        t_mask = np.uint64(len(t_item) - 1)
        total = 0
        for a in range(m):
            v = ptrs[a]
            ts = np.int64(buf[v + 2])
            n = np.int64(buf[v + 5] & _M32)
            in_window = alive_at - window < ts
            topics_at = 2 * (v + 7 + n)
            if in_window:
                if n * dim > len(values):
                    values = np.empty(n * dim, np.float32)
                if _is_int8(buf, v):
                    at = 4 * (topics_at + 2 * n)
                    for x in range(n):
                        _scale(i8[at + x * dim : at + (x + 1) * dim], f32[topics_at + n + x], values[x * dim :])
                else:
                    at = 2 * (topics_at + n)
                    _decode(u16[at : at + n * dim], values)
            for x in range(n):
                item = buf[v + 7 + x]
                q = np.int64(((item * _GOLDEN) >> _U32) & t_mask)
                while t_stamp[q] == b and t_item[q] != item:
                    q = np.int64(np.uint64(q + 1) & t_mask)
                if t_stamp[q] == b:
                    continue
                t_stamp[q] = b
                t_item[q] = item
                t_chunk[q] = a
                t_index[q] = x
                if not in_window:
                    continue
                if total == 0:
                    aggregate_ts[b] = ts
                total += 1
                topic = u32[topics_at + x]
                q = np.int64(((np.uint64(topic) * _GOLDEN) >> _U32) & a_mask)
                while a_stamp[q] == b and a_topic[q] != topic:
                    q = np.int64(np.uint64(q + 1) & a_mask)
                row = a_row[q] if a_stamp[q] == b else np.int32(0)
                if counts[row] == 0:
                    newest[row] = ts
                counts[row] += 1
                to = np.int64(row) * dim
                _add(sums[to : to + dim], values[x * dim : (x + 1) * dim])
        if total > 0:
            aggregate_count[b] = total
            for r in range(rows):
                if counts[r] > 0:
                    mean = sums[r * dim : (r + 1) * dim]
                    _add(aggregate[b], mean)
                    for k in range(dim):
                        mean[k] /= np.float32(counts[r])
            for k in range(dim):
                aggregate[b, k] /= np.float32(total)

        for j in range(n_ads):
            y = lo + j
            row = ad_row[j]
            if counts[row] > 0:
                topic_count[y] = counts[row]
                topic_ts[y] = newest[row]
                _copy(sums[row * dim : row * dim + dim], topic_mean[y])
            item = items[y]
            q = np.int64(((item * _GOLDEN) >> _U32) & t_mask)
            while t_stamp[q] == b and t_item[q] != item:
                q = np.int64(np.uint64(q + 1) & t_mask)
            if t_stamp[q] != b:
                continue
            v = ptrs[t_chunk[q]]
            ts = np.int64(buf[v + 2])
            if alive_at - ttl >= ts:
                continue
            ts_out[y] = ts
            pair_fingerprint[y] = buf[v + 4]
            n = np.int64(buf[v + 5] & _M32)
            x = np.int64(t_index[q])
            topics_at = 2 * (v + 7 + n)
            if _is_int8(buf, v):
                at = 4 * (topics_at + 2 * n) + x * dim
                _scale(i8[at : at + dim], f32[topics_at + n + x], vectors[y])
            else:
                at = 2 * (topics_at + n) + x * dim
                _decode(u16[at : at + dim], vectors[y])


@kernel
def scan(chunks, starts, sizes, max_ts, users, ts, pairs, fine):
    """Reads the headers of padded records (record r at byte starts[r] of `chunks`) and checks them.

    Fills users, ts, pairs and fine: whether the record is certainly a good chunk. The others need a closer look
    (`state.chunk.decode_chunk`), which says what is wrong, if anything.
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
        fine[r] = ok
