"""The documented log as JSON Lines: one event a line, plain, gzip (.gz) or Zstandard (.zst)."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from topics.errors import DecodeError, InvalidEvent
from topics.events import MAX_EVENT_BYTES, Event, decode_event
from topics.readers.badlines import BadLines, Progress

CHUNK_BYTES = 1 << 20
PAD = b" " * 64
"""behind each chunk, so that compiled code may read 64 bytes at a time"""


def texts(path: Path, bad: BadLines, progress: Progress | None = None) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, consecutive lines, each with its end, and then `PAD`), a chunk of the file at a time.
    At most `MAX_EVENT_BYTES` of a line are ever held: a longer one is a bad line, and empty here. A compressed file
    that breaks off is a bad line too."""
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
            except (EOFError, OSError, zlib.error) as e:
                bad.add(path, number, DecodeError("truncated", f"the compressed file breaks off: {e}"), rest)
                return
            if progress is not None:
                progress.done = file.tell()
            if not chunk:
                break
            end = chunk.rfind(b"\n") + 1
            if end:
                text = b"".join((rest, memoryview(chunk)[:end], PAD))
                rest = chunk[end:]
                # only the first line can be long: the others are within one chunk
                first = text.find(b"\n")
                if skipping or first > MAX_EVENT_BYTES:
                    _too_long(path, number, text[: min(first, 1024)], bad)
                    text = text[first:]
                    skipping = False
                yield number, text
                number += text.count(b"\n")
            else:
                rest += chunk
            if len(rest) > MAX_EVENT_BYTES:
                skipping = True
                rest = rest[:1024]
    if skipping:
        _too_long(path, number, rest, bad)
    elif rest:
        yield number, rest + b"\n" + PAD


def split(text: bytes) -> list[bytes]:
    """The lines of one of the `texts`, without their ends."""
    lines = text.split(b"\n")
    lines.pop()
    return lines


def lines(path: Path, bad: BadLines, progress: Progress | None = None) -> Iterator[tuple[int, bytes]]:
    """(line number, line without its end) of every line that is neither blank nor too long."""
    for first, text in texts(path, bad, progress):
        for number, line in enumerate(split(text), first):
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
