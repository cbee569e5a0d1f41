"""kill -9 at any moment: the store comes back as of a whole batch, exact, and without waiting."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_child import MODEL, SETTINGS, T0, USERS, record

from state.api import ChangelogRecord, Lookup, StoreDims
from state.reference import ReferenceStore
from state.store import RocksStore, open_store

DIMS = StoreDims(17, 8, 4)
CHILD = Path(__file__).with_name("store_child.py")


def start(directory: Path, batch: int, records: int) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(directory), str(batch), str(records)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def answers(store: RocksStore | ReferenceStore, now: int) -> Lookup:
    users = np.arange(1, USERS + 1, dtype=np.uint64)
    items = np.tile(np.arange(1, 200, 7, dtype=np.uint64), USERS)
    splits = np.arange(USERS + 1, dtype=np.int64) * (len(items) // USERS)
    topics = (items % 5).astype(np.uint32)
    return store.lookup(users, splits, items, topics, np.full(USERS, now, np.int64), MODEL, DIMS)


def assert_exact(store: RocksStore, batch: int) -> None:
    """Equal to a reference that got every record below the stored position once."""
    position = store.position or 0
    assert position % batch == 0, "a batch was stored in part"
    reference = ReferenceStore(SETTINGS)
    reference.expire(store.clock_ms)
    reference.apply([record(o) for o in range(position)])
    for now in (T0 + 300 * position, T0 + 300 * position - SETTINGS.ttl_ms // 2):
        got, want = answers(store, now), answers(reference, now)
        np.testing.assert_array_equal(got.ts_ms, want.ts_ms)
        np.testing.assert_array_equal(got.vectors, want.vectors)
        np.testing.assert_array_equal(got.fingerprint, want.fingerprint)
        np.testing.assert_array_equal(got.aggregate_count, want.aggregate_count)
        np.testing.assert_allclose(got.aggregate, want.aggregate, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(got.topic_count, want.topic_count)


def test_killed_again_and_again_in_the_middle_of_writes(tmp_path: Path) -> None:
    rng = random.Random(7)
    batch = 50
    seen = []
    for _ in range(5):
        child = start(tmp_path, batch, 1_000_000)
        assert child.stdout is not None
        for _ in range(rng.randint(1, 8)):
            told = int(child.stdout.readline())
        time.sleep(rng.random() * 0.02)
        child.kill()
        child.wait()
        began = time.monotonic()
        store = open_store(tmp_path, replace(SETTINGS, lock_timeout_s=600))
        assert time.monotonic() - began < 300, "a dead holder is not waited for"
        assert not store.rebuilt
        assert store.position is not None
        assert store.position >= told
        assert_exact(store, batch)
        seen.append(store.position)
        store.close()
    assert seen == sorted(set(seen))


def test_expired_segments_leave_disk_after_a_kill(tmp_path: Path) -> None:
    child = start(tmp_path, 400, 6000)
    assert child.stdout is not None
    for _ in range(10):
        child.stdout.readline()
    child.kill()
    child.wait()
    store = open_store(tmp_path, SETTINGS)
    held = store.stats()
    assert held["segments"] > 0
    store.expire(store.clock_ms + SETTINGS.window_ms + SETTINGS.grace_ms + SETTINGS.ttl_ms)
    after = store.stats()
    assert after["segments"] == 0
    assert after["chunks"] == 0
    assert after["disk_bytes"] < held["disk_bytes"]
    # What stays is the default column family: position and clock, 32 bytes a version.
    assert sum(p.stat().st_size for p in tmp_path.glob("*.sst")) < 16_384
    store.close()


@pytest.mark.parametrize("cut", [1, 17, 4096])
def test_a_log_with_a_torn_tail_is_a_shorter_log(tmp_path: Path, cut: int) -> None:
    """Power loss without fsync: the last bytes of the write-ahead log are missing."""
    store = open_store(tmp_path / "live", SETTINGS)
    for o in range(0, 500, 50):
        store.apply([record(x) for x in range(o, o + 50)])
    image = tmp_path / "image"
    shutil.copytree(tmp_path / "live", image)
    store.close()
    wal = max(image.glob("*.log"), key=lambda p: p.stat().st_size)
    with open(wal, "rb+") as f:
        f.truncate(wal.stat().st_size - cut)
    store = open_store(image, SETTINGS)
    assert not store.rebuilt
    assert (store.position or 0) < 500
    assert_exact(store, 50)
    store.apply([record(x) for x in range(store.position or 0, 500)])
    assert_exact(store, 50)
    store.close()


def test_an_interrupted_restore_goes_on_where_it_was(tmp_path: Path) -> None:
    child = start(tmp_path, 100, 3000)
    assert child.stdout is not None
    for _ in range(4):
        child.stdout.readline()
    child.kill()
    child.wait()
    store = open_store(tmp_path, SETTINGS)
    first = store.position or 0
    assert 0 < first < 3000
    applied = store.apply([ChangelogRecord(o, record(o).value) for o in range(first, 3000)]).applied
    assert 0 < applied <= 3000 - first
    assert store.position == 3000
    assert_exact(store, 100)
    store.close()
