# mypy: ignore-errors
# (numba gives these functions their types)
"""Compiled loops of the store: over users, chunks and pairs, on raw buffers.

An *arena* is a ring of cached chunks (a uint64 buffer) with an open-addressing table of users (`state.cache` owns
both). A cached chunk at byte offset c (a multiple of 8) is

    ======  ====  =================================================================
    c       i64   byte offset of the user's next cached chunk, -1 at the end,
                  -3 for a chunk that is no longer in a list
    c + 8   i64   changelog offset
    c + 16  i64   bytes of the value that follow (event id left off, padded to 8)
    c + 24        the record as it came (`topics.packed`, kind ``E``), 56-byte header first
    ======  ====  =================================================================

Of a record the arena itself needs the user (word 1), the event time (word 2) and its size, so it takes those of kind
``C`` (`topics.packed_counts`) too; `state.count_kernels` looks them up.

A user's head is the byte offset of a chunk, `EMPTY` (known to have none) or `ABSENT` (may have some on disk). A user
that is not in the table has none while the arena is `COMPLETE`, else it may have some.

Chunks are written at the ring's head; room is made at its tail. A user met there that was asked for since it was last
met moves to the head with all its chunks, any other is forgotten.

All kernels lie in this one file because numba notices a change only in the file of the kernel itself.
Vectors are finite (`state.chunk` rejects others), which makes the float16 decoding exact without special cases.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from state.jit import HAS_HALF, kernel

EMPTY = -1
ABSENT = -2

HEAD, TAIL, WRAP, USED, ENTRIES, COMPLETE, EVICTED, DEAD_TS = range(8)
"""int64[8] of a ring: the words where writing goes on and where the oldest chunk is, the end of the chunks before the
head went round (-1: it has not), words in use, table entries, whether a user not in the table has nothing, users
forgotten so far, event time up to which chunks are dead"""
RING = 8

LINK_WORDS = 3
"""uint64 words before the value of a cached chunk"""

_END = np.uint64(0xFFFFFFFFFFFFFFFF)
_GARBAGE = np.uint64(0xFFFFFFFFFFFFFFFD)
_SPARE_WORDS = 1 << 15
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF_SCALE = np.float32(2.0**112)
_U32 = np.uint64(32)
_U48 = np.uint64(48)
_M32 = np.uint64(0xFFFFFFFF)
_1 = np.uint64(1)
_8 = np.uint64(8)
_M16 = np.uint64(0xFFFF)


@intrinsic
def _float_of_bits(typing_context: Any, bits: Any) -> Any:
    """float32 with the bit pattern of a uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return numba.float32(numba.uint32), codegen


