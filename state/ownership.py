"""Who holds a store directory: a file lock with the holder's name in it.

``OWNER`` is locked (``flock``) for as long as the store is open and says who did it. The kernel lets go of the lock
when the process ends, however it ends, so after ``kill -9`` the next one opens at once. Neither this file nor
RocksDB's own ``LOCK`` is ever deleted: that would let two processes hold "the" lock on different files.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import psutil

from topics.errors import StoreLocked

OWNER = "OWNER"
_POLL_S = 0.05


class Ownership:
    """Held from construction to `release`. Raises `StoreLocked` when another holds it past the deadline, and
    `OSError` when the directory cannot be written."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self.path = directory / OWNER
        deadline = time.monotonic() + timeout_s
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise StoreLocked(
                            f"{directory} is held by {holder(self.path)}; waited {timeout_s:g} s. "
                            "Stop that process or give this one its own state directory"
                        ) from None
                    time.sleep(_POLL_S)
            me = psutil.Process()
            text = json.dumps({"pid": me.pid, "started": me.create_time(), "command": " ".join(me.cmdline())[:200]})
            os.pwrite(self._fd, text.encode(), 0)
            os.ftruncate(self._fd, len(text.encode()))
        except BaseException:
            os.close(self._fd)
            raise

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def holder(path: Path) -> str:
    """The process that the owner file names, and whether it is the one that runs under that id."""
    try:
        owner = json.loads(path.read_text())
        pid, started, command = int(owner["pid"]), float(owner["started"]), str(owner["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that left no name"
    try:
        same = abs(psutil.Process(pid).create_time() - started) < 1.0
    except psutil.Error:
        same = False
    # The lock may be held by a child that inherited it, or by another container's process.
    return f"process {pid} ({command})" + ("" if same else ", which is not visible from here")
