"""Parquet forms of a simulated log and of its truth."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from topics.events import decode_event
from topics.readers.parquet import ParquetWriter
from topics.simulator.writer import Block, LogSink, TruthSink


class ParquetLog(LogSink):
    """The documented Parquet log. Lines are decoded first, so it is several times slower than JSON Lines."""

    def __init__(self, path: Path) -> None:
        self._writer = ParquetWriter(path)

    def write(self, data: memoryview | bytes) -> None:
        for line in bytes(data).splitlines():
            self._writer.write(decode_event(line))

    def __exit__(self, *exc: object) -> None:
        self._writer.close()


class ParquetTruth(TruthSink):
    """Columns `id` (string, the impression's) and `p` (list<float>, in the order of its ads), in log order."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._pa = pa
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._schema = pa.schema([("id", pa.string()), ("p", pa.list_(pa.float32()))])
        self._file = pq.ParquetWriter(self._part, self._schema, compression="zstd")

    def add(self, block: Block) -> None:
        if not len(block.truth_count):
            return
        pa = self._pa
        pairs = zip(block.impression_user.tolist(), block.impression_sequence.tolist(), strict=True)
        ends = block.truth_count.cumsum()
        offsets = pa.array([0, *ends.tolist()], pa.int32())
        p = pa.ListArray.from_arrays(offsets, pa.array(block.truth, pa.float32()))
        self._file.write_table(pa.table([pa.array([f"r{u}-{s}" for u, s in pairs]), p], schema=self._schema))

    def finish(self) -> None:
        self._file.close()
        os.replace(self._part, self._path)

    def abandon(self) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._part.unlink()
