"""What a store keeps beside its data stays small however many segments came and went."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from state.api import ChangelogRecord, StoreSettings
from state.store import RocksStore, open_store
from topics.packed import EmbeddingChunk, encode_embedding

T0 = 1_573_700_000_000
SEGMENT_MS = 1_000
SETTINGS = StoreSettings(
    ttl_ms=2 * SEGMENT_MS, window_ms=2 * SEGMENT_MS, grace_ms=0, segments_per_ttl=2, cache_bytes=64 << 10
)


def chunk(offset: int, user: int, ts: int, pairs: int = 1) -> ChangelogRecord:
    none = np.zeros(0, np.float16)
    value = EmbeddingChunk(
        user, ts, 1, 0, np.arange(1, pairs + 1, dtype=np.uint64), np.zeros(pairs, np.uint32),
        np.ones((pairs, 5), np.float16), None, none, none, "e",
    )  # fmt: skip
    return ChangelogRecord(offset, encode_embedding(value))


def notes_bytes(store: RocksStore) -> int:
    """Of RocksDB's own log and its list of files."""
    return sum(p.stat().st_size for p in store.path.iterdir() if p.name.startswith(("LOG", "MANIFEST")))


def test_the_notes_of_dropped_segments_do_not_pile_up(tmp_path: Path) -> None:
    """Each segment costs RocksDB some kilobytes of notes: 250 of them over a megabyte, were they all kept."""
    store = open_store(tmp_path, SETTINGS)
    most = 0
    for k in range(250):
        store.apply([chunk(k, k + 1, T0 + k * SEGMENT_MS)])
        store.expire(T0 + k * SEGMENT_MS)
        most = max(most, notes_bytes(store))
    assert store.stats()["segments_dropped"] > 240
    assert most < (7 << 18), most  # three files of 512 KiB, and what the last line of each goes over by
    store.close()


def test_reading_all_users_leaves_the_block_cache_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path, SETTINGS)
    store.apply([chunk(k, k + 1, T0, pairs=100) for k in range(300)])
    store.flush()
    before = store.stats()["block_cache_bytes"]
    assert sum(len(chunks) for _, chunks in store.scan_users()) == 300
    assert sum(1 for _ in store.scan()) == 300
    assert store.stats()["block_cache_bytes"] - before < 32 << 10  # of 500 KiB read
    store.close()


def test_few_writes_are_no_table(tmp_path: Path) -> None:
    """A day of segments at the default settings, each written to a little: nothing is near the buffers' limit."""
    settings = StoreSettings()
    step = settings.ttl_ms // settings.segments_per_ttl
    store = open_store(tmp_path, settings)
    for k in range(400):
        now = T0 + min(k, 16) * step
        store.apply([chunk(3 * k + i, 3 * k + i, now, pairs=20) for i in range(3)])
        store.expire(now)
    assert store.stats()["segments"] > 15
    assert not list(tmp_path.glob("*.sst"))
    store.close()
