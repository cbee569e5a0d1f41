"""Named points at which a chaos run may kill this process: ``SOLARIS_FAILPOINT=after_produce:3`` dies by SIGKILL the
third time the loop passes ``after_produce``. Unset, which is always outside chaos runs, a point costs one comparison.

Points: ``after_core``, ``after_produce`` (outputs sent, offsets not), ``before_commit``, ``after_commit`` (committed,
not applied), ``after_apply``, ``in_restore``, ``in_revoke``.
"""

from __future__ import annotations

import os
import signal

_name, _, _count = os.environ.get("SOLARIS_FAILPOINT", "").partition(":")
_left = int(_count or 1)


def hit(point: str) -> None:
    global _left
    if point == _name:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