@intrinsic
def _widened(typing_context: Any, bits: Any) -> Any:
    """float32 of the float16 with the bit pattern of a uint16, by the processor's own instruction."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return numba.float32(numba.uint16), codegen


@kernel
def half_by_bits(h):
    """float32 of the bits of a finite float16, exactly: its exponent and mantissa moved into place, then rescaled
    (which also normalises subnormals). Plain arithmetic, so loops over it vectorise on every machine."""
    w = np.uint32(h)
    bits = ((w & np.uint32(0x7FFF)) << np.uint32(13)) | ((w & np.uint32(0x8000)) << np.uint32(16))
    return _float_of_bits(np.uint32(bits)) * _HALF_SCALE


@kernel
def half_by_instruction(h):
    """The same where the processor has it; elsewhere this would call a library function for each number."""
    return _widened(np.uint16(h))


half = half_by_instruction if HAS_HALF else half_by_bits


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
def _fits(buf, ring, need):
    """Whether `need` words in a row are free at the head, which may go round to the start for them."""
    if ring[USED] == 0:
        ring[HEAD] = 0
        ring[TAIL] = 0
        ring[WRAP] = -1
    if ring[WRAP] >= 0:
        return ring[TAIL] - ring[HEAD] >= need
    if len(buf) - ring[HEAD] >= need:
        return True
    if ring[TAIL] >= need:
        ring[WRAP] = ring[HEAD]
        ring[HEAD] = 0
        return True
    return False


@kernel
def _forget(buf, c):
    """Marks the chunks of a list as garbage."""
    while c >= 0:
        w = c >> 3
        c = np.int64(buf[w])
        buf[w] = _GARBAGE


@kernel
def _move(i, buf, heads, ring):
    """A user's chunks, less the dead ones, to the head and next to each other; False where there is no room."""
    need = 0
    c = heads[i]
    while c >= 0:
        w = c >> 3
        if np.int64(buf[w + LINK_WORDS + 2]) > ring[DEAD_TS]:
            need += LINK_WORDS + (np.int64(buf[w + 2]) >> 3)
        c = np.int64(buf[w])
    if not _fits(buf, ring, need):
        return False
    c = heads[i]
    heads[i] = EMPTY
    last = np.int64(-1)
    while c >= 0:
        w = c >> 3
        c = np.int64(buf[w])
        if np.int64(buf[w + LINK_WORDS + 2]) > ring[DEAD_TS]:
            words = LINK_WORDS + (np.int64(buf[w + 2]) >> 3)
            to = ring[HEAD]
            for k in range(1, words):
                buf[to + k] = buf[w + k]
            buf[to] = _END
            if last < 0:
                heads[i] = 8 * to
            else:
                buf[last] = np.uint64(8 * to)
            last = to
            ring[HEAD] = to + words
            ring[USED] += words
        buf[w] = _GARBAGE
    return True


@kernel
def _advance(buf, keys, heads, refs, ring, spare):
    """Frees the oldest place; its user moves on if `spare` and it was asked for of late, else it is forgotten.
    Returns how many users were."""
    t = ring[TAIL]
    if t == ring[WRAP]:
        ring[TAIL] = 0
        ring[WRAP] = -1
        return 0
    words = LINK_WORDS + (np.int64(buf[t + 2]) >> 3)
    gone = 0
    if buf[t] != _GARBAGE:
        i = slot(keys, buf[t + LINK_WORDS + 1])
        again = spare and refs[i] != 0
        refs[i] = 0
        if not again or not _move(i, buf, heads, ring):
            _forget(buf, heads[i])
            heads[i] = ABSENT
            ring[EVICTED] += 1
            gone = 1
    ring[TAIL] = t + words
    ring[USED] -= words
    return gone


@kernel
def _make_room(buf, keys, heads, refs, ring, need):
    """Room for `need` words at the head, and some to spare so that users in demand can move; False if never."""
    if need > len(buf):
        return False
    spare = min(len(buf) >> 4, _SPARE_WORDS)
    while True:
        if (len(buf) - ring[USED] >= need + spare or ring[USED] == 0) and _fits(buf, ring, need):
            return True
        _advance(buf, keys, heads, refs, ring, True)


@kernel
def _enter(user, buf, keys, heads, refs, ring):
    """The user's place in the table, made where needed. A full table forgets the users that are only known as absent,
    and with them that all others have nothing."""
    i = slot(keys, user)
    if keys[i] == user:
        return i
    if 2 * ring[ENTRIES] >= len(keys):
        live = 0
        for k in range(len(keys)):
            live += heads[k] >= 0
        while 4 * live > len(keys):
            live -= _advance(buf, keys, heads, refs, ring, False)
        kept = np.empty((live, 3), np.uint64)
        n = 0
        for k in range(len(keys)):
            if heads[k] >= 0:
                kept[n, 0] = keys[k]
                kept[n, 1] = np.uint64(heads[k])
                kept[n, 2] = refs[k]
                n += 1
            elif heads[k] == ABSENT:
                ring[COMPLETE] = 0
        keys[:] = np.uint64(0)
        heads[:] = EMPTY
        refs[:] = 0
        for k in range(n):
            j = slot(keys, kept[k, 0])
            keys[j] = kept[k, 0]
            heads[j] = np.int64(kept[k, 1])
            refs[j] = np.uint8(kept[k, 2])
        ring[ENTRIES] = n
        i = slot(keys, user)
    keys[i] = user
    ring[ENTRIES] += 1
    return i


