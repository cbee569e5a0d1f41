"""Who holds a store directory: a file lock with the holder's name in it.

``OWNER`` is locked (``flock``) for as long as the store is open and says who did it. The kernel lets go of the lock
when the process ends, however it ends, so after ``kill -9`` the next one opens at once. Neither this file nor
RocksDB's own ``LOCK`` is ever deleted: that would let two processes hold "the" lock on different files.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import sys
import time
from pathlib import Path

import psutil

from topics.errors import StoreLocked

OWNER = "OWNER"
_POLL_S = 0.05
_FLOCK = struct.Struct("hhqqi")  # struct flock of 64-bit Linux: type, whence, start, len, pid


class Ownership:
    """Held from construction to `release`. Raises `StoreLocked` when another holds it past the deadline, and
    `OSError` when the directory cannot be written."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self.path = directory / OWNER
        self.deadline = time.monotonic() + timeout_s
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= self.deadline:
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

    def wait_for_rocksdb(self) -> None:
        """Waits, inside the same deadline, for a program that took RocksDB's lock alone (such as `ldb`)."""
        lock = self.path.parent / "LOCK"
        while (pid := _posix_holder(lock)) is not None:
            if time.monotonic() >= self.deadline:
                raise StoreLocked(f"{self.path.parent} is open in process {pid} ({_command(pid)}). Stop that process")
            time.sleep(_POLL_S)

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


def _posix_holder(lock: Path) -> int | None:
    """The process that holds a record lock on the file, where the system can tell."""
    if not sys.platform.startswith("linux") or not lock.exists():
        return None
    with open(lock, "rb+") as f:
        answer = fcntl.fcntl(f, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else pid


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:200]
    except psutil.Error:
        return "not visible from here"
