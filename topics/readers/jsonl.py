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


def chunks(path: Path, bad: BadLines, progress: Progress | None = None) -> Iterator[tuple[int, list[bytes]]]:
    """(number of the first line, consecutive lines without their ends), a chunk of the file at a time. At most
    `MAX_EVENT_BYTES` of a line are ever held: a longer one is a bad line, and empty here. A compressed file that breaks
    off is a bad line too."""
    number = 1
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
                bad.add(path, number, DecodeError("truncated", f"the compressed file breaks off: {e}"), rest)
                return
            if progress is not None:
                progress.done = file.tell()
            if not chunk:
                break
            parts = chunk.split(b"\n")
            parts[0] = rest + parts[0]
            rest = parts.pop()
            if parts:
                # only the first of them can be long: the others are within one chunk
                if skipping or len(parts[0]) > MAX_EVENT_BYTES:
                    _too_long(path, number, parts[0], bad)
                    parts[0] = b""
                    skipping = False
                yield number, parts
                number += len(parts)
            if len(rest) > MAX_EVENT_BYTES:
                skipping = True
                rest = rest[:1024]
    if skipping:
        _too_long(path, number, rest, bad)
    elif rest:
        yield number, [rest]


def lines(path: Path, bad: BadLines, progress: Progress | None = None) -> Iterator[tuple[int, bytes]]:
    """(line number, line without its end) of every line that is neither blank nor too long."""
    for first, rows in chunks(path, bad, progress):
        for number, line in enumerate(rows, first):
            if line and not line.isspace():
                yield number, line


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
