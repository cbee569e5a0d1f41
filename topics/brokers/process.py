"""A background process known by its pid file, stopped by its id and by nothing else.

The pid file holds the pid and the process's start time: a pid that the system has given to another process since is
never taken for ours, so a stale file is safe to find and safe to stop.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from topics.errors import BrokerError

_PR_SET_PDEATHSIG = 1


class BackgroundProcess:
    """`name` is for messages; `folder` holds `<name>.pid` and `<name>.out` (stdout and stderr)."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.pid_file = folder / f"{name}.pid"
        self.out_file = folder / f"{name}.out"
        self._child: subprocess.Popen[bytes] | None = None

    def spawn(self, command: Sequence[str], tied: bool = False) -> int:
        """Starts the command in a session of its own and writes the pid file; returns the pid.

        `tied`: on Linux the process is killed when the thread that spawned it ends (tests that die leave nothing).
        """
        if (running := self.find()) is not None:
            raise BrokerError(f"{self.name} runs already as process {running.pid} ({self.pid_file})")
        self.pid_file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.out_file, "ab") as out:
            try:
                self._child = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent() if tied else None,
                )
            except OSError as e:
                raise BrokerError(f"{self.name}: cannot run {command[0]}: {e.strerror}") from e
        pid = self._child.pid
        record = {"pid": pid, "started": psutil.Process(pid).create_time(), "command": command[0]}
        temporary = self.pid_file.with_suffix(".pid.new")
        temporary.write_text(json.dumps(record))
        temporary.replace(self.pid_file)
        return pid

    def find(self) -> psutil.Process | None:
        """The live process of the pid file, or None; a file whose process is gone or is another's is removed."""
        try:
            record = json.loads(self.pid_file.read_text())
            pid, started = int(record["pid"]), float(record["started"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            self.pid_file.unlink(missing_ok=True)
            return None
        try:
            process = psutil.Process(pid)
            if abs(process.create_time() - started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE:
                return process
        except psutil.NoSuchProcess:
            pass
        if self._child is not None and self._child.pid == pid:
            self._child.wait()  # reaps our own child
        self.pid_file.unlink(missing_ok=True)
        return None

    @property
    def pid(self) -> int | None:
        process = self.find()
        return None if process is None else process.pid

    def stop(self, deadline_s: float) -> bool:
        """SIGTERM, then SIGKILL to it and its children once the deadline has passed.

        True when it ended by itself (or was not running).
        """
        process = self.find()
        if process is None:
            return True
        self._signal(process, signal.SIGTERM)
        clean = self._gone(deadline_s)
        if not clean:
            self.kill()
        self.pid_file.unlink(missing_ok=True)
        return clean

    def kill(self) -> None:
        """SIGKILL to the process, then to the children it had."""
        process = self.find()
        if process is None:
            return
        try:
            children = process.children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self._signal(process, signal.SIGKILL)
        self._gone(10.0)
        for child in children:
            self._signal(child, signal.SIGKILL)
        self.pid_file.unlink(missing_ok=True)

    def output_tail(self, lines: int = 40) -> str:
        return tail(self.out_file, lines)

    def _gone(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self.find() is None:
                return True
            time.sleep(0.02)
        return self.find() is None

    def _signal(self, process: psutil.Process, sig: signal.Signals) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(sig)  # psutil checks the start time again before it sends


def tail(path: Path, lines: int) -> str:
    """The last lines of a text file, reading at most its last 64 KiB; empty when there is none."""
    try:
        with open(path, "rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 65_536))
            return "\n".join(f.read().decode("utf-8", "replace").splitlines()[-lines:])
    except OSError:
        return ""


def _die_with_parent() -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return in_child
