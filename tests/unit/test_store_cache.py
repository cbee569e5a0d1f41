"""The user cache under pressure: small, flipping, with users that do not fit; and misuse of a look-up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from state import kernels
from state.api import ChangelogRecord, Lookup, StoreDims, StoreSettings
from state.reference import ReferenceStore
from state.segments import Times, parse
from state.store import open_store
from topics.packed import EmbeddingChunk, encode_embedding

T0 = 1_573_700_000_000
HOUR = 3_600_000
DIMS = StoreDims(5, 3, 1)
SETTINGS = StoreSettings(cache_bytes=64 << 10)


def record(offset: int, user: int, ts: int, n: int) -> ChangelogRecord:
    rng = np.random.default_rng(offset)
    items = np.sort(rng.choice(np.arange(1, 900), n, replace=False)).astype(np.uint64)
    return ChangelogRecord(
        offset,
        encode_embedding(
            EmbeddingChunk(
                user, ts, 1, offset, items, (items % 40).astype(np.uint32),
                rng.standard_normal((n, 5)).astype(np.float16), None, np.full(3, offset % 99, np.float16),
                np.ones(1, np.float16), "e",
            )
        ),
    )  # fmt: skip


def ask(store, users: list[int], now: int, ads: int = 60) -> Lookup:  # type: ignore[no-untyped-def]
    items = np.random.default_rng(now % 1000).integers(1, 900, ads * len(users)).astype(np.uint64)
    return store.lookup(
        np.array(users, np.uint64), np.arange(len(users) + 1) * ads, items, (items % 40).astype(np.uint32),
        np.full(len(users), now, np.int64), 1, DIMS,
    )  # fmt: skip


def assert_same(a: Lookup, b: Lookup) -> None:
    for name in Lookup.__dataclass_fields__:
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-5, atol=1e-5, err_msg=name)


def test_answers_do_not_depend_on_what_is_cached(tmp_path: Path) -> None:
    """One user is larger than the cache, the others push each other out, writes go on in between."""
    rng = np.random.default_rng(0)
    store, reference = open_store(tmp_path, SETTINGS), ReferenceStore(SETTINGS)
    offset = 0
    for step in range(16):
        batch = []
        for _ in range(12):
            user = 1 if rng.random() < 0.4 else int(rng.integers(2, 40))
            batch.append(
                record(offset, user, T0 + step * HOUR + offset, 150 if user == 1 else int(rng.integers(0, 60)))
            )
            offset += 1
        assert store.apply(batch) == reference.apply(batch)
        now = T0 + step * HOUR + offset
        for users in ([1], [2, 3, 2], rng.integers(1, 45, 30).tolist(), [1, 7, 1, 8], list(range(1, 45))):
            assert_same(ask(store, users, now), ask(reference, users, now))
        if step % 6 == 5:
            store.expire(now)
            reference.expire(now)
    stats = store.stats()
    assert stats["user_cache_hits"] > 0
    assert store._cache.evicted > 10
    assert stats["user_cache_bytes"] <= SETTINGS.cache_bytes
    store.close()


def test_a_cached_user_needs_no_disk(tmp_path: Path) -> None:
    """Users are cached when they are written, when they are read, and again when the store is opened."""
    roomy = replace(SETTINGS, cache_bytes=4 << 20)
    store, reference = open_store(tmp_path, roomy), ReferenceStore(SETTINGS)
    for s in (store, reference):
        s.apply([record(i, 1 + i % 5, T0 + i, 20) for i in range(20)])
    for opened in range(3):
        assert_same(ask(store, [1, 2, 3, 4, 5, 6], T0 + 99), ask(reference, [1, 2, 3, 4, 5, 6], T0 + 99))
        for s in (store, reference):
            s.apply([record(20 + opened, 6 + opened, T0 + 50, 20)])
        assert_same(ask(store, [1, 6, 7, 8], T0 + 99), ask(reference, [1, 6, 7, 8], T0 + 99))
        assert store.stats()["user_cache_misses"] == 0
        store.close()
        store = open_store(tmp_path, roomy)
    store.close()


def test_a_store_larger_than_its_cache_reads_users_as_they_are_asked_for(tmp_path: Path) -> None:
    store, reference = open_store(tmp_path, SETTINGS), ReferenceStore(SETTINGS)
    batch = [record(i, 1 + i % 50, T0 + i, 40) for i in range(200)]
    store.apply(batch)
    reference.apply(batch)
    store.close()
    store = open_store(tmp_path, SETTINGS)
    assert store.stats()["user_cache_bytes"] == 0
    for misses in (3, 3):
        assert_same(ask(store, [1, 2, 99, 1], T0 + 300), ask(reference, [1, 2, 99, 1], T0 + 300))
        assert store.stats()["user_cache_misses"] == misses
    batch = [record(200, 1, T0 + 200, 40), record(201, 51, T0 + 201, 40), record(202, 3, T0 + 202, 40)]
    store.apply(batch)
    reference.apply(batch)
    assert_same(ask(store, [1, 51, 3], T0 + 300), ask(reference, [1, 51, 3], T0 + 300))
    assert store.stats()["user_cache_misses"] == 5, "51 and 3 were not known"
    store.close()


def test_more_users_than_the_table_has_room_for(tmp_path: Path) -> None:
    """Many users of one small chunk each: what is known of absent users is given up, and all are still found."""
    store, reference = open_store(tmp_path, SETTINGS), ReferenceStore(SETTINGS)
    for step in range(12):
        batch = [record(40 * step + i, 1 + 40 * step + i, T0 + step, 1) for i in range(40)]
        store.apply(batch)
        reference.apply(batch)
        users = list(range(1, 40 * step + 90, 7))
        assert_same(ask(store, users, T0 + 99, ads=20), ask(reference, users, T0 + 99, ads=20))
    assert store._cache.ring[kernels.COMPLETE] == 0
    assert 2 * store._cache.ring[kernels.ENTRIES] <= len(store._cache.keys)
    store.close()


def test_dead_chunks_leave_the_cache_with_their_segment(tmp_path: Path) -> None:
    roomy = replace(SETTINGS, cache_bytes=4 << 20)
    store, reference = open_store(tmp_path, roomy), ReferenceStore(SETTINGS)
    for hour in range(60):
        batch = [record(2 * hour + i, 1 + i, T0 + hour * HOUR, 30) for i in range(2)]
        for s in (store, reference):
            s.apply(batch)
            s.expire(T0 + hour * HOUR)
        assert_same(ask(store, [1, 2], T0 + hour * HOUR), ask(reference, [1, 2], T0 + hour * HOUR))
    cache, listed = store._cache, 0
    c = int(cache.heads[cache.keys == 1][0])
    while c >= 0:
        listed, c = listed + 1, int(cache.buf[c // 8].view(np.int64))
    assert listed <= 28, "window 24 h, grace 1 h, segments of 1.5 h"
    store.close()


def test_columns_that_do_not_line_up_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path, SETTINGS)
    users, now = np.ones(2, np.uint64), np.zeros(2, np.int64)
    items, topics = np.ones(4, np.uint64), np.ones(4, np.uint32)
    for splits in ([0, 2, 5], [0, 3, 2], [-1, 2, 4]):
        with pytest.raises(ValueError, match="ascend"):
            store.lookup(users, np.array(splits), items, topics, now, 1, DIMS)
    with pytest.raises(ValueError, match="2 users, 2 splits"):
        store.lookup(users, np.array([0, 4]), items, topics, now, 1, DIMS)
    with pytest.raises(ValueError, match="3 topics"):
        store.lookup(users, np.array([0, 2, 4]), items, topics[:3], now, 1, DIMS)
    store.close()


def test_views_of_any_kind_are_taken(tmp_path: Path) -> None:
    """Read-only, strided and unaligned arrays, as decoders hand them out."""
    store = open_store(tmp_path, SETTINGS)
    store.apply([record(0, 7, T0, 20)])
    users = np.frombuffer(np.array([7], np.uint64).tobytes(), np.uint64)
    item = int(np.frombuffer(record(0, 7, T0, 20).value, np.uint64, 1, 56)[0])
    items = np.frombuffer(b"x" + np.array([item], np.uint64).tobytes(), np.uint64, 1, 1)
    out = store.lookup(
        users, np.arange(4)[:3:2] // 2, items, np.zeros((1, 2), np.uint32)[:, 0], np.full(2, T0)[::2], 1, DIMS
    )
    assert out.ts_ms.tolist() == [T0]
    store.close()


def test_segments() -> None:
    times = Times.of(StoreSettings(ttl_ms=6 * HOUR, segments_per_ttl=4))
    segment = times.segment_of(T0)
    assert segment.length_ms == HOUR * 3 // 2
    assert segment.start_ms <= T0 < segment.end_ms
    assert parse(segment.name) == segment
    for name in ("far", "default", "s1", "s1_", "s_1", "sx_5", "s5_0", "s-5_3"):
        assert parse(name) is None
    floor = times.floor(T0)
    assert floor == T0 - HOUR
    assert times.dead(floor - times.horizon, floor)
    assert not times.dead(floor - times.horizon + 1, floor)
    assert not times.dead(0, times.floor(-1))
    assert Times.of(StoreSettings(ttl_ms=2, segments_per_ttl=4)).segment == 1
