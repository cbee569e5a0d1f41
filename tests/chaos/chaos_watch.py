"""A user of `ranked-ads` who notes when answers come: the pauses seen from outside."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition

from topics.kafka import KafkaSettings, consumer
from topics.tail import partitions


class Watch:
    """Reads committed answers of all partitions as they come. `arrivals` are monotonic times, in order."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._source = consumer(kafka, f"{kafka.prefix}chaos-watch", reconnect_backoff_max_ms=500)
        topic = kafka.topic("ranked-ads")
        self._source.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in partitions(kafka, topic)])
        self.arrivals: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        return len(self.arrivals)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10.0)
        self._source.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                messages = self._source.consume(1_000, 0.1)
            except KafkaException:  # a broker that is away is what this run is about
                continue
            now = time.monotonic()
            self.arrivals.extend(now for m in messages if m.error() is None)

    def longest_gap_ms(self, since: float, until: float) -> float:
        """Longest time without any answer inside the interval."""
        times = [since, *(t for t in self.arrivals if since < t < until), until]
        return 1000 * max(b - a for a, b in pairwise(times))
