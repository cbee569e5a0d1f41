"""`solaris run`: all roles on one host, each a process of its own, restarted with back-off, stopped in order.

Where `http.port` is set, it is the first of consecutive ports, one a process.

Stopping goes upstream first (verifier, embedder, counter, ranker, monitor), so that what is in flight is still served.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from streams.deadline import Deadline
from streams.orphan import SUPERVISOR

log = logging.getLogger(__name__)

BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
MONITOR = "monitor"
_STEADY_S = 60.0


@dataclass(slots=True)
class Child:
    role: str
    number: int
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    restarts: int = 0
    fast_exits: int = 0
    due: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.role}-{self.number}"


@dataclass(slots=True)
class Supervisor:
    """`counts`: processes per role, in the order in which they are stopped."""

    counts: Mapping[str, int]
    arguments: Sequence[str] = ()
    """passed on to every role's command line"""
    shutdown_deadline_s: float = 10.0
    http_port: int = 0
    """of the first process; the next ones have those that follow, and one that is started again keeps its own. 0: none.
    The monitor's pages are at a port of their own"""
    children: list[Child] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        ports = iter(self.ports)
        for role, n in self.counts.items():
            for k in range(n):
                command = [sys.executable, "-m", "streams.cli", role, *self.arguments]
                if self.http_port and role != MONITOR:
                    command += ["--set", f"http.port={next(ports)}"]
                child = Child(role, k, command)
                self.children.append(child)
                self._spawn(child)

    @property
    def ports(self) -> range:
        """`http.port` of the processes, in their order."""
        n = sum(n for role, n in self.counts.items() if role != MONITOR)
        return range(self.http_port, self.http_port + n) if self.http_port else range(0)

    def run(self) -> None:
        """Until SIGTERM or Ctrl-C."""

        def handle(signum: int, frame: FrameType | None) -> None:
            self.stopping.set()

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)
        self.start()
        try:
            while not self.stopping.wait(0.2):
                self.watch()
        finally:
            self.stop()

    def watch(self) -> None:
        """Restarts what has ended, each with its own back-off; a minute of steady running forgives earlier exits."""
        now = time.monotonic()
        for c in self.children:
            if c.process is not None and c.process.poll() is not None:
                code = c.process.returncode
                c.process = None
                c.fast_exits = 0 if now - c.started > _STEADY_S else c.fast_exits + 1
                wait = BACK_OFF_S[min(c.fast_exits, len(BACK_OFF_S)) - 1] if c.fast_exits else 0.0
                c.due = now + wait
                log.warning("%s ended with code %s; starting it again in %.1f s", c.name, code, wait)
            if c.process is None and now >= c.due:
                c.restarts += 1
                self._spawn(c)

    def stop(self) -> None:
        # One deadline for all of them.
        deadline = Deadline(self.shutdown_deadline_s + 10.0)
        for role in self.counts:
            of_role = [c for c in self.children if c.role == role and c.process is not None]
            for c in of_role:
                assert c.process is not None
                if c.process.poll() is None:
                    c.process.send_signal(signal.SIGTERM)
            for c in of_role:
                assert c.process is not None
                try:
                    c.process.wait(max(1.0, deadline.left()))
                except subprocess.TimeoutExpired:
                    log.error("%s did not stop inside the deadline; killed", c.name)
                    c.process.kill()
                    c.process.wait()

    def _spawn(self, c: Child) -> None:
        c.started = time.monotonic()
        # A session of its own: one Ctrl-C reaches the supervisor alone, which then stops the roles in order.
        environment = {**os.environ, SUPERVISOR: str(os.getpid())}
        c.process = subprocess.Popen(c.command, start_new_session=True, env=environment)
        log.info("%s started, process %d", c.name, c.process.pid)
