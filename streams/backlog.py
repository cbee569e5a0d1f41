"""How many accepted pairs wait at the embedder, by partition: the verifier's pressure gauge.

The lag of the embedder's consumer group in records, times the mean pairs per request of what was sent lately. Asked
from the broker once a second in a thread of its own, so that a slow answer never holds up the verifier; while the
broker does not answer, the last figure stands.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

from confluent_kafka import KafkaException, TopicPartition

from topics.kafka import KafkaSettings, consumer, group_name
from topics.packed import PrecomputeRequest

log = logging.getLogger(__name__)


class Backlog:
    def __init__(self, kafka: KafkaSettings, role: str = "embedder", every_s: float = 1.0) -> None:
        self._kafka, self._every_s = kafka, every_s
        self._topic = kafka.topic("precompute")
        self._consumer = consumer(kafka, group_name(kafka, role))  # never subscribes: it only asks
        self._lag: dict[int, int] = {}
        self._per_request = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backlog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def pairs(self) -> dict[int, int]:
        per_request = self._per_request
        return {p: int(lag * per_request) for p, lag in self._lag.items()}

    def sent(self, requests: Sequence[PrecomputeRequest]) -> None:
        if requests:
            mean = sum(len(r.items) for r in requests) / len(requests)
            weight = min(1.0, 0.02 * len(requests))
            self._per_request += (mean - self._per_request) * (weight if self._per_request else 1.0)

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
                for tp in self._consumer.committed(wanted, timeout=5.0):
                    low, high = self._consumer.get_watermark_offsets(
                        TopicPartition(self._topic, tp.partition), timeout=5.0
                    )
                    self._lag[tp.partition] = max(0, high - (tp.offset if tp.offset >= 0 else low))
            except KafkaException as e:
                log.warning("backlog not known: %s", e.args[0])
