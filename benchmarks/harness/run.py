"""A run of the benchmark: what its cases share, made when first asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks.harness.bundle import bundle
from benchmarks.harness.cluster import Role, Sample, Topics
from benchmarks.harness.events import Kafka, Workload
from benchmarks.harness.figures import Figures
from benchmarks.harness.floors import ACCEPTED, Floors
from topics.kafka import KafkaSettings

PARTITIONS = 4
USERS = 1000
"""of the warm state: 100,000 live pairs"""
US = 1e6
UNCAPPED = (
    "verifier.per_user_cap=1000000000",
    f"verifier.top_k={ACCEPTED}",
    # No embedder drains what the verifier alone passes on: without this its gate would shed pairs, and do less work.
    "verifier.backlog_high_pairs=1000000000",
)
BATCH_PAIRS = 1024


@dataclass
class Run:
    bootstrap: str
    folder: Path
    quick: bool
    figures: Figures = field(default_factory=Figures)
    say: Callable[[str], None] = print
    embedder_events_per_s: float = 0.0
    not_measured: dict[str, str] = field(default_factory=dict)
    """case -> what this machine lacks for it"""

    @cached_property
    def workload(self) -> Workload:
        return Workload()

    @cached_property
    def candidates(self) -> list[Kafka]:
        return self.workload.candidates(3000 if self.quick else 6000, 2000)

    @cached_property
    def impressions(self) -> list[Kafka]:
        return self.workload.impressions(12_000 if self.quick else 60_000, USERS)

    @cached_property
    def floors(self) -> Floors:
        return Floors(bundle("light"), self.workload)

    @cached_property
    def heavy(self) -> Floors:
        return Floors(bundle("heavy"), self.workload)

    @property
    def repeats(self) -> int:
        return 3 if self.quick else 5

    @property
    def drained(self) -> list[Kafka]:
        """Impressions of one drain."""
        return self.impressions[: 3000 if self.quick else 6000]

    def topics(self, prefix: str, partitions: int = PARTITIONS, catalogue: bool = True) -> Topics:
        topics = Topics(KafkaSettings(bootstrap=self.bootstrap, prefix=f"{prefix}.", partitions=partitions))
        topics.create()
        if catalogue:
            topics.send("items", self.workload.catalogue())
        return topics

    @cached_property
    def state(self) -> list[Kafka]:
        """Of `USERS` users, the same for all who rank `impressions`."""
        return list(self.workload.state(USERS, self.floors.runtime.info.fm_hash))

    def warm(self, topics: Topics, users: int = USERS) -> None:
        if users == USERS:
            topics.send("embeddings", self.state)
        else:
            topics.send("embeddings", self.workload.state(users, self.floors.runtime.info.fm_hash))

    def role(self, role: str, topics: Topics, sets: Sequence[str] = (), size: str = "light", name: str = "") -> Role:
        folder = self.folder / topics.kafka.prefix.rstrip(".") / (name or role)
        return Role(role, topics.kafka, folder, bundle(size), sets, name)


def rates(run: Run, key: str, samples: Sequence[Sample], n: int, what: str) -> None:
    run.figures.add(f"{key}.cpu_us", [s.cpu_s / n * US for s in samples], f"us/{what}")
    run.figures.add(f"{key}.per_s", [n / s.wall_s for s in samples], f"{what}s/s wall")
