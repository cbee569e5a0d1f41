"""A bounded cache of users' chunks, laid out so that a look-up is one compiled call.

Chunks lie in a ring in the order in which they came. When it is full, the users whose chunks are oldest there are
forgotten, but those that were asked for meanwhile go to the front (the CLOCK order of eviction): no free lists, no
fragments, and nearly all of the memory holds users. Users without chunks are cached too.

A store that began empty knows of every user whether it has chunks on disk, until the table of users is full. So what
is written to it is in the cache without having been read: precomputed users are those about to be asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from state import kernels
from state.api import I64, U64

PADS = [bytes(k) for k in range(8)]
_BYTES_PER_SLOT = 512
"""of chunks for a place in the table, which is to stay half empty"""
_SLOT_BYTES = 17
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

    def columns(self) -> tuple[I64, I64, U64]:
        """(changelog offsets, byte offsets, all records as words)"""
        words = np.frombuffer(b"".join(self.parts) or bytes(8), np.uint64)
        return np.array(self.offsets, np.int64), np.array(self.starts, np.int64), words

    def end_user(self, user: int) -> None:
        self.users.append(user)
        self.splits.append(len(self.offsets))


class Arena:
    """A ring of chunks and the table of its users; not thread-safe: its store holds a lock around it."""

    def __init__(self, capacity_bytes: int, users: int = 0) -> None:
        """`users`: how many the table must have room for, whatever their size."""
        self.capacity = max(4096, (capacity_bytes + 7) & ~7)
        # Nothing is read before it is written, and numpy asks for huge pages (cheaper to touch first) only for `empty`.
        self.buf: U64 = np.empty(self.capacity // 8, np.uint64)
        slots = 1 << max(6, (self.capacity // _BYTES_PER_SLOT).bit_length() - 1, (4 * users).bit_length())
        self.keys: U64 = np.zeros(slots, np.uint64)
        self.heads: I64 = np.full(slots, kernels.EMPTY, np.int64)
        self.refs: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        """whether the user was asked for since its turn at the tail"""
        self.ring: I64 = np.zeros(kernels.RING, np.int64)
        self.clear(complete=False)

    @property
    def nbytes(self) -> int:
        return self.buf.nbytes + self.keys.nbytes + self.heads.nbytes + self.refs.nbytes

    def clear(self, complete: bool) -> None:
        """`complete`: there is nothing on disk either."""
        self.keys.fill(0)
        self.heads.fill(kernels.EMPTY)
        self.refs.fill(0)
        dead_ts = self.ring[kernels.DEAD_TS]
        self.ring[:] = (0, 0, -1, 0, 0, complete, self.ring[kernels.EVICTED], dead_ts)

    def admit(self, loaded: Loaded) -> None:
        """Takes in users that are not here yet; those larger than the arena stay out."""
        kernels.admit(
            np.array(loaded.users, np.uint64), np.array(loaded.splits), *loaded.columns(),
            self.buf, self.keys, self.heads, self.refs, self.ring,
        )  # fmt: skip


class UserCache(Arena):
    """The arena of a store: users looked up of late, and those written to of late."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes * _BYTES_PER_SLOT // (_BYTES_PER_SLOT + _SLOT_BYTES))
        self.dead_ts = _DEAD_NONE
        self.hits = 0
        self.misses = 0

    @property
    def dead_ts(self) -> int:
        """Chunks of this event time and before are dead and not carried along."""
        return int(self.ring[kernels.DEAD_TS])

    @dead_ts.setter
    def dead_ts(self, ts_ms: int) -> None:
        self.ring[kernels.DEAD_TS] = ts_ms

    @property
    def used_bytes(self) -> int:
        return 8 * int(self.ring[kernels.USED])

    @property
    def evicted(self) -> int:
        """Users forgotten to make room."""
        return int(self.ring[kernels.EVICTED])

    def ensure(self, users: U64, start: int, missing: I64) -> int:
        """How many of users[start:] must be read from disk; `missing` gets their indexes."""
        n: int = kernels.ensure(users, start, self.keys, self.heads, self.refs, self.ring, missing)
        return n

    def append(self, users: U64, offsets: I64, starts: I64, chunks: U64, known_below: int) -> None:
        """Adds what was just written to the users whose chunks are all here, new users among them."""
        kernels.append(
            users, offsets, starts, chunks, known_below, self.buf, self.keys, self.heads, self.refs, self.ring
        )

    def trim(self) -> None:
        """Lets go of dead chunks; look-ups would pass over them."""
        kernels.trim(self.buf, self.keys, self.heads, self.ring)


def arena_of(loaded: Loaded) -> Arena:
    """An arena for just these users."""
    arena = Arena(2 * (loaded.size + 8 * kernels.LINK_WORDS * len(loaded.offsets)), len(loaded.users))
    arena.admit(loaded)
    return arena
