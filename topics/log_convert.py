"""Writes any log that can be read in the documented format: JSON Lines (.jsonl, .jsonl.gz) or Parquet.

The file appears under its name only when it is complete.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from topics.errors import ContractError, SettingsError
from topics.events import Event, encode
from topics.readers.parquet import ParquetWriter
from topics.readers.sort import sort_by_time


def write_log(events: Iterable[Event], out: Path, force: bool = False, sort: bool = False) -> int:
    """Returns the number of events. `sort`: by time, whatever the order of the input (external merge sort).

    Raises `ContractError` when `out` exists and `force` is not given, `SettingsError` for another ending.
    """
    if out.exists() and not force:
        raise ContractError(f"{out} exists; --force replaces it")
    if sort:
        decoder = msgspec.json.Decoder(Event)
        rows = ((event.ts, n, encode(event)) for n, event in enumerate(events))
        events = (decoder.decode(data) for _, _, data in sort_by_time(rows))
    part = out.with_name(f".{out.name}.part")
    try:
        if out.suffix == ".parquet":
            count = _parquet(events, part)
        elif out.suffixes[-1:] == [".jsonl"] or out.suffixes[-2:] == [".jsonl", ".gz"]:
            count = _jsonl(events, part, out.suffix == ".gz")
        else:
            raise SettingsError("OUT", str(out), "ends in .jsonl, .jsonl.gz or .parquet")
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
    return count


def _parquet(events: Iterable[Event], path: Path) -> int:
    writer = ParquetWriter(path)
    count = 0
    for event in events:
        writer.write(event)
        count += 1
    writer.close()
    return count


def _jsonl(events: Iterable[Event], path: Path, compress: bool) -> int:
    count = 0
    with gzip.open(path, "wb", 5) if compress else open(path, "wb", 1 << 20) as file:
        for event in events:
            file.write(encode(event) + b"\n")
            count += 1
    return count