@kernel
def admit(users, chunk_splits, offsets, starts, chunks, buf, keys, heads, refs, ring):
    """Puts users with all their chunks into the arena: user u's are records chunk_splits[u]:chunk_splits[u+1], oldest
    first, record r at byte starts[r] of `chunks`. None of them may be there already; one too large is left out."""
    for u in range(len(users)):
        need = 0
        for r in range(chunk_splits[u], chunk_splits[u + 1]):
            need += LINK_WORDS + (_kept(chunks, starts[r] >> 3) >> 3)
        if not _make_room(buf, keys, heads, refs, ring, need):
            continue
        i = _enter(users[u], buf, keys, heads, refs, ring)
        heads[i] = EMPTY
        refs[i] = 1
        last = np.int64(-1)
        for r in range(chunk_splits[u + 1] - 1, chunk_splits[u] - 1, -1):  # newest first, as they will be read
            at = _place(buf, ring, np.int64(-1), offsets[r], chunks, starts[r] >> 3)
            if last < 0:
                heads[i] = at
            else:
                buf[last >> 3] = np.uint64(at)
            last = at


@kernel
def _kept(chunks, w):
    """Bytes of the record at word w without its event id, padded to 8."""
    if (chunks[w] >> np.uint64(24)) & np.uint64(0xFF) == np.uint64(0x43):
        return 32 + 8 * np.int64(chunks[w + 3] & _M32)
    n, d, s, p = _lengths(chunks, w)
    size = 56 + 12 * n + ((4 + d) * n if _is_int8(chunks, w) else 2 * n * d) + 2 * s + 2 * p
    return (size + 7) & ~7


@kernel
def _place(buf, ring, then, offset, chunks, w):
    """Copies the record at word w of `chunks` to the head, where there must be room, with `then` the chunk after it;
    returns its byte offset."""
    size = _kept(chunks, w)
    to = ring[HEAD]
    buf[to] = np.uint64(then)
    buf[to + 1] = np.uint64(offset)
    buf[to + 2] = np.uint64(size)
    for k in range(size >> 3):
        buf[to + LINK_WORDS + k] = chunks[w + k]
    ring[HEAD] = to + LINK_WORDS + (size >> 3)
    ring[USED] += LINK_WORDS + (size >> 3)
    return 8 * to


@kernel
def ensure(users, start, keys, heads, refs, ring, missing):
    """Indexes of those of users[start:] that are not known here, into `missing` (int64[B]); returns how many. The
    others are marked as asked for."""
    n = 0
    for b in range(start, len(users)):
        i = slot(keys, users[b])
        if keys[i] == users[b]:
            if heads[i] != ABSENT:
                refs[i] = 1
                continue
        elif ring[COMPLETE] != 0:
            continue
        missing[n] = b
        n += 1
    return n


@kernel
def heads_of(users, first, last, keys, heads, out):
    """The head of each of users[first:last], into `out` (int64[B])."""
    for b in range(first, last):
        out[b] = heads[slot(keys, users[b])]


@kernel
def append(users, offsets, starts, chunks, known_below, buf, keys, heads, refs, ring):
    """Adds new chunks to the users that are known here; a user it cannot keep right becomes `ABSENT`.

    `chunks`: uint64 words of padded records, record r at byte starts[r]. Only an offset below `known_below` can be
    there already and is looked for.
    """
    for r in range(len(users)):
        user = users[r]
        i = slot(keys, user)
        if keys[i] == user:
            if heads[i] == ABSENT:
                continue
        elif ring[COMPLETE] == 0:
            continue
        src = starts[r] >> 3
        if offsets[r] < known_below and keys[i] == user:
            c = heads[i]
            seen = False
            while c >= 0 and not seen:
                w = c >> 3
                seen = np.int64(buf[w + 1]) == offsets[r] and buf[w + LINK_WORDS + 2] == chunks[src + 2]
                c = np.int64(buf[w])
            if seen:
                continue
        room = _make_room(buf, keys, heads, refs, ring, LINK_WORDS + (_kept(chunks, src) >> 3))
        i = _enter(user, buf, keys, heads, refs, ring)
        # Making room may have forgotten this very user; in a table made anew it stands as one without chunks.
        if not room:
            _forget(buf, heads[i])
            heads[i] = ABSENT
        elif heads[i] != ABSENT:
            heads[i] = _place(buf, ring, heads[i], offsets[r], chunks, src)


