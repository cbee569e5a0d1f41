"""Counters of a process as JSON records on the `stats` topic, about one a second; plain producer, best effort.

A lost stats record costs a point on a chart, so these never hold up the work: whatever keeps one from being sent drops
it and counts (`stats_dropped`), and is logged once in a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from topics.kafka import KafkaSettings, producer

log = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0


class Reporter:
    def __init__(
        self, kafka: KafkaSettings, role: str, status: Callable[[], Mapping[str, Any]], every_s: float = 1.0
    ) -> None:
        self._topic, self._role, self._status, self._every_s = kafka.topic("stats"), role, status, every_s
        self._producer = producer(kafka, message_timeout_ms=10_000)
        self.dropped = 0
        self._log_due_s = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._send()
        self._producer.flush(2.0)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._send()

    def _send(self) -> None:
        try:
            record = {"type": "stats", "ts": int(time.time() * 1000), **self._status()}
            self._producer.produce(self._topic, msgspec.json.encode(record), self._role.encode())
            self._producer.poll(0)
        except Exception as e:  # a thread that ends unseen would have this process taken for a dead one
            self.dropped += 1
            now = time.monotonic()
            if now >= self._log_due_s:
                self._log_due_s = now + _LOG_EVERY_S
                log.warning("stats record dropped, %d so far: %s: %s", self.dropped, type(e).__name__, e)
