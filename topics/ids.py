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

_FEW = 4


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


def hash_ids(values: Sequence[ItemId]) -> U64:
    """uint64[n] hashes, in the order given: those of `hash_id`, most of them in compiled code."""
    if len(values) >= _FEW:
        from topics.id_lists import hash_joined  # numba is slow to import

        try:
            text = "\n".join(values).encode()  # type: ignore[arg-type]
        except (TypeError, UnicodeEncodeError):
            text = "\n".join(map(str, values)).encode("utf-8", "surrogatepass")
        found = hash_joined(text, len(values))
        if found is not None:
            return found
    return np.array([hash_id(v) for v in values], np.uint64)
