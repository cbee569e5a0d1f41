"""How many accepted pairs wait at the embedder, by partition: the verifier's pressure gauge.

The broker is asked once a second, in a thread of its own, how many records the embedder's consumer group is behind; a
slow answer never holds up the verifier, and while the broker does not answer the last figure stands. How many pairs
those records hold is known exactly, since the verifier wrote them: an average would fall to nothing as soon as nothing
is accepted, and the limit with it. What was sent since the last answer counts as waiting.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from confluent_kafka import KafkaException, TopicPartition

from topics.kafka import KafkaSettings, consumer, group_name

log = logging.getLogger(__name__)

_RUN = 100
"""records whose pairs are remembered as one sum"""
_MAX_RUNS = 20_000


@dataclass(slots=True)
class _Run:
    records: int
    pairs: int


@dataclass(slots=True)
class Sent:
    """What was written to one partition lately, newest last."""

    records: int = 0
    """since the beginning"""
    runs: deque[_Run] = field(default_factory=lambda: deque(maxlen=_MAX_RUNS))

    def add(self, records: int, pairs: int) -> None:
        self.records += records
        if self.runs and self.runs[-1].records < _RUN:
            self.runs[-1].records += records
            self.runs[-1].pairs += pairs
        else:
            self.runs.append(_Run(records, pairs))

    def pairs_in(self, records: int) -> int:
        """Pairs in the last so many records. Those from before this process began count as many each as the records
        of the runs in which any were accepted."""
        left, pairs = records, 0.0
        full_records, full_pairs = 0, 0
        for run in reversed(self.runs):
            if left <= run.records:
                return int(pairs + run.pairs * left / run.records)
            left -= run.records
            pairs += run.pairs
            if run.pairs:
                full_records += run.records
                full_pairs += run.pairs
        return int(pairs + (left * full_pairs / full_records if full_records else 0.0))


class Backlog:
    def __init__(self, kafka: KafkaSettings, role: str = "embedder", every_s: float = 1.0) -> None:
        self._kafka, self._every_s = kafka, every_s
        self._topic = kafka.topic("precompute")
        self._consumer = consumer(kafka, group_name(kafka, role))  # never subscribes: it only asks
        self._lag: dict[int, tuple[int, int]] = {}
        """partition -> (records the embedder was behind, what this process had sent to it by then)"""
        self._sent: dict[int, Sent] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backlog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def pairs(self) -> dict[int, int]:
        """For the verifier's worker, as `sent` is."""
        waiting = {}
        for p, (lag, sent_then) in self._lag.items():
            sent = self._sent.get(p)
            if sent is not None:
                waiting[p] = sent.pairs_in(max(0, lag + sent.records - sent_then))
        return waiting

    def sent(self, records: Mapping[int, int], pairs: Mapping[int, int], markers: int) -> None:
        """One transaction's records and pairs by partition. `markers`: the records that its end adds to each."""
        have = dict(self._sent)  # the other thread reads: what it holds does not change its size
        for p, n in records.items():
            have.setdefault(p, Sent()).add(n + markers, pairs.get(p, 0))
        self._sent = have

    def forget(self, partition: int) -> None:
        """Of a partition that is another's now: what is written to it from here on is not known."""
        self._sent = {p: sent for p, sent in self._sent.items() if p != partition}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10.0)
        if not self._thread.is_alive():
            with contextlib.suppress(KafkaException, RuntimeError):
                self._consumer.close()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                meta = self._consumer.list_topics(self._topic, timeout=5.0).topics[self._topic]
                wanted = [TopicPartition(self._topic, p) for p in meta.partitions]
                found = {}
                for tp in self._consumer.committed(wanted, timeout=5.0):
                    sent = self._sent.get(tp.partition)
                    sent_then = sent.records if sent is not None else 0
                    low, high = self._consumer.get_watermark_offsets(
                        TopicPartition(self._topic, tp.partition), timeout=5.0
                    )
                    found[tp.partition] = (max(0, high - (tp.offset if tp.offset >= 0 else low)), sent_then)
                self._lag = found
            except KafkaException as e:
                log.warning("backlog not known: %s", e.args[0])
            except Exception:  # a gauge that ends unseen would leave its last figure standing for ever
                log.exception("backlog not known")
