"""Rows of a log that cannot be used: counted, the first ones kept to be shown, or the end of the run in strict mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from topics.errors import ContractError, InvalidEvent

KEPT = 10
SHOWN_CHARS = 160


@dataclass(frozen=True, slots=True)
class BadLine:
    line: int
    """1-based line of a text file, or row of a Parquet file"""
    reason: str
    """stable code, as in the dead letters"""
    detail: str
    text: str
    """the start of what was read"""


@dataclass(slots=True)
class BadLines:
    strict: bool = False
    """raise at the first one"""
    count: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    first: list[BadLine] = field(default_factory=list)
    """the first ten"""

    def add(self, path: Path, line: int, error: InvalidEvent, text: bytes | str) -> None:
        """Counts one bad row. Raises `ContractError` naming file, line and reason in strict mode."""
        if self.strict:
            raise ContractError(f"{path}, line {line}: {error}; leave out --strict to skip and count such lines")
        self.count += 1
        self.reasons[error.reason] = self.reasons.get(error.reason, 0) + 1
        if len(self.first) < KEPT:
            shown = text if isinstance(text, str) else text[: 4 * SHOWN_CHARS].decode("utf-8", "replace")
            self.first.append(BadLine(line, error.reason, str(error), shown[:SHOWN_CHARS]))


@dataclass(slots=True)
class Progress:
    """How much of the input has been read, in the unit that the format can give cheaply (bytes or rows)."""

    done: int = 0
    total: int = 0
