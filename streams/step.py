"""What a role gives to the transactional loop: a `Step` turns polled records into outputs and dead letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from topics.events import Rejected


class Record(msgspec.Struct, frozen=True, gc=False):
    """One polled record, free of the client library. A struct: one is made for each, and a frozen dataclass takes ten
    times as long."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    received_ms: int
    """wall clock at the poll"""
    headers: tuple[tuple[str, bytes | None], ...] = ()
    appended_ms: int = -1
    """the broker's own time of the record, -1 where the topic has the producers' instead"""


class Output(msgspec.Struct, frozen=True, gc=False):
    topic: str
    """contract name, without the prefix"""
    partition: int
    key: bytes | None
    value: bytes
    source: int
    """index of the input record in the batch"""


@dataclass(frozen=True, slots=True)
class Dead:
    source: int
    rejected: Rejected


@dataclass(slots=True)
class StepResult:
    outputs: list[Output] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)


@dataclass(slots=True)
class Work:
    """Results of a batch, to be committed as one."""

    outputs: list[tuple[Record, Output]] = field(default_factory=list)
    dead: list[tuple[Record, Rejected]] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    """partition -> the offset after its last record"""
    metadata: dict[int, str] = field(default_factory=dict)
    """partition -> what is committed beside its offset"""
    generations: dict[int, int] = field(default_factory=dict)
    """partition -> the assignment its records came with"""
    counts: dict[int, int] = field(default_factory=dict)
    """partition -> how many of the batch's records are its"""

    @property
    def records(self) -> int:
        return sum(self.counts.values())

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        result: StepResult,
        generations: Mapping[int, int],
        metadata: Callable[[int], str],
    ) -> Work:
        ends: dict[int, int] = {}
        counts = Counter(r.partition for r in records)
        for r in records:
            ends[r.partition] = max(ends.get(r.partition, 0), r.offset + 1)
        return cls(
            [(records[o.source], o) for o in result.outputs],
            [(records[d.source], d.rejected) for d in result.dead],
            ends,
            {p: metadata(p) for p in ends},
            {p: generations[p] for p in ends},
            counts,
        )


class Step(Protocol):
    """Called from the loop's worker thread only, but for `committed`, which may come from another one at a time when
    nothing else of the step runs."""

    role: str
    """"verifier", "embedder-state", "embedder", "ranker", "counter" or "counter-clicks": names the consumer group"""
    input_topic: str
    """contract name"""
    changelog_topic: str | None
    """contract name of the topic whose committed outputs come back through `committed`, or None"""
    follows: tuple[str, ...]
    """contract names of the topics that the step's stores follow, each partition held from its own offset"""
    broadcasts: tuple[str, ...]
    """contract names of the topics that the step reads whole and from their beginning, whichever partitions it holds"""
    reads_items: bool
    """whether the catalogue is read before work begins, and followed"""

    pure: bool
    """no batch depends on what the one before it wrote, so the next may be worked on while one is being committed"""

    linger_s: float
    """how long records may wait for `enough` of them"""

    def enough(self, records: int, value_bytes: int) -> bool:
        """Whether a batch of this size is worth running now."""
        ...

    def parts(self, records: Sequence[Record]) -> Sequence[Sequence[Record]]:
        """The records in order, cut where the core would rather run, commit and hand on than wait for all of them."""
        ...

    def open(self, partition: int, metadata: str | None, logs: Mapping[str, tuple[int, int]]) -> Mapping[str, int]:
        """A partition was assigned; `metadata` came with its committed offset, `logs` has (first, end) offset of each
        of `follows`. Returns the offset to follow each from."""
        ...

    def close(self, partition: int) -> None:
        """The partition is no longer ours; nothing more is written for it."""
        ...

    def run(self, records: Sequence[Record]) -> StepResult:
        """The core on one batch. Bad records become `Dead`; what is raised stops the process, nothing committed."""
        ...

    def metadata(self, partition: int) -> str:
        """Committed beside the offset, for `open`. Short."""
        ...

    def follow(
        self, topic: str, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], next_offset: int
    ) -> None:
        """Records of a partition of one of `follows`, in order; `next_offset` is where the log goes on."""
        ...

    def hear(
        self, topic: str, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], next_offset: int
    ) -> None:
        """The same of one of `broadcasts`."""
        ...

    restore_deadline_s: float
    """work on a partition begins after this long though it is not restored; 0: never before"""

    def restored(self, partition: int) -> None:
        """All of `follows` were read to where they ended when the partition was opened."""
        ...

    def heard(self) -> None:
        """All of `broadcasts` were read to where they ended at the start."""
        ...

    def committed(self, outputs: Sequence[Output], offsets: Sequence[int]) -> None:
        """These outputs to the changelog are committed at these offsets."""
        ...

    def items(self, keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> None:
        """Records of the catalogue topic, in order per item."""
        ...

    def idle(self) -> None:
        """Between batches, at least about once a second."""
        ...

    def totals(self) -> Mapping[str, int]:
        """Counters since the start."""
        ...


class PlainStep:
    """What a step is that has nothing of the kind."""

    role = ""
    input_topic = ""
    changelog_topic: str | None = None
    follows: tuple[str, ...] = ()
    broadcasts: tuple[str, ...] = ()
    reads_items = False
    pure = True
    linger_s = 0.0
    restore_deadline_s = 0.0

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def enough(self, records: int, value_bytes: int) -> bool:
        return True

    def parts(self, records: Sequence[Record]) -> Sequence[Sequence[Record]]:
        return (records,)

    def open(self, partition: int, metadata: str | None, logs: Mapping[str, tuple[int, int]]) -> Mapping[str, int]:
        return {}

    def close(self, partition: int) -> None:
        pass

    def metadata(self, partition: int) -> str:
        return ""

    def follow(
        self, topic: str, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], next_offset: int
    ) -> None:
        pass

    def hear(
        self, topic: str, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], next_offset: int
    ) -> None:
        pass

    def restored(self, partition: int) -> None:
        pass

    def heard(self) -> None:
        pass

    def committed(self, outputs: Sequence[Output], offsets: Sequence[int]) -> None:
        pass

    def items(self, keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> None:
        pass

    def idle(self) -> None:
        pass

    def totals(self) -> Mapping[str, int]:
        return self.counters

    def tally_dead(self, dead: Sequence[Dead]) -> None:
        for d in dead:
            self.counters[f"rejected_{d.rejected.reason}"] += 1
