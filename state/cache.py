"""A bounded cache of users' chunks, laid out so that a look-up is one compiled call.

Two arenas of the same size: users live in the *young* one; when it is full it becomes the *old* one and the former
old one is forgotten whole. A user found in the old arena moves back to the young. That is a least-recently-used
order of two steps, with no lists to keep and nothing to free one by one. Users without chunks are cached too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from state import kernels
from state.api import I64, U64

PADS = [bytes(k) for k in range(8)]
_BYTES_PER_SLOT = 256
_DEAD_NONE = -(1 << 62)


@dataclass(slots=True)
class Loaded:
    """Users read from disk with all their chunks, for `Arena.admit`."""

    users: list[int] = field(default_factory=list)
    splits: list[int] = field(default_factory=lambda: [0])
    offsets: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def chunk(self, offset: int, value: bytes) -> None:
        """Of the user that `end_user` names next; the oldest first is fastest."""
        self.offsets.append(offset)
        self.starts.append(self.size)
        pad = -len(value) & 7
        self.parts.append(value)
        self.parts.append(PADS[pad])
        self.size += len(value) + pad

    def end_user(self, user: int) -> None:
        self.users.append(user)
        self.splits.append(len(self.offsets))


class Arena:
    def __init__(self, capacity_bytes: int, users: int = 0) -> None:
        self.capacity = max(4096, (capacity_bytes + 7) & ~7)
        self.buf: U64 = np.zeros(self.capacity // 8, np.uint64)
        slots = 1 << max(6, (self.capacity // _BYTES_PER_SLOT - 1).bit_length(), (4 * users).bit_length())
        self.keys: U64 = np.zeros(slots, np.uint64)
        self.heads: I64 = np.full(slots, kernels.EMPTY, np.int64)
        self.counts: I64 = np.zeros(2, np.int64)
        """bytes used, table entries"""

    def clear(self) -> None:
        self.keys.fill(0)
        self.heads.fill(kernels.EMPTY)
        self.counts.fill(0)

    def admit(self, loaded: Loaded) -> int:
        """Takes in users in order; returns how many there was room for."""
        words = np.frombuffer(b"".join(loaded.parts) or bytes(8), np.uint64)
        taken: int = kernels.admit(
            np.array(loaded.users, np.uint64), np.array(loaded.splits), np.array(loaded.offsets, np.int64),
            np.array(loaded.starts, np.int64), words, self.buf, self.keys, self.heads, self.counts,
        )  # fmt: skip
        return taken


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

    def append(self, users: U64, offsets: I64, starts: I64, chunks: U64, known_below: int) -> None:
        """Adds what was just written to those users that are cached."""
        y, o = self.young, self.old
        kernels.append(users, offsets, starts, chunks, known_below, y.buf, y.keys, y.heads, y.counts, o.keys, o.heads)


def arena_of(loaded: Loaded) -> Arena:
    """An arena for just these users."""
    arena = Arena(loaded.size + 8 * kernels.LINK_WORDS * len(loaded.offsets), len(loaded.users))
    arena.admit(loaded)
    return arena
