"""One Apache Kafka for a run, and role or peer processes whose CPU time the operating system tells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import NewTopic

from benchmarks.harness.events import Kafka
from topics import admin
from topics import kafka as clients
from topics.brokers.ports import free_port
from topics.kafka import KafkaSettings, consumer

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0


class BenchError(RuntimeError):
    pass


class NotMeasured(RuntimeError):
    """The machine lacks what a case needs; not a failure."""


@dataclass(slots=True)
class Topics:
    """Topics of one case under a prefix of their own, with helpers to write to them."""

    kafka: KafkaSettings
    _asker: Consumer = field(init=False)
    _producer: Producer = field(init=False)

    def __post_init__(self) -> None:
        self._asker = consumer(self.kafka, f"bench-asker-{os.getpid()}")
        self._producer = Producer(
            {
                "bootstrap.servers": self.kafka.bootstrap, "linger.ms": 5, "partitioner": "murmur2_random",
                "compression.type": "lz4", "queue.buffering.max.messages": 1_000_000, "acks": 1,
                "queue.buffering.max.kbytes": 1 << 20, "message.max.bytes": 8 << 20, "batch.size": 1 << 20,
                "log_level": 0,
            }
        )  # fmt: skip

    def create(self, *extra: str) -> None:
        """The contract's topics, and plain ones of these full names with as many partitions."""
        admin.create(self.kafka)
        if extra:
            made = clients.admin(self.kafka)
            for f in made.create_topics([NewTopic(name, self.kafka.partitions, 1) for name in extra]).values():
                f.result()

    def send(self, topic: str, records: Iterable[Kafka]) -> int:
        name, n = self.kafka.topic(topic), 0
        for r in records:
            while True:
                try:
                    self._producer.produce(name, r.value, r.key)
                    break
                except BufferError:
                    self._producer.poll(0.05)
            n += 1
            if n % 1000 == 0:
                self._producer.poll(0)
        if self._producer.flush(LIMIT_S):
            raise BenchError(f"{name}: the broker took not all of {n} records in {LIMIT_S:g} s")
        return n

    def end(self, name: str, partitions: int | None = None) -> int:
        """Sum of the end offsets of a topic, full name; markers of transactions count."""
        total = 0
        for p in range(partitions or self.kafka.partitions):
            total += clients.watermarks(self._asker, name, p)[1]
        return total

    def committed(self, group: str, name: str) -> int:
        """Sum of the offsets a group has committed for a topic, full name."""
        reader = consumer(self.kafka, group)
        places = reader.committed([TopicPartition(name, p) for p in range(self.kafka.partitions)], timeout=LIMIT_S)
        reader.close()
        return sum(max(p.offset, 0) for p in places)

    def close(self) -> None:
        self._asker.close()


class Answers:
    """Committed records of a topic, full name, from its present end on; counts and keeps them as they come."""

    def __init__(self, kafka: KafkaSettings, topic: str) -> None:
        self._reader = consumer(kafka, f"bench-answers-{os.getpid()}", fetch_wait_max_ms=100)
        self._reader.assign(
            [TopicPartition(topic, p, clients.watermarks(self._reader, topic, p)[1]) for p in range(kafka.partitions)]
        )
        self.values: list[bytes] = []

    def arrived(self, n: int) -> bool:
        """Whether at least `n` came since the last `clear`. Does not wait."""
        while len(self.values) < n and (some := self._reader.consume(1000, 0.02)):
            self.values += [m.value() for m in some if m.error() is None]
        return len(self.values) >= n

    def clear(self) -> None:
        self.values = []

    def close(self) -> None:
        self._reader.close()


@dataclass(slots=True)
class Sample:
    cpu_s: float
    wall_s: float


