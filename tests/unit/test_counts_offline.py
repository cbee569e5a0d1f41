"""`OfflineCounts` counts what `ReferenceCounts` counts, however the events come."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from state.counts import BUCKET_MS, DAY_MS, HOUR_MS, Counts, CountSettings
from state.counts_offline import OfflineCounts
from state.counts_reference import ReferenceCounts

T0 = 19_000 * DAY_MS
USERS = st.sampled_from([1, 2, 2**64 - 1])
ITEMS = st.sampled_from([5, 6, 7, 2**63 + 1])
TIMES = st.one_of(
    st.integers(-2, 30).flatmap(lambda h: st.sampled_from([h * HOUR_MS + d for d in (-1, 0, 1)])),
    st.integers(0, 400).flatmap(lambda k: st.sampled_from([k * BUCKET_MS + d for d in (-1, 0, 1)])),
    st.integers(-DAY_MS, 2 * DAY_MS),
).map(lambda t: T0 + t)
EVENTS = st.lists(st.tuples(USERS, st.lists(ITEMS, max_size=4), TIMES, st.booleans()), max_size=25)
ASKED = st.lists(st.tuples(USERS, st.lists(ITEMS, max_size=4), TIMES, st.integers(-1, 1)), min_size=1, max_size=8)


def columns(requests: list[tuple[int, list[int], int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """users, ts_ms, splits, items"""
    splits = np.cumsum([0, *(len(items) for _, items, _ in requests)]).astype(np.int64)
    return (
        np.array([u for u, _, _ in requests], np.uint64),
        np.array([t for _, _, t in requests], np.int64),
        splits,
        np.array([i for _, items, _ in requests for i in items], np.uint64),
    )


def assert_same(a: Counts, b: Counts) -> None:
    for f in fields(Counts):
        assert getattr(a, f.name).dtype == getattr(b, f.name).dtype, f.name
        assert getattr(a, f.name).tolist() == getattr(b, f.name).tolist(), f.name


@settings(max_examples=300, deadline=None)
@given(EVENTS, ASKED, st.sampled_from([0, 1, 10_000, HOUR_MS]), st.integers(1, 5))
def test_as_the_reference(
    events: list[tuple[int, list[int], int, bool]],
    asked: list[tuple[int, list[int], int, int]],
    lag_ms: int,
    size: int,
) -> None:
    reference, offline = (c(CountSettings(lag_ms)) for c in (ReferenceCounts, OfflineCounts))
    for start in range(0, len(events), size):
        part = events[start : start + size]
        for clicked in (False, True):
            users, ts_ms, splits, items = columns([e[:3] for e in part if e[3] == clicked])
            (offline.clicked if clicked else offline.shown)(users, ts_ms, splits, items)
    for user, these, ts, clicked in events:
        (reference.clicked if clicked else reference.shown)(user, np.array(these, np.uint64), ts)
    # Windows begin and end `lag_ms` before the time asked: the edges are there.
    users, now_ms, splits, items = columns([(u, i, t + lag_ms + d) for u, i, t, d in asked])
    assert_same(offline.lookup(users, splits, items, now_ms), reference.lookup(users, splits, items, now_ms))


def random_log(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    splits = np.cumsum([0, *rng.integers(0, 6, n)]).astype(np.int64)
    return (
        rng.integers(1, 40, n).astype(np.uint64),
        T0 + np.sort(rng.integers(0, 3 * DAY_MS, n)),
        splits,
        rng.integers(1, 200, splits[-1]).astype(np.uint64),
    )


def test_blocks_of_any_size_count_the_same_in_few_runs() -> None:
    users, ts_ms, splits, items = random_log(3_000, 0)
    whole, blocks = OfflineCounts(), OfflineCounts()
    whole.shown(users, ts_ms, splits, items)
    for a in range(0, len(users), 7):
        z = min(a + 7, len(users))
        cut = items[splits[a] : splits[z]]
        blocks.shown(users[a:z], ts_ms[a:z], splits[a : z + 1] - splits[a], cut)
    assert len(blocks._shown) < 12
    got = blocks.lookup(users, splits, items, ts_ms)
    assert_same(got, whole.lookup(users, splits, items, ts_ms))
    assert got.pair_shown.max() > 1
    assert got.item_shown_day.max() > got.item_shown_hour.max() > 1


def test_what_is_expired_is_not_missed() -> None:
    """A look-up at the clock or later gives the same numbers, and old runs are gone."""
    whole, expired = OfflineCounts(), OfflineCounts()
    for day in range(6):
        users, ts_ms, splits, items = random_log(500, day)
        for counts in (whole, expired):
            counts.shown(users, ts_ms + 3 * day * DAY_MS, splits, items)
            counts.clicked(users, ts_ms + 3 * day * DAY_MS, splits, items)
    now = T0 + 17 * DAY_MS
    expired.expire(now)
    later = np.array([now, now + HOUR_MS, now + 3 * DAY_MS], np.int64)
    asked = np.array([1, 2, 3], np.uint64), np.array([0, 5, 9, 12]), np.arange(1, 13).astype(np.uint64), later
    assert_same(expired.lookup(*asked), whole.lookup(*asked))
    expired.expire(now + 9 * DAY_MS)
    assert not expired._shown
    assert not expired._clicked
    assert not expired.lookup(*asked).user_shown.any()


def test_a_long_log_takes_no_more_memory_than_its_last_days() -> None:
    counts = OfflineCounts()
    users, ts_ms, splits, items = random_log(300, 1)
    sizes = []
    for day in range(0, 90, 3):
        counts.shown(users, ts_ms + day * DAY_MS, splits, items)
        counts.expire(T0 + day * DAY_MS)
        sizes.append(sum(len(run) for run in counts._shown))
    assert max(sizes) <= 4 * len(items)
