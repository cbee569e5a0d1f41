"""A bounded cache of users' chunks, laid out so that a look-up is one compiled call.

Two arenas of the same size: users live in the *young* one; when it is full it becomes the *old* one and the former
old one is forgotten whole. A user found in the old arena moves back to the young. That is a least-recently-used
order of two steps, with no lists to keep and nothing to free one by one. Users without chunks are cached too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from state import kernels
from state.api import I64, U64

_LINK = struct.Struct("<qqq")
_BYTES_PER_SLOT = 256
_DEAD_NONE = -(1 << 62)


class Arena:
    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = max(4096, capacity_bytes) & ~7
        self.buf: U64 = np.zeros(self.capacity // 8, np.uint64)
        self.bytes = memoryview(self.buf.data).cast("B")
        slots = 1 << max(6, (self.capacity // _BYTES_PER_SLOT - 1).bit_length())
        self.keys: U64 = np.zeros(slots, np.uint64)
        self.heads: I64 = np.full(slots, kernels.EMPTY, np.int64)
        self.counts: I64 = np.zeros(2, np.int64)
        """bytes used, table entries"""

    def clear(self) -> None:
        self.keys.fill(0)
        self.heads.fill(kernels.EMPTY)
        self.counts.fill(0)

    @property
    def crowded(self) -> bool:
        return 2 * int(self.counts[1]) >= len(self.keys)


Chunks = Sequence[tuple[int, bytes, int]]
"""One user's chunks: (changelog offset, record, bytes of the record to keep), any order, oldest first is fastest."""


class UserCache:
    """Not thread-safe: its store holds a lock around it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.young = Arena(capacity_bytes // 2)
        self.old = Arena(capacity_bytes // 2)
        self.dead_ts = _DEAD_NONE
        """chunks of this event time and before are dead and not carried along"""
        self.hits = 0
        self.misses = 0
        self.flips = 0

    def flip(self) -> None:
        self.young, self.old = self.old, self.young
        self.young.clear()
        self.flips += 1

    def clear(self) -> None:
        self.young.clear()
        self.old.clear()

    @property
    def used_bytes(self) -> int:
        return int(self.young.counts[0] + self.old.counts[0])

    def ensure(self, users: U64, start: int, missing: npt.NDArray[np.int64]) -> tuple[int, int]:
        """(how many of users[start:] must be loaded, first index without room); `missing` gets their indexes."""
        y, o = self.young, self.old
        found: tuple[int, int] = kernels.ensure(
            users, start, y.buf, y.keys, y.heads, y.counts, o.buf, o.keys, o.heads, self.dead_ts, missing
        )
        return found

    def add(self, user: int, chunks: Chunks) -> bool:
        """Puts one loaded user into the young arena; False when there is no room."""
        return put(self.young, user, chunks)

    def append(self, users: U64, offsets: I64, starts: I64, kept: I64, chunks: U64, known_below: int) -> None:
        """Adds what was just written to those users that are cached."""
        y, o = self.young, self.old
        if y.counts[1] or o.counts[1]:
            kernels.append(
                users, offsets, starts, kept, chunks, known_below, y.buf, y.keys, y.heads, y.counts, o.keys, o.heads
            )


def put(arena: Arena, user: int, chunks: Chunks) -> bool:
    need = sum(_LINK.size + ((kept + 7) & ~7) for _, _, kept in chunks)
    at = int(arena.counts[0])
    if at + need > arena.capacity or arena.crowded:
        return False
    head = kernels.EMPTY
    raw = arena.bytes
    for offset, value, kept in chunks:
        size = (kept + 7) & ~7
        _LINK.pack_into(raw, at, head, offset, size)
        raw[at + _LINK.size : at + _LINK.size + kept] = value if kept == len(value) else value[:kept]
        head = at
        at += _LINK.size + size
    arena.counts[0] = at
    i = kernels.slot(arena.keys, np.uint64(user))
    if arena.keys[i] == 0:
        arena.keys[i] = user
        arena.counts[1] += 1
    arena.heads[i] = head
    return True


def arena_of(user: int, chunks: Chunks) -> Arena:
    """An arena for one user whose chunks fit no cache."""
    arena = Arena(sum(_LINK.size + ((kept + 7) & ~7) for _, _, kept in chunks))
    put(arena, user, chunks)
    return arena
