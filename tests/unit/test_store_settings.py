"""A directory opened again with other settings: what lies there answers by the settings of today."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from state.api import ChangelogRecord, Lookup, StoreDims, StoreSettings
from state.reference import ReferenceStore
from state.store import open_store
from topics.packed import EmbeddingChunk, encode_embedding

HOUR = 3_600_000
T0 = 1_573_700_000_000
DIMS = StoreDims(3, 0, 0)
USERS = np.arange(1, 12, dtype=np.uint64)
SETTINGS = [
    StoreSettings(ttl_ms=t * HOUR, window_ms=w * HOUR, grace_ms=g * HOUR, segments_per_ttl=n, cache_bytes=c << 10)
    for t, w, g, n, c in (
        (12, 48, 3, 3, 64),
        (6, 24, 1, 4, 4096),
        (2, 24, 0, 4, 64),
        (6, 6, 0, 1, 64),
        (1, 2, 0, 8, 64),
    )
]


def record(rng: np.random.Generator, offset: int, ts: int) -> ChangelogRecord:
    items = np.sort(rng.choice(40, int(rng.integers(1, 20)), replace=False)).astype(np.uint64) + np.uint64(1)
    none = np.zeros(0, np.float16)
    vectors = rng.standard_normal((len(items), 3)).astype(np.float16)
    return ChangelogRecord(
        offset,
        encode_embedding(
            EmbeddingChunk(int(rng.integers(1, 12)), ts, 1, offset, items, (items % 5).astype(np.uint32), vectors, None,
                           none, none, "e")
        ),
    )  # fmt: skip


def ask(store, now: int) -> Lookup:  # type: ignore[no-untyped-def]
    n, ads = len(USERS), np.arange(1, 41, dtype=np.uint64)
    items = np.tile(ads, n)
    return store.lookup(
        USERS, np.arange(n + 1) * len(ads), items, (items % 5).astype(np.uint32), np.full(n, now, np.int64), 1, DIMS
    )


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_those_of_the_settings_in_force(tmp_path: Path, seed: int) -> None:
    """Against a store in memory that has read the whole changelog under the settings in force. A longer horizon than
    one before has less than that: what the shorter one let go of does not come back."""
    rng = np.random.default_rng(seed)
    written: list[ChangelogRecord] = []
    now, shortest, compared = T0, 1 << 62, 0
    # The longest first, then shorter ones and back among those.
    order = [SETTINGS[0], SETTINGS[1], *(SETTINGS[k] for k in rng.integers(1, 3, 2)), SETTINGS[3], SETTINGS[4]]
    for settings in order:
        horizon = max(settings.ttl_ms, settings.window_ms)
        store = open_store(tmp_path, settings)
        for _ in range(10):
            now += int(rng.integers(0, HOUR))
            late = [now - int(rng.integers(0, HOUR // 2)) for _ in range(6)]
            batch = [record(rng, len(written) + k, ts) for k, ts in enumerate(late)]
            written += batch
            store.apply(batch)
            store.expire(now)
        if horizon <= shortest:
            reference = ReferenceStore(settings)
            reference.expire(now)
            reference.apply(written)
            a, b = ask(store, now), ask(reference, now)
            for name in Lookup.__dataclass_fields__:
                np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-5, atol=1e-5, err_msg=name)
            compared += 1
        shortest = min(shortest, horizon)
        store.close()
    assert compared == len(order)


def test_a_longer_window_begins_with_what_the_shorter_one_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    short, long = SETTINGS[4], SETTINGS[0]
    store = open_store(tmp_path, short)
    store.apply([record(rng, 0, T0), record(rng, 1, T0 + 5 * HOUR)])
    store.expire(T0 + 5 * HOUR)
    store.close()
    store = open_store(tmp_path, long)
    assert [ts for _, _, ts, _, _ in store.scan()] == [T0 + 5 * HOUR]
    assert (ask(store, T0 + 10 * HOUR).ts_ms == T0 + 5 * HOUR).any()
    store.close()
