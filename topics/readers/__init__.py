"""Event logs, whatever their format, as one stream of events in event-time order.

`open_log(path)` yields events; `EventLog` says more: format, bad lines, progress, what the candidate sources left out.

The documented formats (JSON Lines, Parquet) are yielded in the order of the file, which is the order of arrival: an
event that is late there stays late (`solaris log check` counts them). Foreign logs are sorted by time. Nothing is
held whole in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from topics.errors import ContractError
from topics.events import Event
from topics.readers import ebnerd, jsonl, mind, movielens, parquet
from topics.readers.badlines import BadLine, BadLines, Progress
from topics.sources import DEFAULT_MIX, CandidateSources, Mix

__all__ = ["FORMATS", "BadLine", "BadLines", "EventLog", "Progress", "detect", "open_log"]

Reader = Callable[[Path, BadLines, Progress | None], Iterator[Event]]
FORMATS: dict[str, Reader] = {
    "jsonl": jsonl.read,
    "parquet": parquet.read,
    "mind": mind.read,
    "ebnerd": ebnerd.read,
    "movielens": movielens.read,
}
IMPRESSIONS_ONLY = ("mind", "ebnerd", "movielens")
PEEKED = 20_000
"""events looked at to see whether a log brings its own candidates"""
_JSONL = (".jsonl", ".ndjson", ".json")
_IN_FOLDER = (("behaviors.tsv", "mind"), ("behaviors.parquet", "ebnerd"), ("ratings.csv", "movielens"))
_HEAD_BYTES = 1 << 20


def open_log(path: str | Path, candidate_sources: str | None = "auto", bad: BadLines | None = None) -> Iterator[Event]:
    """Events of the log at `path`, a file or the folder of a MIND, EB-NeRD or MovieLens data set.

    `candidate_sources`: a mix as in `topics.sources`; "auto" takes the default mix when the log brings no candidates
    events of its own; None or "off" derives nothing. Bad rows are skipped and counted in `bad`, or raise
    `ContractError` when ``bad.strict``.
    """
    return EventLog(path, candidate_sources, bad).events()


class EventLog:
    """One log; `events()` may be called again and gives the same stream."""

    def __init__(self, path: str | Path, candidate_sources: str | None = "auto", bad: BadLines | None = None) -> None:
        self.format, self.path = detect(path)
        self.bad = BadLines() if bad is None else bad
        self.progress = Progress()
        self.mix = self._mix(candidate_sources)
        self.sources: CandidateSources | None = None
        """of the last `events()`; None when nothing is derived"""

    @property
    def raw(self) -> bool:
        """The file's lines are the stream's records, byte for byte."""
        return self.format == "jsonl" and self.mix is None

    def events(self) -> Iterator[Event]:
        events = FORMATS[self.format](self.path, self.bad, self.progress)
        if self.mix is None:
            return events
        self.sources = CandidateSources(self.mix)
        return self.sources.derive(events)

    def identity(self) -> str:
        """16 hex digits of path, size, first MiB and mix: the same log read in the same way."""
        stat = self.path.stat()
        with open(self.path, "rb") as file:
            head = file.read(_HEAD_BYTES)
        text = f"{self.path.resolve()}\0{stat.st_size}\0{self.mix}\0".encode("utf-8", "surrogateescape")
        return xxhash.xxh3_64_hexdigest(text + head)

    def _mix(self, wanted: str | None) -> Mix | None:
        if wanted is None or wanted == "off":
            return None
        if wanted != "auto":
            return Mix.parse(wanted)
        if self.format not in IMPRESSIONS_ONLY and self._brings_candidates():
            return None
        return Mix.parse(DEFAULT_MIX)

    def _brings_candidates(self) -> bool:
        """Looks at the first `PEEKED` events only."""
        if self.format == "jsonl":
            for _, line in islice(jsonl.lines(self.path, BadLines()), PEEKED):
                try:
                    if _kind.decode(line).type == "candidates":
                        return True
                except msgspec.DecodeError:
                    continue
            return False
        events = parquet.read(self.path, BadLines())
        return any(type(e).__name__ == "Candidates" for e in islice(events, PEEKED))


class _Kind(msgspec.Struct):
    type: Any = None


_kind = msgspec.json.Decoder(_Kind)


def detect(path: str | Path) -> tuple[str, Path]:
    """(format, file) of a log. Raises `ContractError` naming what is known."""
    path = Path(path)
    if path.is_dir():
        for name, kind in _IN_FOLDER:
            if (path / name).is_file():
                return kind, path / name
        names = ", ".join(name for name, _ in _IN_FOLDER)
        raise ContractError(f"{path} is a folder without any of {names}; name a log file")
    if not path.exists():
        raise ContractError(f"there is no log {path}")
    if not os.access(path, os.R_OK):
        raise ContractError(f"the log {path} may not be read by this user")
    suffix = Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix
    if suffix in _JSONL:
        return "jsonl", path
    if path.suffix == ".parquet":
        return ("ebnerd" if _is_ebnerd(path) else "parquet"), path
    if suffix == ".tsv":
        return "mind", path
    if path.name == "ratings.csv":
        return "movielens", path
    raise ContractError(
        f"the format of {path} is not known: expected .jsonl, .ndjson or .json (also .gz, .zst), .parquet, a MIND "
        ".tsv, or a folder of MIND, EB-NeRD or MovieLens"
    )


def _is_ebnerd(path: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return "article_ids_inview" in pq.read_schema(path).names
    except (pa.ArrowInvalid, OSError) as e:
        raise ContractError(f"{path} is not a Parquet file: {e}") from None
