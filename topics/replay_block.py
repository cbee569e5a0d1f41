"""Records of a replay, many at a time, as columns: at full speed an object a record would cost as much as its check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

import msgspec
import numpy as np
import numpy.typing as npt


class Record(msgspec.Struct, frozen=True, gc=False):
    position: int
    topic: str
    """without the prefix"""
    key: bytes
    value: bytes
    ts: int
    """event time, ms"""
    pairs: int


@dataclass(frozen=True, slots=True)
class Totals:
    bytes: int
    """of the values"""
    newest_ms: int
    """largest event time, -1 for none"""
    pairs: int
    by_topic: dict[str, int]


@dataclass(slots=True)
class Block:
    """Columns of `Record`, aligned, in the order of the log."""

    positions: Sequence[int] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    times: Sequence[int] | npt.NDArray[np.int64] = field(default_factory=list)
    pairs: Sequence[int] | npt.NDArray[np.int64] = field(default_factory=list)
    totals: Totals | None = None
    """where they are known already"""

    def total(self) -> Totals:
        if self.totals is None:
            self.totals = Totals(
                sum(map(len, self.values)),
                max(_plain(self.times), default=-1),
                sum(_plain(self.pairs)),
                dict(Counter(self.topics)),
            )
        return self.totals

    @classmethod
    def of(cls, records: Collection[Record]) -> Block:
        return cls(
            [r.position for r in records],
            [r.topic for r in records],
            [r.key for r in records],
            [r.value for r in records],
            [r.ts for r in records],
            [r.pairs for r in records],
        )

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Record]:
        times, pairs = map(_plain, (self.times, self.pairs))
        return map(Record, self.positions, self.topics, self.keys, self.values, times, pairs)

    def only(self, topics: Collection[str]) -> Block:
        keep = [t in topics for t in self.topics]
        if all(keep):
            return self
        return Block(
            list(compress(self.positions, keep)),
            list(compress(self.topics, keep)),
            list(compress(self.keys, keep)),
            list(compress(self.values, keep)),
            list(compress(_plain(self.times), keep)),
            list(compress(_plain(self.pairs), keep)),
        )


def _plain(numbers: Sequence[int] | npt.NDArray[np.int64]) -> Sequence[int]:
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers
