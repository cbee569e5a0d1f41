"""Two processes and one directory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from store_child import SETTINGS, record
from test_store_kill import start

from state.store import open_store
from topics.errors import StoreLocked


def test_the_holder_is_named_after_the_deadline(tmp_path: Path) -> None:
    child = start(tmp_path, 10, 1_000_000)
    try:
        began = time.monotonic()
        with pytest.raises(StoreLocked, match=rf"process {child.pid} \(.*store_child") as caught:
            open_store(tmp_path, replace(SETTINGS, lock_timeout_s=0.3))
        assert 0.3 <= time.monotonic() - began < 60
        assert str(tmp_path) in str(caught.value)
    finally:
        child.kill()
        child.wait()
    began = time.monotonic()
    open_store(tmp_path, replace(SETTINGS, lock_timeout_s=600)).close()
    assert time.monotonic() - began < 300, "a dead holder is not waited for"


def test_waiting_ends_when_the_holder_leaves(tmp_path: Path) -> None:
    held = open_store(tmp_path, SETTINGS)
    held.apply([record(0)])
    threading.Timer(0.3, held.close).start()
    store = open_store(tmp_path, replace(SETTINGS, lock_timeout_s=600))
    assert store.position == 1
    store.close()


def test_the_same_process_cannot_open_it_twice(tmp_path: Path) -> None:
    store = open_store(tmp_path, SETTINGS)
    with pytest.raises(StoreLocked, match=f"process {os.getpid()} "):
        open_store(tmp_path, replace(SETTINGS, lock_timeout_s=0))
    store.apply([record(0)])
    store.close()


def test_a_stranger_with_rocksdb_s_own_lock_is_named(tmp_path: Path) -> None:
    open_store(tmp_path, SETTINGS).close()
    code = (
        "import sys; from rocksdict import Rdict, Options\n"
        "db = Rdict(sys.argv[1], Options(raw_mode=True)); print('ready', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=-1, stdout=-1, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(StoreLocked, match=f"process {other.pid} "):
            open_store(tmp_path, replace(SETTINGS, lock_timeout_s=0.2))
    finally:
        other.kill()
        other.wait()
    open_store(tmp_path, SETTINGS).close()


def test_lock_files_are_never_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path, SETTINGS)
    inodes = {name: (tmp_path / name).stat().st_ino for name in ("LOCK", "OWNER")}
    store.apply([record(0)])
    store.wipe("test")
    store.close()
    (tmp_path / "CURRENT").write_text("nonsense")
    store = open_store(tmp_path, SETTINGS)
    assert store.rebuilt
    store.close()
    assert inodes == {name: (tmp_path / name).stat().st_ino for name in inodes}


def test_an_owner_file_from_a_dead_process_stops_nobody(tmp_path: Path) -> None:
    open_store(tmp_path, SETTINGS).close()
    (tmp_path / "OWNER").write_text('{"pid": 1, "started": 0, "command": "long gone"}')
    open_store(tmp_path, replace(SETTINGS, lock_timeout_s=0)).close()
    (tmp_path / "OWNER").write_text("not json")
    open_store(tmp_path, replace(SETTINGS, lock_timeout_s=0)).close()
