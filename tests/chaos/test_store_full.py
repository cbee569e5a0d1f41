"""A full and a read-only disk: a small tmpfs where it can be mounted, a file size limit everywhere."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_child import SETTINGS, record
from test_store_kill import assert_exact

from state.store import RocksStore, open_store
from topics.errors import StoreFull


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here ({done.stderr.strip()}); the file size limit test still runs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill_disk(disk: Path, leave: int) -> Path:
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    with open(ballast, "wb") as f:
        f.write(b"\0" * max(0, free.f_bavail * free.f_frsize - leave))
    return ballast


def apply(store: RocksStore, end: int) -> None:
    while (at := store.position or 0) < end:
        store.apply([record(o) for o in range(at, min(end, at + 50))])


def test_a_full_disk_stops_writes_before_harm_and_goes_on_after(small_disk: Path) -> None:
    store = open_store(small_disk / "s", SETTINGS)
    apply(store, 500)
    ballast = fill_disk(small_disk, 1 << 20)
    with pytest.raises(StoreFull, match="bytes free"):
        apply(store, 550)
    assert store.position == 500
    assert_exact(store, 50)  # reading goes on
    ballast.unlink()
    apply(store, 700)
    assert_exact(store, 50)
    store.close()
    store = open_store(small_disk / "s", SETTINGS)
    assert store.position == 700
    assert_exact(store, 50)
    store.close()


def test_a_disk_that_fills_between_the_check_and_the_write(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(small_disk / "s", SETTINGS)
    apply(store, 500)
    monkeypatch.setattr(store, "_check_space", lambda nbytes: None)
    ballast = fill_disk(small_disk, 0)
    with pytest.raises(StoreFull, match="cannot be written"):
        apply(store, 2500)
    stopped = store.position
    with pytest.raises(StoreFull):
        apply(store, 2500)
    ballast.unlink()
    monkeypatch.undo()
    if store._db is None:  # it could not even be opened again on the full disk
        store = open_store(small_disk / "s", SETTINGS)
    assert not store.rebuilt
    apply(store, 2500)
    assert not store.rebuilt
    assert (store.position or 0) >= (stopped or 0)
    assert_exact(store, 50)
    store.close()


def test_a_read_only_disk(small_disk: Path) -> None:
    store = open_store(small_disk / "s", SETTINGS)
    apply(store, 500)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreFull, match="Read-only"):
        open_store(small_disk / "s", SETTINGS)
    with pytest.raises(StoreFull, match="Read-only"):
        open_store(small_disk / "new", SETTINGS)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    store = open_store(small_disk / "s", SETTINGS)
    assert_exact(store, 500)
    store.close()


def limited(directory: Path) -> None:
    """In a child: files may not pass 256 KiB, then they may again."""
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = open_store(directory, SETTINGS)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
    try:
        apply(store, 2500)
    except StoreFull as e:
        print("full:", e)
    stopped = store.position or 0
    assert 0 < stopped < 2500
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    apply(store, 2500)
    assert not store.rebuilt
    assert_exact(store, 50)
    store.close()
    store = open_store(directory, SETTINGS)
    assert store.position == 2500
    assert_exact(store, 50)
    print("exact after", stopped)


def test_a_file_size_limit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "full: " in done.stdout
    assert "exact after" in done.stdout


if __name__ == "__main__":
    limited(Path(sys.argv[1]))