@kernel
def trim(buf, keys, heads, ring):
    """Takes the dead chunks out of the users' lists."""
    for i in range(len(keys)):
        c = heads[i]
        last = np.int64(-1)
        while c >= 0:
            w = c >> 3
            then = np.int64(buf[w])
            if np.int64(buf[w + LINK_WORDS + 2]) > ring[DEAD_TS]:
                last = w
            else:
                buf[w] = _GARBAGE
                if last < 0:
                    heads[i] = then
                else:
                    buf[last] = np.uint64(then)
            c = then


# Indexes are unsigned where they are computed: a signed one may be negative, which numba checks for at every access,
# and such loops do not vectorise. Slices would do too, but each costs two atomic counts of references.


@kernel
def _decode(halves, at, out, to, count):
    """float16 bits halves[at:] to out[to:]."""
    for k in range(count):
        out[to + k] = half(halves[at + k])


@kernel
def _decode_bytes(u8, at, out, to, count):
    """The same from byte `at`, which int8 columns of an odd number of bytes leave unaligned."""
    for k in range(count):
        y = at + k + k
        out[to + k] = half(np.uint16(u8[y]) | (np.uint16(u8[y + _1]) << np.uint16(8)))


@kernel
def _scale(numbers, at, scale, out, to, count):
    for k in range(count):
        out[to + k] = np.float32(numbers[at + k]) * scale


@kernel
def _copy(what, at, out, to, count):
    for k in range(count):
        out[to + k] = what[at + k]


@kernel
def _zero(out, to, count):
    for k in range(count):
        out[to + k] = np.float32(0)


@kernel
def _add_blocks(what, at, sums, to, blocks):
    """Adds in blocks of 8 numbers, one instruction each; what lies behind the row's end goes to the sums' padding."""
    for _ in range(blocks):
        for k in range(_8):
            sums[to + k] += what[at + k]
        at += _8
        to += _8


