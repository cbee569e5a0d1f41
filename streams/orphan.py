"""A process that `solaris run` started does not outlive it.

A supervisor that is killed (the host's memory ran out, say) cannot stop its children, and its successor would start a
second set beside them. So each child looks whether its parent is still the one that started it, and stops in order when
not.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

log = logging.getLogger(__name__)

SUPERVISOR = "SOLARIS_SUPERVISOR"
"""environment variable with the supervisor's process id"""
EVERY_S = 0.5


def stop_with_supervisor() -> None:
    """SIGTERM to this process as soon as the supervisor that started it is gone; nothing without one."""
    pid = os.environ.pop(SUPERVISOR, "")  # not for what this process may start
    if pid.isdecimal():
        threading.Thread(target=_watch, args=(int(pid),), name="supervisor-watch", daemon=True).start()


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(EVERY_S)
    log.error("the supervisor, process %d, is gone; stopping", supervisor)
    os.kill(os.getpid(), signal.SIGTERM)
