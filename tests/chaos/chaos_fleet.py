"""A fleet of role processes that are killed, frozen and joined on purpose, and restarted when they end."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline import Roles

RESTART_S = 0.5


@dataclass(slots=True)
class Member:
    role: str
    env: dict[str, str] = field(default_factory=dict)
    """for the next start only: a failpoint must not kill the successor too"""
    due: float | None = None
    """when to start it again"""
    held: bool = False
    """dead on purpose, not to be restarted yet"""


class Fleet:
    """Restarts what ends, as a supervisor does, and keeps book of every end: `kills` counts deaths by SIGKILL,
    `exits` names what ended otherwise (name, exit code, last line of its log)."""

    def __init__(self, roles: Roles, say: Callable[[str], None]) -> None:
        self.roles = roles
        self.members: dict[str, Member] = {}
        self.kills = 0
        self.exits: list[tuple[str, int, str]] = []
        self._say = say
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fleet", daemon=True)
        self._thread.start()

    def add(self, name: str, role: str, env: dict[str, str] | None = None) -> None:
        with self._lock:
            self.members[name] = Member(role)
            self.roles.start(role, name, env=env)

    def arm(self, name: str, env: dict[str, str], gently: bool) -> None:
        """Ends the process (SIGTERM, or SIGKILL) and starts one that dies at a failpoint."""
        with self._lock:
            if gently:
                self.leave(name, member_stays=True)
            else:
                self.kill(name)
            member = self.members[name]
            member.held, member.due, member.env = False, None, {}
            self.roles.start(member.role, name, env=env)

    def kill(self, name: str, held: bool = False) -> None:
        with self._lock:
            process = self.roles.processes.get(name)
            if process is not None:
                self.roles.kill(name)
                self.kills += 1
            member = self.members[name]
            member.held, member.due = held, time.monotonic() + RESTART_S

    def release(self, name: str) -> None:
        self.members[name].held = False

    def leave(self, name: str, member_stays: bool = False) -> int:
        """SIGTERM; the exit code."""
        with self._lock:
            if not member_stays:
                self.members.pop(name)
            code = self.roles.stop([name], timeout_s=40.0).get(name, -signal.SIGKILL)
        if code != 0:
            self._note(name, code)
        return code

    def signal(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(KeyError):
            self.roles.processes[name].send_signal(number)

    def lose_state(self, name: str) -> None:
        """Removes the stores of the role as a lost disk would; the process must be dead (`kill(held=True)`)."""
        folder = self.roles.folder / "state" / self.members[name].role
        for place in folder.iterdir():
            if place.is_dir():
                shutil.rmtree(place)

    def deaths(self, name: str) -> int:
        """Rises by one whenever the process of this name is started."""
        process = self.roles.processes.get(name)
        return -1 if process is None else process.pid

    def all_running(self) -> bool:
        with self._lock:
            return all((p := self.roles.processes.get(name)) is not None and p.poll() is None for name in self.members)

    def close(self) -> dict[str, int]:
        """Restarts nothing more and stops all, in order: exit codes."""
        self._stop.set()
        self._thread.join(10.0)
        codes: dict[str, int] = {}
        for role in ("verifier", "embedder", "ranker"):
            names = [n for n, m in self.members.items() if m.role == role]
            codes.update(self.roles.stop(names))
        return codes

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            with self._lock:
                self._look()

    def _look(self) -> None:
        now = time.monotonic()
        for name, member in self.members.items():
            process = self.roles.processes.get(name)
            if process is not None and process.poll() is not None:
                self.roles.processes.pop(name)
                if process.returncode == -signal.SIGKILL:
                    self.kills += 1
                else:
                    self._note(name, process.returncode)
                member.due = now + RESTART_S
            elif process is None and not member.held and member.due is not None and now >= member.due:
                member.due = None
                self.roles.start(member.role, name, env=member.env)
                member.env = {}

    def _note(self, name: str, code: int) -> None:
        lines = (self.roles.folder / f"{name}.log").read_text(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.startswith("solaris:")), lines[-1] if lines else "")
        self.exits.append((name, code, last[:300]))
        self._say(f"{name} ended by itself with code {code}: {last[:160]}")