@kernel
def _find(keys, stamps, stamp, key, mask):
    """Place of `key` in a table that holds what is stamped so, or the free place where it belongs."""
    q = ((np.uint64(key) * _GOLDEN) >> _U32) & mask
    while stamps[q] == stamp and keys[q] != key:
        q = (q + _1) & mask
    return q


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
    """Answers requests first..last-1, whose users are all in the arena. Writes every number of their outputs.

    B requests, N items over all of them; everything is C-contiguous, times are ms.

    - Asked: users u64[B], splits i64[B + 1] (items of request b are splits[b]:splits[b + 1]), items u64[N],
      topics u32[N], now i64[B].
    - Of the model: model u64 (version hash), dim, state_dim, profile_dim. Chunks of others are not seen.
    - Time: ttl, window, floor (what died before it is gone, whatever `now` is), all i64.
    - The arena (`state.cache.Arena`): buf u64[capacity / 8], keys u64[slots], heads i64[slots], slots a power of 2.
    - Answers, as in `state.api.Lookup`: vectors f32[N, dim], ts_out i64[N], pair_fingerprint u64[N],
      topic_mean f32[N, dim], topic_count i32[N], topic_ts i64[N]; aggregate f32[B, dim], aggregate_count i32[B],
      aggregate_ts i64[B], state f32[B, state_dim], state_ts i64[B], fingerprint u64[B], profile f32[B, profile_dim].

    Raises `ValueError` when splits do not ascend within the items."""
    u32 = buf.view(np.uint32)
    u16 = buf.view(np.uint16)
    f32 = buf.view(np.float32)
    i8 = buf.view(np.int8)
    u8 = buf.view(np.uint8)
    vectors_flat = vectors.reshape(vectors.size)
    topic_flat = topic_mean.reshape(topic_mean.size)
    aggregate_flat = aggregate.reshape(aggregate.size)
    state_flat = state.reshape(state.size)
    profile_flat = profile.reshape(profile.size)
    width = np.uint64(dim)
    blocks = (width + np.uint64(7)) >> np.uint64(3)
    row_size = blocks << np.uint64(3)
    horizon = max(ttl, window)

    ptrs = np.empty(64, np.int64)
    # The user's pairs, newest chunk first: a table of (item, request it was filled for, chunk's place, index in it).
    t_item = np.empty(256, np.uint64)
    t_stamp = np.full(256, -1, np.int32)
    t_chunk = np.empty(256, np.uint64)
    t_index = np.empty(256, np.uint64)
    # The topics asked for: a table of (topic, request, row) and sums by row. Row 0 takes all other topics, so that
    # every pair is added once and the plain aggregate is the sum of the rows.
    a_topic = np.empty(128, np.uint32)
    a_stamp = np.full(128, -1, np.int32)
    a_row = np.empty(128, np.uint64)
    sums = np.empty(np.uint64(65) * row_size, np.float32)
    counts = np.empty(65, np.int32)
    newest = np.empty(65, np.int64)
    ad_row = np.empty(64, np.uint64)
    values = np.zeros(64 * dim + 8, np.float32)
    means = np.empty(row_size, np.float32)

    for b in range(np.uint64(first), np.uint64(last)):
        if splits[b] < 0 or splits[b + _1] < splits[b] or splits[b + _1] > len(items):
            raise ValueError("splits do not ascend within the items")
        lo = np.uint64(splits[b])
        hi = np.uint64(splits[b + _1])
        stamp = np.int32(b)
        _zero(vectors_flat, lo * width, (hi - lo) * width)
        _zero(topic_flat, lo * width, (hi - lo) * width)
        for y in range(lo, hi):
            ts_out[y] = -1
            topic_ts[y] = -1
            topic_count[y] = 0
            pair_fingerprint[y] = 0
        _zero(aggregate_flat, b * width, width)
        aggregate_count[b] = 0
        aggregate_ts[b] = -1
        _zero(state_flat, b * np.uint64(state_dim), np.uint64(state_dim))
        state_ts[b] = -1
        fingerprint[b] = 0
        _zero(profile_flat, b * np.uint64(profile_dim), np.uint64(profile_dim))

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
            at = np.uint64(8 * v + 56 + 12 * n + ((4 + dim) * n if _is_int8(buf, v) else 2 * n * dim))
            if need_state and s > 0:
                need_state = False
                state_ts[b] = ts
                fingerprint[b] = buf[v + 4]
                _decode_bytes(u8, at, state_flat, b * np.uint64(s), np.uint64(s))
            if need_profile and p > 0:
                need_profile = False
                _decode_bytes(u8, at + np.uint64(2 * s), profile_flat, b * np.uint64(p), np.uint64(p))
        if pairs == 0:
            continue

        n_ads = hi - lo
        if 2 * n_ads > len(a_topic):
            size = 2 * len(a_topic)
            while size < 2 * n_ads:
                size *= 2
            a_topic = np.empty(size, np.uint32)
            a_stamp = np.full(size, -1, np.int32)
            a_row = np.empty(size, np.uint64)
            sums = np.empty(np.uint64(size // 2 + 1) * row_size, np.float32)
            counts = np.empty(size // 2 + 1, np.int32)
            newest = np.empty(size // 2 + 1, np.int64)
            ad_row = np.empty(size // 2, np.uint64)
        a_mask = np.uint64(len(a_topic) - 1)
        rows = np.uint64(1)
        for j in range(n_ads):
            topic = topics[lo + j]
            q = _find(a_topic, a_stamp, stamp, topic, a_mask)
            if a_stamp[q] != stamp:
                a_stamp[q] = stamp
                a_topic[q] = topic
                a_row[q] = rows
                rows += _1
            ad_row[j] = a_row[q]
        _zero(sums, np.uint64(0), rows * row_size)
        for r in range(rows):
            counts[r] = 0

        if 2 * pairs > len(t_item):
            size = 2 * len(t_item)
            while size < 2 * pairs:
                size *= 2
            t_item = np.empty(size, np.uint64)
            t_stamp = np.full(size, -1, np.int32)
            t_chunk = np.empty(size, np.uint64)
            t_index = np.empty(size, np.uint64)
        t_mask = np.uint64(len(t_item) - 1)
        total = 0
        for a in range(m):
            v = np.uint64(ptrs[a])
            ts = np.int64(buf[v + np.uint64(2)])
            n = buf[v + np.uint64(5)] & _M32
            in_window = alive_at - window < ts
            items_at = v + np.uint64(7)
            topics_at = (items_at + n) << _1
            if in_window:
                if n * width + _8 > len(values):
                    values = np.zeros(n * width + _8, np.float32)
                if _is_int8(buf, v):
                    at = (topics_at + n + n) << np.uint64(2)
                    for x in range(n):
                        _scale(i8, at + x * width, f32[topics_at + n + x], values, x * width, width)
                else:
                    _decode(u16, (topics_at + n) << _1, values, np.uint64(0), n * width)
            for x in range(n):
                item = buf[items_at + x]
                q = _find(t_item, t_stamp, stamp, item, t_mask)
                if t_stamp[q] == stamp:
                    continue
                t_stamp[q] = stamp
                t_item[q] = item
                t_chunk[q] = v
                t_index[q] = x
                if not in_window:
                    continue
                if total == 0:
                    aggregate_ts[b] = ts
                total += 1
                q = _find(a_topic, a_stamp, stamp, u32[topics_at + x], a_mask)
                row = a_row[q] if a_stamp[q] == stamp else np.uint64(0)
                if counts[row] == 0:
                    newest[row] = ts
                counts[row] += 1
                _add_blocks(values, x * width, sums, row * row_size, blocks)
        if total > 0:
            aggregate_count[b] = total
            _zero(means, np.uint64(0), row_size)
            for r in range(rows):
                if counts[r] > 0:
                    _add_blocks(sums, r * row_size, means, np.uint64(0), blocks)
                    count = np.float32(counts[r])
                    for k in range(r * row_size, (r + _1) * row_size):
                        sums[k] /= count
            for k in range(width):
                aggregate_flat[b * width + k] = means[k] / np.float32(total)

        for j in range(n_ads):
            y = lo + j
            row = ad_row[j]
            if counts[row] > 0:
                topic_count[y] = counts[row]
                topic_ts[y] = newest[row]
                _copy(sums, row * row_size, topic_flat, y * width, width)
            item = items[y]
            q = _find(t_item, t_stamp, stamp, item, t_mask)
            if t_stamp[q] != stamp:
                continue
            v = t_chunk[q]
            ts = np.int64(buf[v + np.uint64(2)])
            if alive_at - ttl >= ts:
                continue
            ts_out[y] = ts
            pair_fingerprint[y] = buf[v + np.uint64(4)]
            n = buf[v + np.uint64(5)] & _M32
            x = t_index[q]
            topics_at = (v + np.uint64(7) + n) << _1
            if _is_int8(buf, v):
                at = ((topics_at + n + n) << np.uint64(2)) + x * width
                _scale(i8, at, f32[topics_at + n + x], vectors_flat, y * width, width)
            else:
                _decode(u16, ((topics_at + n) << _1) + x * width, vectors_flat, y * width, width)


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
