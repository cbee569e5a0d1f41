"""A log's replay in the background, which can be hurried to its end and outlives the broker's deaths."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topics.errors import BrokerError
from topics.kafka import KafkaSettings
from topics.readers import EventLog
from topics.replay import replay


class Feeder:
    """Replays the log in a thread, as often as it takes: a replay that the broker's death ended is resumed."""

    def __init__(self, log: Path, kafka: KafkaSettings, say: Callable[[str], object] = print) -> None:
        self._log, self._kafka, self._say = log, kafka, say
        self._speed: Any = "max"
        self._stop = threading.Event()
        self._hurry = False
        self.resumed = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self, speed: float) -> None:
        self._speed = speed
        self._thread.start()

    def finish(self, timeout_s: float) -> bool:
        """The rest at full speed."""
        self._hurry = True
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def going(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            complete = False
            while not complete:
                if self._hurry:
                    self._speed, self._stop = "max", threading.Event()
                try:
                    complete = replay(
                        EventLog(self._log), self._kafka, self._speed, resume=True, stop=self._stop
                    ).complete
                except BrokerError as e:
                    self.resumed += 1
                    self._say(f"replay stopped and goes on: {str(e)[:120]}")
                    time.sleep(0.5)
        except BaseException as e:
            self.error = e
