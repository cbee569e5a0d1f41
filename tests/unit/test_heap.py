"""The number of C heaps that a process's threads spread over, asked of glibc itself."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

COUNT = """
import ctypes, os, sys, tempfile, threading
from streams.heap import bound_heaps

done = bound_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.fopen.restype = ctypes.c_void_p
libc.fopen.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
libc.malloc_info.argtypes, libc.fclose.argtypes = (ctypes.c_int, ctypes.c_void_p), (ctypes.c_void_p,)
all_here = threading.Barrier(12)


def work():
    libc.malloc(5000)
    all_here.wait()  # no thread inherits the heap of one that has ended


threads = [threading.Thread(target=work) for _ in range(12)]
for t in threads:
    t.start()
for t in threads:
    t.join()
path = os.path.join(tempfile.mkdtemp(), "info").encode()
file = libc.fopen(path, b"w")
libc.malloc_info(0, file)
libc.fclose(file)
print(int(done), open(path).read().count("<heap "))
"""


def heaps(environment: dict[str, str]) -> tuple[int, int]:
    """(what `bound_heaps` says, heaps that 12 threads made)"""
    clean = {k: v for k, v in os.environ.items() if k not in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")}
    run = subprocess.run([sys.executable, "-c", COUNT], env=clean | environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    done, n = run.stdout.split()
    return int(done), int(n)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has heaps a thread")
def test_threads_share_two_heaps() -> None:
    assert heaps({}) == (1, 2)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has heaps a thread")
def test_the_environment_decides_where_it_says_so() -> None:
    assert heaps({"MALLOC_ARENA_MAX": "5"}) == (0, 5)
