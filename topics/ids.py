"""Ids: strings (or integers) outside, unsigned 64-bit xxh3 hashes inside.

An integer id and its decimal string are the same id: ``hash_id(7) == hash_id("7")``.
Hash 0 is kept for "no id" (padding); an id that hashes to 0 becomes 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

U64 = npt.NDArray[np.uint64]

ItemId = str | int


def hash_id(value: ItemId) -> int:
    """64-bit hash of one id, in 1 .. 2**64 - 1."""
    return xxh3_64_intdigest(str(value).encode("utf-8", "surrogatepass")) or 1


def sampled(value: ItemId, share: float) -> bool:
    """Whether this id is in a sample of that share: the same answer in every process, and a smaller share's sample is
    part of a larger one's."""
    return share >= 1.0 or hash_id(value) < share * 2.0**64


def hash_bytes(key: bytes) -> int:
    """`hash_id` of the id whose UTF-8 bytes these are; any bytes are welcome."""
    return xxh3_64_intdigest(key) or 1


class IdHasher:
    """Hashes ids with a bounded memo: item ids repeat, so a dict hit (50 ns) beats encoding and hashing.

    The memo is emptied when it reaches `capacity` entries, so memory is bounded whatever the ids are.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        self._capacity = capacity
        self._memo: dict[ItemId, int] = {}

    def one(self, value: ItemId) -> int:
        memo = self._memo
        h = memo.get(value)
        if h is None:
            if len(memo) >= self._capacity:
                memo.clear()
            h = hash_id(value)
            if type(value) is int or len(value) <= 256:  # type: ignore[arg-type]
                memo[value] = h
        return h

    def many(self, values: Sequence[ItemId]) -> U64:
        """uint64[n] hashes, in the order given."""
        memo = self._memo
        try:
            return np.array([memo[v] for v in values], dtype=np.uint64)
        except KeyError:
            pass
        # A few are new: they are learnt first, and the others still cost one look-up each.
        long: dict[ItemId, int] = {}
        for v in set(values).difference(memo):
            h = self.one(v)
            if v not in memo:
                long[v] = h
        try:
            return np.array([memo[v] for v in values], dtype=np.uint64)
        except KeyError:  # not kept: ids that are long, or more new ones than the memo holds
            one = self.one
            return np.array([long.get(v) or one(v) for v in values], dtype=np.uint64)
