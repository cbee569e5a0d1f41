"""Kernels ready before the first batch. Compiling takes ten seconds or so, once on a machine; loading, parts of one.

`python -m state.warm` does it ahead of time (setup, image build). Stores do it when they open, never under a batch.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from state import kernels
from state.answers import unfilled_lookup
from state.api import StoreDims
from state.cache import Loaded, UserCache
from state.chunk import parse_batch
from state.segments import NO_FLOOR

_warm = False


def warm_up() -> None:
    """Compiles the kernels, or loads them from numba's cache; at once when this process has them."""
    global _warm
    if _warm:
        return
    with one_at_a_time():
        cache = UserCache(0)
        users, none, zero = np.ones(1, np.uint64), parse_batch([]), np.zeros(2, np.int64)
        cache.ensure(users, 0, np.empty(1, np.int64))
        cache.admit(Loaded())
        cache.append(none.users, none.offsets, none.starts, none.words, 0)
        cache.trim()
        out = unfilled_lookup(1, 0, StoreDims(1, 1, 1))
        kernels.lookup(
            0, 1, users, zero, none.users, np.zeros(0, np.uint32), zero, np.uint64(0), 1, 1, 1, 1, 1, NO_FLOOR,
            cache.buf, cache.keys, cache.heads,
            out.vectors, out.ts_ms, out.pair_fingerprint, out.topic, out.topic_count, out.topic_ts_ms,
            out.aggregate, out.aggregate_count, out.aggregate_ts_ms, out.state, out.state_ts_ms, out.fingerprint,
            out.profile,
        )  # fmt: skip
    _warm = True


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Roles that start together wait for the one that compiles, and then load what it made."""
    path = Path(tempfile.gettempdir()) / f"solaris-kernels-{os.getuid()}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield  # nowhere to lock: compiling twice is only slow
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


if __name__ == "__main__":
    from state.count_warm import warm_counts

    began = time.monotonic()
    warm_up()
    warm_counts()
    print(f"state kernels ready in {time.monotonic() - began:.1f} s")
