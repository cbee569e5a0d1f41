"""What a store knows about itself.

``STORE`` (a file of the directory, JSON): the mark that a directory is a store, with its format version. It is there
before RocksDB writes its first byte, so a directory with the mark may be wiped and rebuilt, any other may not.

``meta`` (a key of the default column family, 32 bytes, little-endian), written in every WriteBatch:

    ======  ======  ===============================================
    0       4 byte  magic ``SLST``
    4       u16     version (1)
    6       u16     reserved (0)
    8       i64     next changelog offset, -1 for none yet
    16      i64     clock, ms, -1 for none yet
    24      i64     newest event time in segment ``far``, -1 for none
    ======  ======  ===============================================
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from topics.errors import StoreFormatError

FORMAT = 1
MARK = "STORE"
KEY = b"meta"
_MAGIC = b"SLST"
_META = struct.Struct("<4sHHqqq")
assert _META.size == 32


class BrokenMetadata(Exception):
    """Our own directory, but not readable: to be rebuilt."""


@dataclass(frozen=True, slots=True)
class Metadata:
    position: int | None = None
    clock_ms: int = -1
    far_ts_ms: int = -1

    def encode(self) -> bytes:
        position = -1 if self.position is None else self.position
        return _META.pack(_MAGIC, FORMAT, 0, position, self.clock_ms, self.far_ts_ms)


def decode(value: bytes) -> Metadata:
    """Raises `BrokenMetadata`, or `StoreFormatError` for a newer version."""
    if len(value) < 6 or value[:4] != _MAGIC:
        raise BrokenMetadata(f"metadata begins with {value[:4]!r}, expected {_MAGIC!r}")
    version = int.from_bytes(value[4:6], "little")
    if version > FORMAT:
        raise StoreFormatError(f"metadata version {version}; this program reads up to {FORMAT}. Use the newer program")
    if len(value) != _META.size:
        raise BrokenMetadata(f"metadata has {len(value)} bytes, expected {_META.size}")
    _, _, _, position, clock, far = _META.unpack(value)
    return Metadata(None if position < 0 else position, clock, far)


def write_mark(directory: Path) -> None:
    tmp = directory / (MARK + ".tmp")
    with open(tmp, "w") as f:
        json.dump({"kind": "solaris-store", "format": FORMAT}, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(tmp, directory / MARK)
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_mark(directory: Path) -> bool:
    """Whether the directory is a store of ours. Raises `StoreFormatError` for a newer or a strange mark."""
    try:
        text = (directory / MARK).read_text(errors="replace")
    except FileNotFoundError:
        return False
    try:
        mark = json.loads(text)
        kind, version = mark["kind"], int(mark["format"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise StoreFormatError(f"{directory / MARK} is not a store's mark: {text[:60]!r}") from None
    if kind != "solaris-store":
        raise StoreFormatError(f"{directory} belongs to {kind!r}")
    if version > FORMAT:
        raise StoreFormatError(
            f"{directory} has store format {version}; this program reads up to {FORMAT}. "
            "Use the newer program, or another directory (the changelog rebuilds it)"
        )
    return True
