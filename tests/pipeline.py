"""Running the real roles, as processes, against the test's broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from confluent_kafka import TopicPartition

from streams.audit import read_all
from streams.counters import known
from topics.kafka import KafkaSettings, consumer, group_name

ROOT = Path(__file__).parents[1]
FLOW = (
    ("verifier", "verifier", "candidates"),
    ("embedder", "embedder-state", "precompute"),
    ("embedder", "embedder", "precompute"),
    ("ranker", "ranker", "impressions"),
    ("counter", "counter", "impressions"),
    ("counter", "counter-clicks", "feedback"),
)
"""role, its consumer group, the group's topic; what one writes the next reads"""


class Roles:
    """Role processes with one configuration; stopped at the end of the `with` block, whatever happened."""

    def __init__(self, kafka: KafkaSettings, folder: Path, bundle: Path, sets: Sequence[str] = ()) -> None:
        self.kafka, self.folder = kafka, folder
        self._sets = [
            f"kafka.bootstrap={kafka.bootstrap}", f"kafka.prefix={kafka.prefix}",
            f"kafka.partitions={kafka.partitions}", f"model.bundle={bundle}", f"store.dir={folder / 'state'}",
            "loop.session_timeout_ms=6000", "loop.transaction_timeout_ms=10000", *sets,
        ]  # fmt: skip
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self, role: str, name: str | None = None, sets: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> None:
        name = name or role
        arguments = [a for s in [*self._sets, *sets] for a in ("--set", s)]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "streams.cli", role, *arguments], stdout=log, stderr=log, cwd=ROOT,
                env={**os.environ, **(env or {})},
            )  # fmt: skip

    def start_all(self) -> None:
        for role in ("verifier", "embedder", "ranker"):
            self.start(role)

    def kill(self, name: str) -> None:
        """kill -9, and wait until it is gone."""
        p = self.processes.pop(name)
        p.kill()
        p.wait()

    def stop(self, names: Sequence[str] | None = None, timeout_s: float = 40.0) -> dict[str, int]:
        """SIGTERM; returns the exit codes. A process that does not end is killed, and its code is then -9."""
        chosen = {n: self.processes.pop(n) for n in list(self.processes) if names is None or n in names}
        for p in chosen.values():
            if p.poll() is None:
                p.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        for p in chosen.values():
            try:
                p.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
        return {n: p.returncode for n, p in chosen.items()}

    def logs(self) -> str:
        out = []
        for path in sorted(self.folder.glob("*.log")):
            out.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-40:]))
        return "\n".join(out)

    def wait_ready(self, timeout_s: float = 240.0) -> None:
        """Until every role has said on `stats` that it is in its group, with its catalogue and stores loaded."""
        wanted = {n: p.pid for n, p in self.processes.items()}
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            said = [msgspec.json.decode(r.value or b"{}") for r in read_all(self.kafka, "stats")]
            ready = {s["pid"] for s in said if s.get("ready")}
            if ready >= set(wanted.values()):
                return
            self._check_alive()
            time.sleep(0.5)
        raise AssertionError(f"not ready after {timeout_s} s\n{self.logs()}")

    def settle(self, timeout_s: float = 180.0) -> None:
        """Until the running roles have done all their input: every group has committed up to the last record of its
        topic, in the order of the flow. Nothing may be fed meanwhile."""
        deadline = time.monotonic() + timeout_s
        running = {name.split("-")[0] for name in self.processes}
        for role, group, topic in FLOW:
            while role in running and (behind := self.behind(group, topic)):
                self._check_alive()
                if time.monotonic() > deadline:
                    raise AssertionError(f"{group} is behind on {topic} by {behind} after {timeout_s} s\n{self.logs()}")
                time.sleep(0.3)
        self._check_counters()

    def _check_counters(self) -> None:
        """What the roles count is what streams/counters.py lists."""
        said = [msgspec.json.decode(r.value or b"{}") for r in read_all(self.kafka, "stats")]
        unlisted = {(s["role"], name) for s in said for name in s["counters"] if known(s["role"], name) is None}
        assert not unlisted, "add these to streams/counters.py"

    def behind(self, group: str, topic: str) -> dict[int, int]:
        """Partition -> distance in offsets from what the group has committed to the last committed record of its
        topic; partitions that are done are left out. The marker of the last transaction is no record."""
        ends: dict[int, int] = {}
        for r in read_all(self.kafka, topic):
            ends[r.partition] = max(ends.get(r.partition, 0), r.offset + 1)
        asker = consumer(self.kafka, group_name(self.kafka, group))
        try:
            wanted = [TopicPartition(self.kafka.topic(topic), p) for p in ends]
            done = {tp.partition: max(0, tp.offset) for tp in asker.committed(wanted, timeout=30.0)}
        finally:
            asker.close()
        return {p: end - done[p] for p, end in ends.items() if done[p] < end}

    def wait_applied(self, chunks: int, timeout_s: float = 120.0) -> None:
        """Until the ranker, started once, has applied so many chunks of the changelog."""
        deadline = time.monotonic() + timeout_s
        applied = 0
        while applied < chunks:
            said = [msgspec.json.decode(r.value or b"{}") for r in read_all(self.kafka, "stats")]
            applied = max((s["counters"].get("chunks_applied", 0) for s in said if s["role"] == "ranker"), default=0)
            self._check_alive()
            if time.monotonic() > deadline:
                raise AssertionError(f"{applied} of {chunks} chunks applied after {timeout_s} s\n{self.logs()}")
            time.sleep(0.3)

    def _check_alive(self) -> None:
        for name, p in self.processes.items():
            if p.poll() is not None:
                raise AssertionError(f"{name} ended with code {p.returncode}\n{self.logs()}")

    def wait_ranked(self, n: int, timeout_s: float = 240.0) -> None:
        """Until `ranked-ads` has `n` committed records."""
        self.wait_records("ranked-ads", n, timeout_s)

    def wait_records(self, topic: str, n: int, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        found = 0
        while time.monotonic() < deadline:
            self._check_alive()
            found = len(read_all(self.kafka, topic))
            if found >= n:
                return
            time.sleep(0.5)
        raise AssertionError(f"{topic}: {found} of {n} records after {timeout_s} s\n{self.logs()}")
