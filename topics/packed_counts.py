"""Packed records of the rolling counts, counter -> rankers; the first 8 bytes as in `topics.packed_format`.

``C`` count chunk (version 1), one per user event, on `counts` with the user as key. flags bit 0: the items were
clicked, else shown:

    ======  ========================  ====================================================================
    offset  type                      field
    ======  ========================  ====================================================================
    0       8 bytes                   magic, kind, version, flags, reserved
    8       u64                       user hash, not 0
    16      i64                       event time, ms
    24      u32                       n items
    28      u32                       reserved (0)
    32      u64[n]                    item hashes in the event's order, an item as often as the event has it
    ======  ========================  ====================================================================

``I`` item deltas (version 1), one per batch, partition and 5-minute bucket, on `item-counts`. They add up: that of any
item and bucket is the sum over all records:

    ======  ========================  ====================================================================
    offset  type                      field
    ======  ========================  ====================================================================
    0       8 bytes                   magic, kind, version, flags (0), reserved
    8       i64                       start of the bucket in event time, ms, a multiple of `BUCKET_MS`
    16      u32                       n items
    20      u32                       reserved (0)
    24      u64[n]                    item hashes, strictly ascending, none 0
            u32[n]                    times shown
            u32[n]                    times clicked
    ======  ========================  ====================================================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from topics.errors import DecodeError
from topics.packed_format import (
    MAGIC,
    VERSION,
    Bytes,
    check_head,
    check_size,
    check_time,
    column_bytes,
    joined,
    packed_head,
)

KIND_COUNT = ord("C")
KIND_ITEMS = ord("I")
FLAG_CLICKED = 1
BUCKET_MS = 300_000
MAX_ITEMS_PER_DELTA = 1 << 16
"""beyond it a bucket's deltas are cut into several records, far below the size that a broker refuses"""

_C = struct.Struct("<3sBBBHQqII")
_I = struct.Struct("<3sBBBHqII")
assert _C.size == 32
assert _I.size == 24

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]


@dataclass(slots=True)
class CountChunk:
    user: int
    """user hash"""
    ts_ms: int
    clicked: bool
    """else shown"""
    items: U64
    """uint64[n], an item as often as the event has it"""


@dataclass(slots=True)
class ItemDeltas:
    bucket_ms: int
    """start of the bucket, event time"""
    items: U64
    """uint64[n], strictly ascending"""
    shown: U32
    """uint32[n]"""
    clicked: U32
    """uint32[n]"""


def encode_count(c: CountChunk) -> bytes:
    """Raises ValueError when a field does not fit the format."""
    head = packed_head(
        _C, MAGIC, KIND_COUNT, VERSION, FLAG_CLICKED if c.clicked else 0, 0, c.user, c.ts_ms, len(c.items), 0
    )
    return joined((head, column_bytes(c.items, "<u8")))


def decode_count(data: Bytes | None) -> CountChunk:
    """Views into `data`. Raises `DecodeError`."""
    data = check_head(data, KIND_COUNT, _C.size, flags_known=FLAG_CLICKED)
    _, _, _, flags, _, user, ts, n, _ = _C.unpack_from(data, 0)
    check_size(data, _C.size + 8 * n)
    check_time(ts)
    if user == 0:
        raise DecodeError("empty_user", "user hash 0")
    return CountChunk(user, ts, bool(flags & FLAG_CLICKED), np.frombuffer(data, "<u8", n, _C.size))


def encode_items(d: ItemDeltas) -> bytes:
    """Raises ValueError when columns do not line up, are not sorted, or the time is not a bucket's start."""
    n = len(d.items)
    if len(d.shown) != n or len(d.clicked) != n:
        raise ValueError("item delta columns do not line up")
    if d.bucket_ms % BUCKET_MS:
        raise ValueError(f"{d.bucket_ms} ms is not the start of a bucket of {BUCKET_MS} ms")
    if n > 1 and not bool((d.items[1:] > d.items[:-1]).all()):
        raise ValueError("item hashes are not strictly ascending")
    head = packed_head(_I, MAGIC, KIND_ITEMS, VERSION, 0, 0, d.bucket_ms, n, 0)
    return joined((head, column_bytes(d.items, "<u8"), column_bytes(d.shown, "<u4"), column_bytes(d.clicked, "<u4")))


def decode_items(data: Bytes | None) -> ItemDeltas:
    """Views into `data`. Raises `DecodeError`."""
    data = check_head(data, KIND_ITEMS, _I.size, flags_known=0)
    _, _, _, _, _, bucket, n, _ = _I.unpack_from(data, 0)
    check_size(data, _I.size + 16 * n)
    check_time(bucket)
    if bucket % BUCKET_MS:
        raise DecodeError("time_out_of_range", f"{bucket} ms is not the start of a bucket of {BUCKET_MS} ms")
    items = np.frombuffer(data, "<u8", n, _I.size)
    if n > 1 and not bool((items[1:] > items[:-1]).all()):
        raise DecodeError("not_sorted", "item hashes are not strictly ascending")
    if n and items[0] == 0:
        raise DecodeError("empty_id", "item hash 0")
    at = _I.size + 8 * n
    return ItemDeltas(bucket, items, np.frombuffer(data, "<u4", n, at), np.frombuffer(data, "<u4", n, at + 4 * n))