class Process:
    """A child whose CPU time counts: all its threads, and its children (a JVM's wrapper, say)."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.log = name, folder / f"{name}.log"
        self.began = time.monotonic()
        with open(self.log, "ab") as log:
            self.popen = subprocess.Popen(
                list(command), stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **(env or {})}
            )
        self._os = psutil.Process(self.popen.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def cpu_s(self) -> float:
        t = self._os.cpu_times()
        return t.user + t.system

    def rss_mb(self) -> float:
        return self._os.memory_info().rss / 1e6

    def check(self) -> None:
        if self.popen.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise BenchError(f"{self.name} ended with code {self.popen.returncode}\n{tail}")

    def freeze(self) -> None:
        self.popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.popen.send_signal(signal.SIGCONT)

    def stop(self, timeout_s: float = 20.0) -> None:
        if self.popen.poll() is None:
            self.thaw()
            self.popen.terminate()
            try:
                self.popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()

    def wait_for(self, what: str, test: Callable[[], bool], every_s: float = 0.1, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not test():
            self.check()
            if time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
                raise BenchError(f"{self.name}: {what} not after {limit_s:g} s\n{tail}")
            time.sleep(every_s)

    def drain(self, feed: Callable[[], object], done: Callable[[], bool], least_s: float = 0.0) -> Sample:
        """Freezes the process, fills its input, lets it go, and samples until `done`: its own work and nothing of the
        feeding. Shorter than a session timeout, so that it keeps its partitions. Asking a role whether it is done costs
        it a millisecond of CPU each time: it is not asked before `least_s`."""
        self.freeze()
        try:
            feed()
        except BaseException:
            self.thaw()
            raise
        return self.release(done, least_s)

    def release(self, done: Callable[[], bool], least_s: float = 0.0) -> Sample:
        """Lets a frozen process go, and samples until `done`."""
        cpu, began = self.cpu_s(), time.monotonic()
        self.thaw()
        time.sleep(least_s)
        self.wait_for("drained", done)
        return Sample(self.cpu_s() - cpu, time.monotonic() - began)


class Role(Process):
    """`solaris verifier|embedder|ranker` with one configuration."""

    def __init__(
        self, role: str, kafka: KafkaSettings, folder: Path, bundle: Path, sets: Sequence[str] = (), name: str = ""
    ) -> None:
        self.port = free_port()
        self._fastest_s: dict[int, float] = {}
        """records -> the shortest drain of so many"""
        chosen = [
            f"kafka.bootstrap={kafka.bootstrap}", f"kafka.prefix={kafka.prefix}",
            f"kafka.partitions={kafka.partitions}", f"model.bundle={bundle}", f"store.dir={folder / 'state'}",
            f"http.port={self.port}", "model.reload_s=0", *sets,
        ]  # fmt: skip
        arguments = [a for s in chosen for a in ("--set", s)]
        super().__init__(name or role, [sys.executable, "-m", "streams.cli", role, *arguments], folder)

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as e:
            return e.code, b""
        except OSError:
            return 0, b""

    def status(self) -> dict[str, Any]:
        code, body = self.get("/status")
        return dict(json.loads(body)) if code == 200 else {}

    def records(self, prefix: str = "") -> int:
        return int(self.status().get("counters", {}).get(f"{prefix}loop_records", 0))

    def ready(self) -> bool:
        """Ready and holding every partition: readiness alone is also said while none was given out yet."""
        if self.get("/ready")[0] != 200:
            return False
        return all(self.status().get("partitions", {"": []}).values())

    def wait_ready(self) -> float:
        """Seconds from the start of the process."""
        self.wait_for("ready", self.ready, every_s=0.02)
        return time.monotonic() - self.began

    def drain_records(self, feed: Callable[[], object], n: int, prefix: str = "") -> Sample:
        want = self.records(prefix) + n
        fastest_s = self._fastest_s.get(n, 0.0)
        sample = self.drain(feed, lambda: self.records(prefix) >= want, 0.7 * fastest_s)
        self._fastest_s[n] = min(fastest_s or sample.wall_s, sample.wall_s)
        return sample
