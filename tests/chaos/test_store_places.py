"""A partition's store is held by a frozen process: its successor works from a stand-in, which goes away again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from store_child import SETTINGS, record

from streams.places import MAX_STAND_INS, close_place, open_place
from topics.errors import StoreLocked

QUICK = replace(SETTINGS, lock_timeout_s=0.2)


@pytest.fixture
def frozen(tmp_path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "store_child.py"), str(tmp_path / "3"), "5", "100000"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    while int(child.stdout.readline().replace("ready", "0")) < 20:
        pass
    os.kill(child.pid, signal.SIGSTOP)
    yield child
    child.kill()
    child.wait()


def test_a_frozen_holder_is_not_waited_for(frozen: subprocess.Popen[str], tmp_path: Path) -> None:
    store = open_place(tmp_path, 3, QUICK)
    assert store.path == tmp_path / "3.1"
    assert store.position is None
    store.apply([record(o) for o in range(4)])
    second = open_place(tmp_path, 3, QUICK)
    assert second.path == tmp_path / "3.2"
    close_place(store, 5.0)
    close_place(second, 5.0)
    assert not list(tmp_path.glob("3.*")), "stand-ins go when they are closed"


def test_a_stand_in_left_by_a_killed_process_is_removed(frozen: subprocess.Popen[str], tmp_path: Path) -> None:
    left = open_place(tmp_path, 3, QUICK)
    left.close(5.0)  # as if its process had been killed: not through close_place
    assert (tmp_path / "3.1").exists()
    frozen.kill()
    frozen.wait()
    store = open_place(tmp_path, 3, QUICK)
    assert store.path == tmp_path / "3"
    assert (store.position or 0) >= 20
    assert not (tmp_path / "3.1").exists()
    close_place(store, 5.0)
    assert (tmp_path / "3").exists()


def test_the_holder_is_named_when_all_places_are_held(tmp_path: Path) -> None:
    held = [open_place(tmp_path, 0, QUICK) for _ in range(MAX_STAND_INS + 1)]
    with pytest.raises(StoreLocked, match=str(os.getpid())):
        open_place(tmp_path, 0, QUICK)
    for store in held:
        close_place(store, 5.0)
    assert [p.name for p in tmp_path.iterdir()] == ["0"]
