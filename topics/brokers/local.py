"""`solaris up` without Docker: Apache Kafka on Java and the roles as background processes under one folder.

<dir>/kafka/        the broker's data, log and pid file
<dir>/roles.*       pid file, roles and output of `solaris run`
<dir>/state/        the roles' stores
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from topics.brokers.java import SERVER_JVM, JavaKafka
from topics.brokers.process import BackgroundProcess
from topics.errors import BrokerError

SETTLE_S = 3.0
"""a role that cannot start says so within this time"""


@dataclass(frozen=True, slots=True)
class Part:
    """One line of `solaris status`."""

    name: str
    running: bool
    detail: str


class LocalStack:
    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder.resolve()
        self.kafka = JavaKafka(self.folder / "kafka", port, heap_mb=1024, jvm=SERVER_JVM)
        self._roles = BackgroundProcess("roles", self.folder)
        self._roles_file = self.folder / "roles.names"

    @property
    def exists(self) -> bool:
        """Something was started from this folder, and not wiped since."""
        return (self.folder / "kafka" / "node.json").exists() or self._roles.pid is not None

    @property
    def roles_run(self) -> bool:
        return self._roles.find() is not None

    def start_kafka(self, timeout_s: float) -> bool:
        """False when it ran already."""
        if self.kafka.running:
            return False
        self.kafka.start(timeout_s)
        return True

    def start_roles(self, arguments: Sequence[str], roles: Sequence[str]) -> bool:
        """`arguments` are those of `solaris run`, `roles` what it then starts. False when they run already."""
        if self.roles_run:
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._roles_file.write_text(", ".join(roles))
        self._roles.spawn([sys.executable, "-m", "streams.cli", "run", *arguments])
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            if not self.roles_run:
                tail = self._roles.output_tail(12)
                raise BrokerError(f"the roles ended at once; the last lines of {self._roles.out_file}:\n{tail}")
            time.sleep(0.1)
        return True

    def parts(self) -> list[Part]:
        """Kafka only where it was started here: the roles may run on somebody's own cluster."""
        kafka, run = self.kafka, self._roles
        out = []
        if (kafka.data_dir / "node.json").exists():
            where = f"{kafka.bootstrap}, process {kafka.pid}, log {_short(kafka.data_dir / 'server.log')}"
            down = f"not running (data in {_short(kafka.data_dir)})"
            out.append(Part("kafka", kafka.running, where if kafka.running else down))
        roles = self._roles_file.read_text() if self._roles_file.exists() else "not known"
        what = f"{roles}; process {run.pid}, log {_short(run.out_file)}"
        return [*out, Part("roles", self.roles_run, what if self.roles_run else "not running")]

    def down(self, deadline_s: float) -> list[str]:
        """Roles first, so that they commit what they finish; then Kafka, in what is left of the deadline."""
        until = time.monotonic() + deadline_s
        stopped = []
        if self.roles_run:
            clean = self._roles.stop(max(1.0, deadline_s - min(10.0, 0.3 * deadline_s)))
            stopped.append("roles" if clean else "roles (killed at the deadline)")
        if self.kafka.running:
            self.kafka.stop(max(1.0, until - time.monotonic()))
            stopped.append("kafka")
        return stopped

    def wipe(self) -> None:
        """Removes what `up` made in the folder; refused while something of it runs."""
        if self.kafka.running or self.roles_run:
            raise BrokerError(f"{self.folder} is in use: `solaris down` first")
        for name in ("kafka", "state"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in ("roles.out", "roles.pid", self._roles_file.name):
            (self.folder / name).unlink(missing_ok=True)


def _short(path: Path) -> Path:
    """Relative to the current folder where it lies in it: what a person would type."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
