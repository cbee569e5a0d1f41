"""Named points at which a chaos run may kill this process: ``SOLARIS_FAILPOINT=after_produce:3`` dies by SIGKILL the
third time the loop passes ``after_produce``. Unset, which is always outside chaos runs, a point costs one comparison.

Points: ``after_core``, ``after_produce`` (outputs sent, offsets not), ``before_commit``, ``after_commit`` (committed,
not applied), ``in_write`` (while a WriteBatch is being written), ``after_apply``, ``in_restore``, ``in_assign``,
``in_revoke``.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time

POINTS = (
    "after_core", "after_produce", "before_commit", "after_commit", "in_write", "after_apply", "in_restore",
    "in_assign", "in_revoke",
)  # fmt: skip
_WITHIN_S = 0.001

_name, _, _count = os.environ.get("SOLARIS_FAILPOINT", "").partition(":")
_left = int(_count or 1)


def hit(point: str) -> None:
    if point == _name and _counted():
        _die()


def hit_soon(point: str) -> None:
    """Dies at a random moment of the next millisecond, so that the caller is killed inside what it does next."""
    if point == _name and _counted():
        threading.Thread(target=_die_soon, daemon=True).start()


def _counted() -> bool:
    global _left
    _left -= 1
    return _left == 0


def _die_soon() -> None:
    until = time.perf_counter() + random.random() * _WITHIN_S
    while time.perf_counter() < until:
        pass
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
