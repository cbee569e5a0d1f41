"""The C heap of a role process, kept from spreading.

glibc gives threads heaps of their own, up to eight a core, and a page that one of them has let go of serves no other.
A role has some thirty threads, most of them of RocksDB and of the Kafka client; their heaps grew for days of event time
while what was in use stayed the same (70 MiB free beside 100 in use in a ranker of 200 users). Two heaps are enough:
threads keep small blocks to themselves anyway.
"""

from __future__ import annotations

import ctypes
import os

ARENAS = 2
_M_ARENA_MAX = -8


def bound_heaps(arenas: int = ARENAS) -> bool:
    """Allows so many heaps from here on; called before threads are started. False where the C library has no such
    setting (musl, macOS) or the environment has one of its own (`MALLOC_ARENA_MAX`, `GLIBC_TUNABLES`)."""
    if "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(_M_ARENA_MAX, arenas))
