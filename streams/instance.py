"""Which member of its role a process is. A stable number lets a restarted process take over its own transactional
identity (which fences and ends what it left open) and its place in the group without a rebalance.

The lowest free number is taken by an advisory lock on ``<store dir>/<role>/instance-N.lock``, held until the process
ends, however it ends. Machines that share a Kafka need different prefixes (`loop.instance_id`, default: host name).
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path
from typing import IO

from topics.errors import SettingsError

_MAX = 1_000


class Instance:
    def __init__(self, folder: Path, role: str, prefix: str = "") -> None:
        self._file: IO[str] | None = None
        place = folder / role
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise SettingsError("store.dir", str(folder), f"cannot be made or written: {e.strerror}") from None
        for number in range(_MAX):
            file = open(place / f"instance-{number}.lock", "a+")  # noqa: SIM115 - held for the process's life
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                continue
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
            self._file = file
            host = re.sub(r"[^a-zA-Z0-9._-]", "-", prefix or socket.gethostname())
            self.name = f"{host}-{number}"
            return
        raise SettingsError("store.dir", str(folder), f"{_MAX} processes of {role} run from this folder already")

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
