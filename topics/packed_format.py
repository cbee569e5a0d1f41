"""What all packed records share: the first 8 bytes, sizes that are checked before anything is read, and columns.

Magic ``SLR`` (3 bytes), kind (u8), format version (u8), flags (u8), two reserved zero bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from topics.errors import DecodeError
from topics.events import MAX_TS, MIN_TS

MAGIC = b"SLR"
VERSION = 1
MAX_RECORD_BYTES = 8 << 20

_HEAD = struct.Struct("<3sBBBH")

Bytes = bytes | bytearray | memoryview


def packed_head(layout: struct.Struct, *fields: Any) -> bytes:
    try:
        return layout.pack(*fields)
    except struct.error as e:
        raise ValueError(f"a field does not fit the format: {e}") from None


def joined(parts: tuple[bytes, ...]) -> bytes:
    record = b"".join(parts)
    if len(record) > MAX_RECORD_BYTES:
        raise ValueError(f"{len(record)} bytes, a record has at most {MAX_RECORD_BYTES}")
    return record


_DTYPES = {name: np.dtype(name) for name in ("<u8", "<i8", "<u4", "<f4", "<f2", "u1", "i1")}


def column_bytes(a: npt.NDArray[Any], dtype: str) -> bytes:
    """Row by row, whatever the layout in memory."""
    wanted = _DTYPES[dtype]
    return (a if a.dtype == wanted else a.astype(wanted)).tobytes()


def check_head(data: Bytes | None, kind: int, size: int, flags_known: int) -> Bytes:
    if not data:
        raise DecodeError("empty", "the record has no value")
    if len(data) > MAX_RECORD_BYTES:
        raise DecodeError("too_large", f"{len(data)} bytes, at most {MAX_RECORD_BYTES}")
    if len(data) < _HEAD.size:
        raise DecodeError("truncated", f"{len(data)} bytes, a header has {size}")
    magic, got_kind, version, flags, _ = _HEAD.unpack_from(data, 0)
    if magic != MAGIC:
        raise DecodeError("wrong_magic", f"begins with {bytes(data[:3])!r}, expected {MAGIC!r}")
    if got_kind != kind:
        raise DecodeError("wrong_kind", f"kind {chr(got_kind)!r}, expected {chr(kind)!r}")
    if version > VERSION or version == 0:
        raise DecodeError("newer_version", f"format version {version}, this program reads up to {VERSION}")
    if flags & ~flags_known:
        raise DecodeError("unknown_flags", f"flags {flags:#x}, this program knows {flags_known:#x}")
    if len(data) < size:
        raise DecodeError("truncated", f"{len(data)} bytes, a header has {size}")
    return data


def check_size(data: Bytes, want: int) -> None:
    if len(data) < want:
        raise DecodeError("truncated", f"{len(data)} bytes, the header announces {want}")
    if len(data) > want:
        raise DecodeError("trailing_bytes", f"{len(data)} bytes, the header announces {want}")


def check_time(ts: int) -> None:
    if not MIN_TS <= ts <= MAX_TS:
        raise DecodeError("time_out_of_range", f"event time {ts} ms; expected {MIN_TS}..{MAX_TS}")
