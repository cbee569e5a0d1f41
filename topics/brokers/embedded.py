"""A Kafka-speaking broker from a PyPI wheel (`noida-db`): for a first look with nothing but Python.

It keeps transactions, fencing and read_committed right. What it is not good for is in docs/operating.md; a cluster of
people's own, or `solaris up`, is the way to run for longer than a demo.
"""

from __future__ import annotations

import json
import logging
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from topics.brokers.ports import free_port, is_free
from topics.brokers.process import BackgroundProcess
from topics.brokers.wait import wait_ready
from topics.errors import BrokerError
from topics.kafka import KafkaSettings

log = logging.getLogger(__name__)


class EmbeddedBroker:
    """`port` 0: that of the last start on this folder, else a free one. `tied`: dies with its starter (Linux)."""

    def __init__(self, data_dir: Path | str, port: int = 0, *, tied: bool = False) -> None:
        self.data_dir = Path(data_dir).resolve()
        self.port = port or self._remembered() or free_port()
        self.tied = tied
        self._process = BackgroundProcess("embedded-broker", self.data_dir)

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.find() is not None

    def start(self, timeout_s: float = 120.0) -> None:
        if not self.running:
            if not is_free(self.port):
                raise BrokerError(f"port {self.port} on 127.0.0.1 is taken: stop what listens there or give another")
            binary = broker_binary()
            self.data_dir.mkdir(parents=True, exist_ok=True)
            (self.data_dir / "node.json").write_text(json.dumps({"port": self.port}))
            command = [str(binary), "start", "--only", "kafka", "--host", "127.0.0.1"]
            command += ["--kafka-port", str(self.port), "--data-dir", str(self.data_dir / "data")]
            self._process.spawn(command, tied=self.tied)
        try:
            kafka = KafkaSettings(bootstrap=self.bootstrap, prefix="solaris-broker.")
            wait_ready(kafka, timeout_s, self.log_tail, lambda: self.running)
        except BrokerError:
            self.kill()
            raise
        log.info("the embedded broker is ready at %s (process %s)", self.bootstrap, self.pid)

    def stop(self, deadline_s: float = 10.0) -> None:
        if not self._process.stop(deadline_s):
            log.warning("the embedded broker did not stop in %g s and was killed", deadline_s)

    def kill(self) -> None:
        self._process.kill()

    def restart(self, timeout_s: float = 120.0) -> None:
        self.stop()
        self.start(timeout_s)

    def log_tail(self, lines: int = 40) -> str:
        return self._process.output_tail(lines)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _remembered(self) -> int:
        try:
            return int(json.loads((self.data_dir / "node.json").read_text())["port"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0


def broker_binary() -> Path:
    """The wheel's executable; `BrokerError` when the `embedded` extra is not installed or has no wheel here."""
    if find_spec("noida_db") is None:
        raise BrokerError("the embedded broker is not installed: pip install noida-db, or use `solaris up`")
    binary = Path(str(files("noida_db").joinpath("noida-db")))
    if not binary.is_file():
        raise BrokerError(f"noida-db has no broker program for this platform ({binary} is missing): use `solaris up`")
    binary.chmod(binary.stat().st_mode | 0o500)
    return binary
