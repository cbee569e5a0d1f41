"""The documented log as JSON Lines: one event a line, plain, gzip (.gz) or Zstandard (.zst)."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from topics.errors import DecodeError, InvalidEvent
from topics.events import MAX_EVENT_BYTES, Event, decode_event
from topics.readers.badlines import BadLines, Progress

CHUNK_BYTES = 1 << 20


def lines(path: Path, bad: BadLines, progress: Progress | None = None) -> Iterator[tuple[int, bytes]]:
    """(line number, line without its end) of every line that is not blank. At most `MAX_EVENT_BYTES` of a line are
    ever held: a longer one is a bad line. A compressed file that breaks off is a bad line too."""
    number = 0
    rest = b""
    skipping = False
    with open(path, "rb") as file:
        if progress is not None:
            progress.total = path.stat().st_size
        read = decompressed(path, file)
        while True:
            try:
                chunk = read(CHUNK_BYTES)
            except (EOFError, OSError) as e:
                bad.add(path, number + 1, DecodeError("truncated", f"the compressed file breaks off: {e}"), rest)
                return
            if progress is not None:
                progress.done = file.tell()
            if not chunk:
                break
            parts = chunk.split(b"\n")
            parts[0] = rest + parts[0]
            rest = parts.pop()
            for line in parts:
                number += 1
                if skipping or len(line) > MAX_EVENT_BYTES:
                    _too_long(path, number, line, bad)
                    skipping = False
                elif line and not line.isspace():
                    yield number, line
            if len(rest) > MAX_EVENT_BYTES:
                skipping = True
                rest = rest[:1024]
    if skipping:
        _too_long(path, number + 1, rest, bad)
    elif rest and not rest.isspace():
        yield number + 1, rest


def read(path: Path, bad: BadLines, progress: Progress | None = None) -> Iterator[Event]:
    """Events in the order of the file."""
    for number, line in lines(path, bad, progress):
        try:
            yield decode_event(line)
        except InvalidEvent as e:
            bad.add(path, number, e, line)


def decompressed(path: Path, file: BinaryIO) -> Callable[[int], bytes]:
    """A function that reads plain bytes, at most so many, b"" at the end; by the name's ending."""
    if path.suffix == ".gz":
        # read1: what comes before a break is given out, not lost with it
        return gzip.GzipFile(fileobj=file).read1
    if path.suffix == ".zst":
        import pyarrow as pa

        stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
        return cast(Callable[[int], bytes], stream.read)
    return file.read


def _too_long(path: Path, number: int, line: bytes, bad: BadLines) -> None:
    bad.add(path, number, DecodeError("too_large", f"a line of more than {MAX_EVENT_BYTES} bytes"), line)
