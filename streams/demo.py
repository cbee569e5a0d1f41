"""The main job from end to end on one host: broker, topics, roles, replay, and the report read back from the topics."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from models.runtime import open_runtime
from streams.audit import read_all
from streams.bundles import wants_counter
from streams.report import RunRecords, build
from streams.run_cli import ROLES
from streams.settings import Settings
from topics.errors import BrokerError, ContractError
from topics.events import decode_ranked_ads
from topics.kafka import KafkaSettings, consumer
from topics.packed import decode_embedding
from topics.readers import EventLog
from topics.replay import Replay, ReplayState
from topics.tail import partitions

log = logging.getLogger(__name__)

READ_BACK = ("items", "candidates", "precompute", "embeddings", "impressions", "ranked-ads", "feedback", "dlq")
START_S = 90.0
SETTLE_S = 120.0


@dataclass(slots=True)
class Progress:
    """What a live display shows; updated by the watcher and the replay."""

    ranked: int = 0
    chunks: int = 0
    states: int = 0
    """chunks with a user state: one for every candidates event that got through"""
    sources: Counter[str] = field(default_factory=Counter)
    replay: ReplayState | None = None
    impressions: int = 0
    """in the log"""
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    """role -> its newest counters"""


class Watcher:
    """Reads results live, read_committed, and notes when it had each in hand."""

    def __init__(self, kafka: KafkaSettings, progress: Progress) -> None:
        self._kafka, self.progress = kafka, progress
        self.ranked_at_ms: dict[str, float] = {}
        self.chunk_at_ms: list[tuple[str, bool, float]] = []
        self.last_ranked = time.monotonic()
        self.ready: set[str] = set()
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        kafka = self._kafka
        names = {kafka.topic(t): t for t in ("ranked-ads", "embeddings", "stats")}
        source = consumer(kafka, kafka.prefix + "watcher")
        try:
            source.assign([TopicPartition(t, p, OFFSET_BEGINNING) for t in names for p in partitions(kafka, t)])
            while not self._stop.is_set():
                first = source.poll(0.1)
                if first is None:
                    continue
                messages = [first, *source.consume(5_000, 0)]
                now = time.time() * 1000
                for m in messages:
                    value = m.value()
                    if m.error() is None and value is not None:
                        self._take(names[m.topic() or ""], value, now)
        except Exception as e:  # whoever waits for results looks here
            self.error = e
        finally:
            source.close()

    def _take(self, topic: str, value: bytes, now_ms: float) -> None:
        p = self.progress
        if topic == "ranked-ads":
            ranked = decode_ranked_ads(value)
            self.ranked_at_ms.setdefault(ranked.id, now_ms)
            p.ranked += 1
            p.sources.update(ranked.sources)
            self.last_ranked = time.monotonic()
        elif topic == "embeddings":
            chunk = decode_embedding(value)
            self.chunk_at_ms.append((chunk.event_id, bool(len(chunk.state)), now_ms))
            p.chunks += 1
            p.states += bool(len(chunk.state))
        else:
            said = msgspec.json.decode(value)
            if said.get("ready"):
                self.ready.add(said["role"])
            p.counters[said["role"]] = said["counters"]


def role_arguments(settings: Settings, kafka: KafkaSettings, sets: Sequence[str]) -> list[str]:
    """Command line of a role that is to serve what this process was set to, on `kafka`."""
    own = {
        "kafka.bootstrap": kafka.bootstrap, "kafka.prefix": kafka.prefix, "kafka.partitions": kafka.partitions,
        "model.bundle": settings.model.bundle, "store.dir": settings.store.dir,
    }  # fmt: skip
    return [a for s in [*sets, *(f"{k}={v}" for k, v in own.items())] for a in ("--set", s)]


@contextlib.contextmanager
def roles(
    settings: Settings, kafka: KafkaSettings, sets: Sequence[str], log_file: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """`solaris run` in the background; stopped, in order, when the block is left."""
    command = [sys.executable, "-m", "streams.cli", "run", *role_arguments(settings, kafka, sets)]
    with log_file.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=dict(os.environ))
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run(
    source: EventLog,
    settings: Settings,
    kafka: KafkaSettings,
    sets: Sequence[str],
    folder: Path,
    seconds: float,
    progress: Progress,
    say: Callable[[str], None],
    judged_from_ms: int = 0,
) -> dict[str, Any]:
    """Starts the roles on `kafka`, replays `source` in about `seconds`, waits for the answers, reads the topics back.

    The topics must exist and be empty of other runs (a prefix of its own does it). Returns the report.
    """
    impressions, span_ms = measure(source)
    progress.impressions = impressions
    if impressions == 0:
        raise ContractError(f"{source.path} has no impressions: there is nothing to rank")
    shutil.rmtree(settings.store.dir, ignore_errors=True)
    watcher = Watcher(kafka, progress)
    log_file = folder / "roles.log"
    with roles(settings, kafka, sets, log_file) as process:
        watcher.start()
        try:
            wanted = {*ROLES, *(["counter"] if wants_counter(settings.model.bundle) else [])}
            say(f"starting {', '.join(sorted(wanted))}")
            _wait(lambda: watcher.ready >= wanted, START_S, process, watcher, log_file, "the roles to be ready")
            speed = span_ms / 1000 / seconds
            say(f"replaying {span_ms / 3.6e6:.1f} h of events, {impressions:,} impressions, in about {seconds:.0f} s "
                f"({speed:,.0f} times real time)")  # fmt: skip
            began = time.monotonic()

            def shown(state: ReplayState) -> None:
                progress.replay = state

            state = Replay(source, kafka, speed, on_progress=shown).run()
            progress.replay = state
            _wait(lambda: _answered(watcher, impressions), SETTLE_S, process, watcher, log_file, "the last answers")
            ended = watcher.last_ranked
        finally:
            watcher.stop()
    say("reading the topics back")
    read = RunRecords({t: read_all(kafka, t) for t in READ_BACK}, watcher.ranked_at_ms, watcher.chunk_at_ms)
    read.judged_from_ms = judged_from_ms
    read.seconds = max(0.001, ended - began)
    say("scoring with VM and FM for the losses")
    report = build(
        read, open_runtime(settings.model.bundle), settings.store.ttl_ms, kafka.topic("impressions"), fm_pairs=400_000
    )
    report["log"] = str(source.path)
    report["judged_from_ms"] = judged_from_ms
    report["speed"] = round(speed, 2)
    report["counters"] = progress.counters
    return report


def measure(source: EventLog) -> tuple[int, int]:
    """(impressions, span in ms of candidates and impressions) of a log, by reading it once."""
    n, first, last = 0, -1, 0
    for e in source.events():
        kind = type(e).__name__
        n += kind == "Impression"
        if kind in ("Impression", "Candidates"):
            first = e.ts if first < 0 else first
            last = max(last, e.ts)
    return n, max(1, last - first)


def _answered(watcher: Watcher, impressions: int) -> bool:
    """All answered, or (some went to the DLQ) none came for ten seconds."""
    return len(watcher.ranked_at_ms) >= impressions or time.monotonic() - watcher.last_ranked > 10.0


def _wait(
    ready: Callable[[], bool],
    timeout_s: float,
    process: subprocess.Popen[bytes],
    watcher: Watcher,
    log_file: Path,
    what: str,
) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if watcher.error is not None:
            raise BrokerError(f"the results cannot be read: {watcher.error}")
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-30:])
            raise BrokerError(f"waited {timeout_s:.0f} s for {what} in vain; the end of {log_file}:\n{tail}")
        time.sleep(0.1)
