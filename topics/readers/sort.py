"""External merge sort by event time: sorted runs on disk, merged as a stream; memory is one run, whatever the input.

A run holds records ``<q time ms><q position><I length><bytes>``. Equal times keep the order of the input.
"""

from __future__ import annotations

import heapq
import struct
import tempfile
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from topics.readers.badlines import Progress

_HEADER = struct.Struct("<qqI")
_OVERHEAD = 150
"""bytes a record costs in a Python list beside its own"""

Timed = tuple[int, int, bytes]
"""(event time ms, position in the input, record)"""


def sort_by_time(records: Iterable[Timed], run_bytes: int = 128 << 20, fan_in: int = 64) -> Iterator[Timed]:
    """The records in order of (time, position). Input of up to `run_bytes` never touches the disk."""
    runs: list[BinaryIO] = []
    held: list[Timed] = []
    size = 0
    try:
        for record in records:
            held.append(record)
            size += len(record[2]) + _OVERHEAD
            if size >= run_bytes:
                held.sort()
                runs.append(_write(held))
                held, size = [], 0
                if len(runs) >= fan_in:
                    runs = [_merge_to_one(runs)]
        held.sort()
        if not runs:
            yield from held
            return
        yield from heapq.merge(*map(_read, runs), held)
    finally:
        for run in runs:
            run.close()


def sorted_rows(rows: Iterable[Timed], progress: Progress | None, run_bytes: int) -> Iterator[Timed]:
    """`sort_by_time`; once all rows are read, `progress` counts the rows that came out."""
    read = 0

    def counted() -> Iterator[Timed]:
        nonlocal read
        for row in rows:
            read += 1
            yield row

    for n, row in enumerate(sort_by_time(counted(), run_bytes), 1):
        if progress is not None:
            progress.done, progress.total = n, read
        yield row


def _merge_to_one(runs: list[BinaryIO]) -> BinaryIO:
    merged = _write(heapq.merge(*map(_read, runs)))
    for run in runs:
        run.close()
    return merged


def _write(records: Iterable[Timed]) -> BinaryIO:
    run = tempfile.TemporaryFile(prefix="solaris-sort-")  # noqa: SIM115  (closed by sort_by_time)
    pack = _HEADER.pack
    run.writelines(part for ts, position, data in records for part in (pack(ts, position, len(data)), data))
    run.seek(0)
    return run


def _read(run: BinaryIO) -> Iterator[Timed]:
    while header := run.read(_HEADER.size):
        ts, position, length = _HEADER.unpack(header)
        yield ts, position, run.read(length)
