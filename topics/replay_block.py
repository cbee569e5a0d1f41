"""Records of a replay, many at a time, as columns: at full speed an object a record would cost as much as its check."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

import msgspec


class Record(msgspec.Struct, frozen=True, gc=False):
    position: int
    topic: str
    """without the prefix"""
    key: bytes
    value: bytes
    ts: int
    """event time, ms"""
    pairs: int


@dataclass(slots=True)
class Block:
    """Columns of `Record`, aligned, in the order of the log."""

    positions: Sequence[int] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)

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
        return map(Record, self.positions, self.topics, self.keys, self.values, self.times, self.pairs)

    def only(self, topics: Collection[str]) -> Block:
        keep = [t in topics for t in self.topics]
        if all(keep):
            return self
        return Block(
            list(compress(self.positions, keep)),
            list(compress(self.topics, keep)),
            list(compress(self.keys, keep)),
            list(compress(self.values, keep)),
            list(compress(self.times, keep)),
            list(compress(self.pairs, keep)),
        )
