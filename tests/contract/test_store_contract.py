"""What every store must do, one rule a test, run against RocksDB and the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_cases import DIMS, HOUR, MODEL, SETTINGS, T0, ask, chunk, record

from state.api import ChangelogRecord, StoreDims, StoreSettings
from state.reference import ReferenceStore
from state.store import open_store

TTL, WINDOW, GRACE = SETTINGS.ttl_ms, SETTINGS.window_ms, SETTINGS.grace_ms
Make = Callable[..., Any]


@pytest.fixture(params=["rocks", "reference"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    opened = []

    def build(settings: StoreSettings = SETTINGS) -> Any:
        store = (
            open_store(tmp_path / f"s{len(opened)}", settings) if request.param == "rocks" else ReferenceStore(settings)
        )
        opened.append(store)
        return store

    yield build
    for store in opened:
        store.close()


def test_a_new_store_knows_nothing(make: Make) -> None:
    store = make()
    assert store.position is None
    assert store.clock_ms == -1
    out = ask(store, [(1, [10, 11], T0)])
    assert out.ts_ms.tolist() == [-1, -1]
    assert not out.vectors.any()
    assert out.aggregate_ts_ms.tolist() == out.state_ts_ms.tolist() == [-1]
    assert out.fingerprint.tolist() == [0]


def test_a_pair_comes_back_with_its_time_and_a_miss_says_so(make: Make) -> None:
    store = make()
    assert store.apply([record(7, 1, T0, [10, 12], value=2.0)]).applied == 1
    assert store.position == 8
    out = ask(store, [(1, [12, 11, 10, 12], T0 + 5)])
    assert out.ts_ms.tolist() == [T0, -1, T0, T0]
    np.testing.assert_array_equal(out.vectors[0], [14.0, 14.25, 14.5])
    np.testing.assert_array_equal(out.vectors[0], out.vectors[3])
    assert not out.vectors[1].any()
    assert out.pair_fingerprint.tolist() == [9, 0, 9, 9]
    np.testing.assert_array_equal(out.state, [[2.0, 2.0]])
    np.testing.assert_array_equal(out.profile, [[3.0, 3.0]])


@pytest.mark.parametrize(("age", "live"), [(0, True), (TTL - 1, True), (TTL, False), (TTL + 1, False)])
def test_direct_and_state_end_at_the_ttl(make: Make, age: int, live: bool) -> None:
    store = make()
    store.apply([record(0, 1, T0, [10])])
    out = ask(store, [(1, [10], T0 + age)])
    assert out.ts_ms.tolist() == [T0 if live else -1]
    assert out.state_ts_ms.tolist() == [T0 if live else -1]
    assert out.aggregate_ts_ms.tolist() == [T0]


@pytest.mark.parametrize(("age", "live"), [(WINDOW - 1, True), (WINDOW, False)])
def test_aggregates_end_at_the_window(make: Make, age: int, live: bool) -> None:
    store = make()
    store.apply([record(0, 1, T0, [10, 13])])
    out = ask(store, [(1, [10], T0 + age)])
    assert out.aggregate_count.tolist() == [2 * live]
    assert out.topic_count.tolist() == [2 * live]
    assert out.topic_ts_ms.tolist() == [T0 if live else -1]


@pytest.mark.parametrize(("age", "live"), [(HOUR // 2 - 1, True), (HOUR // 2, False), (HOUR - 1, False)])
def test_a_window_shorter_than_the_ttl(make: Make, age: int, live: bool) -> None:
    store = make(StoreSettings(ttl_ms=HOUR, window_ms=HOUR // 2, cache_bytes=1 << 20))
    store.apply([record(0, 1, T0, [10])])
    out = ask(store, [(1, [10], T0 + age)])
    assert out.ts_ms.tolist() == [T0]
    assert out.aggregate_count.tolist() == out.topic_count.tolist() == [live]


@pytest.mark.parametrize(("now", "seen"), [(T0 - 1, False), (T0, True)])
def test_a_request_does_not_see_the_future(make: Make, now: int, seen: bool) -> None:
    store = make()
    store.apply([record(0, 1, T0 - 10, [10, 11], value=1.0), record(1, 1, T0, [10], value=2.0)])
    out = ask(store, [(1, [10], now)])
    assert out.ts_ms.tolist() == [T0 if seen else T0 - 10]
    assert out.state_ts_ms.tolist() == [T0 if seen else T0 - 10]
    assert out.aggregate_count.tolist() == [2]


def test_newest_by_time_then_by_offset_whatever_the_order(make: Make) -> None:
    records = [
        record(0, 1, T0, [10], value=1.0),
        record(1, 1, T0 + 1, [10], value=2.0),
        record(2, 1, T0 + 1, [10], value=3.0),
        record(3, 1, T0 - 1, [10], value=4.0),
    ]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        store = make()
        for i in order:
            store.apply([records[i]])
        out = ask(store, [(1, [10], T0 + 9)])
        assert out.ts_ms.tolist() == [T0 + 1]
        assert out.vectors[0, 0] == 13.0
        assert out.state[0, 0] == 3.0
        assert out.aggregate_count.tolist() == [1]
        np.testing.assert_array_equal(out.aggregate, out.vectors)
        assert store.position == 4


def test_a_newer_pair_hides_an_older_one_even_where_only_the_older_is_asked_by_topic(make: Make) -> None:
    store = make()
    store.apply([record(0, 1, T0, [10], topics=[7]), record(1, 1, T0 + 1, [10], topics=[8])])
    out = ask(store, [(1, [99, 98], T0 + 2)], topics=[7, 8])
    assert out.topic_count.tolist() == [0, 1]
    assert out.topic_ts_ms.tolist() == [-1, T0 + 1]


def test_means_count_each_pair_once(make: Make) -> None:
    store = make()
    store.apply([record(0, 1, T0, [3, 4], value=0.0), record(1, 1, T0 + 5, [4, 6], value=10.0)])
    out = ask(store, [(1, [3, 5], T0 + 9)])
    assert out.aggregate_count.tolist() == [3]
    np.testing.assert_allclose(out.aggregate[0, 0], (3 + 14 + 16) / 3)
    assert out.aggregate_ts_ms.tolist() == [T0 + 5]
    # Topics are item % 3: 3 and 6 share one, 5 has none known.
    assert out.topic_count.tolist() == [2, 0]
    np.testing.assert_allclose(out.topic[0, 0], (3 + 16) / 2)


def test_a_chunk_without_pairs_brings_the_newest_state(make: Make) -> None:
    store = make()
    store.apply([record(0, 1, T0, [10], value=1.0), record(1, 1, T0 + 5, [], value=2.0, fingerprint=77)])
    out = ask(store, [(1, [10], T0 + 6), (1, [10], T0 + 4)])
    assert out.state_ts_ms.tolist() == [T0 + 5, T0]
    assert out.fingerprint.tolist() == [77, 9]
    assert out.state[:, 0].tolist() == [2.0, 1.0]
    assert out.ts_ms.tolist() == [T0, T0]
    assert out.aggregate_count.tolist() == [1, 1]


def test_model_versions_do_not_mix(make: Make) -> None:
    store = make()
    store.apply([record(0, 1, T0, [10], value=1.0), record(1, 1, T0 + 5, [10, 11], value=2.0, model=MODEL + 1)])
    old, new = ask(store, [(1, [10], T0 + 6)]), ask(store, [(1, [10], T0 + 6)], model=MODEL + 1)
    assert (old.ts_ms[0], old.aggregate_count[0], old.state_ts_ms[0]) == (T0, 1, T0)
    assert (new.ts_ms[0], new.aggregate_count[0], new.state_ts_ms[0]) == (T0 + 5, 2, T0 + 5)


@pytest.mark.parametrize("other", [StoreDims(4, 2, 2), StoreDims(3, 3, 2), StoreDims(3, 2, 1)])
def test_chunks_of_other_lengths_are_not_seen(make: Make, other: StoreDims) -> None:
    store = make()
    store.apply([record(0, 1, T0, [10], value=1.0), record(1, 1, T0 + 5, [10], dims=other)])
    assert ask(store, [(1, [10], T0 + 6)]).ts_ms.tolist() == [T0]
    assert ask(store, [(1, [10], T0 + 6)], dims=other).ts_ms.tolist() == [T0 + 5]


def test_a_state_beside_pairs_of_another_length_is_not_seen_even_without_pairs(make: Make) -> None:
    store = make()
    store.apply([record(0, 1, T0, [], value=1.0), record(1, 1, T0 + 5, [], dims=StoreDims(4, 2, 2))])
    assert ask(store, [(1, [10], T0 + 6)]).state_ts_ms.tolist() == [T0]
    assert ask(store, [(1, [10], T0 + 6)], dims=StoreDims(4, 2, 2)).state_ts_ms.tolist() == [T0 + 5]


def test_a_user_may_occur_often_each_time_with_its_own_now(make: Make) -> None:
    store = make()
    store.apply([record(0, 1, T0, [10]), record(1, 2, T0, [10]), record(2, 1, T0 + 10, [10])])
    out = ask(store, [(1, [10], T0 + 10), (2, [10, 10], T0 + 9), (1, [], T0 + 9), (1, [10], T0 - 1), (3, [10], T0)])
    assert out.ts_ms.tolist() == [T0 + 10, T0, T0, -1, -1]
    assert out.aggregate_ts_ms.tolist() == [T0 + 10, T0, T0, -1, -1]


def test_an_empty_question(make: Make) -> None:
    out = ask(make(), [])
    assert out.vectors.shape == (0, DIMS.dim)
    assert out.aggregate.shape == (0, DIMS.dim)


def test_int8_and_float16_chunks_side_by_side(make: Make) -> None:
    store = make()
    store.apply([record(0, 1, T0, [10, 11, 12], int8=True, value=1.0), record(1, 1, T0 + 1, [11], value=50.0)])
    out = ask(store, [(1, [10, 11, 12], T0 + 2)])
    np.testing.assert_allclose(out.vectors[:, 0], [11 * 0.5, 61.0, 13 * 1.5])
    np.testing.assert_allclose(out.aggregate[0, 0], (5.5 + 61 + 19.5) / 3)


def test_applying_again_changes_nothing(make: Make) -> None:
    store = make()
    batch = [record(3, 1, T0, [10, 11]), record(4, 2, T0, [10])]
    store.apply(batch)
    before = ask(store, [(1, [10], T0), (2, [10], T0)])
    store.apply(batch)
    store.apply(batch[:1])
    after = ask(store, [(1, [10], T0), (2, [10], T0)])
    assert store.position == 5
    np.testing.assert_array_equal(before.aggregate_count, after.aggregate_count)
    np.testing.assert_array_equal(before.aggregate, after.aggregate)


def test_what_is_no_chunk_is_reported_and_the_rest_is_applied(make: Make) -> None:
    good = chunk(1, T0, [10])
    nan = bytearray(good)
    nan[56 + 12 + 1] |= 0x7C  # first vector number becomes infinite or NaN
    bad = [b"", b"junk", good[:-1], good + b"x", bytes(nan), chunk(0, T0, [10]), chunk(1, -5, [10]),
           b"SLRE\x09" + good[5:], chunk(1, 4_102_444_800_001, [10])]  # fmt: skip
    store = make()
    result = store.apply([ChangelogRecord(i, v) for i, v in enumerate(bad)] + [ChangelogRecord(20, good)])
    assert (result.applied, result.pairs) == (1, 1)
    assert result.rejected == [
        (0, "empty"), (1, "truncated"), (2, "truncated"), (3, "trailing_bytes"), (4, "not_finite"), (5, "empty_user"),
        (6, "time_out_of_range"), (7, "newer_version"), (8, "time_out_of_range"),
    ]  # fmt: skip
    assert store.position == 21
    assert ask(store, [(1, [10], T0)]).aggregate_count.tolist() == [1]


def test_an_event_id_of_any_text(make: Make) -> None:
    store = make()
    assert store.apply([record(0, 1, T0, [10], event_id="ünïcode")]).applied == 1
    assert ask(store, [(1, [10], T0)]).ts_ms.tolist() == [T0]


def test_the_position_never_goes_back(make: Make) -> None:
    store = make()
    store.apply([record(9, 1, T0, [10])])
    store.apply([record(2, 1, T0, [11])])
    assert store.position == 10
    store.apply([], next_offset=15)
    assert store.position == 15
    store.apply([record(11, 1, T0, [12])], next_offset=12)
    assert store.position == 15


@pytest.mark.parametrize("late", [0, 1])
def test_the_floor_of_a_late_request(make: Make, late: int) -> None:
    """A request behind the clock by more than the grace is judged at the floor: what is gone stays gone."""
    store = make()
    store.apply([record(0, 1, T0, [10])])
    store.expire(T0 + TTL + GRACE - 1 + late)
    assert ask(store, [(1, [10], T0)]).ts_ms.tolist() == [-1 if late else T0]
    assert ask(store, [(1, [10], T0)]).aggregate_count.tolist() == [1]


@pytest.mark.parametrize("late", [0, 1])
def test_what_is_expired_is_not_written(make: Make, late: int) -> None:
    store = make()
    store.expire(T0 + WINDOW + GRACE - 1 + late)
    result = store.apply([record(0, 1, T0, [10, 11])])
    assert (result.applied, result.expired) == (1 - late, late)
    assert store.position == 1
    assert ask(store, [(1, [10], T0)]).aggregate_count.tolist() == [2 * (1 - late)]


def test_the_clock_never_goes_back(make: Make) -> None:
    store = make()
    store.expire(T0)
    store.expire(T0 - HOUR)
    assert store.clock_ms == T0


def test_expired_stays_expired_for_requests_of_the_past(make: Make) -> None:
    store = make()
    store.apply([record(0, 1, T0, [10]), record(1, 1, T0 + WINDOW, [11])])
    assert ask(store, [(1, [10], T0)]).aggregate_count.tolist() == [1]
    store.expire(T0 + 3 * WINDOW)
    for now in (T0, T0 + WINDOW, T0 + 3 * WINDOW):
        out = ask(store, [(1, [10, 11], now)])
        assert out.ts_ms.tolist() == [-1, -1]
        assert out.aggregate_count.tolist() == [0]


def test_a_wrong_time_far_ahead_disturbs_nothing(make: Make) -> None:
    store = make()
    store.apply([record(i, 1, T0 + i * 400 * 24 * HOUR, [10 + i]) for i in range(30)] + [record(99, 1, T0 + 5, [10])])
    out = ask(store, [(1, [10, 11], T0 + 6)])
    assert out.ts_ms.tolist() == [T0 + 5, -1]
    store.expire(T0 + 6)
    later = T0 + 29 * 400 * 24 * HOUR
    assert ask(store, [(1, [39], later)]).ts_ms.tolist() == [later]
    store.expire(later + WINDOW + GRACE)
    assert ask(store, [(1, [39], later)]).ts_ms.tolist() == [-1]


def test_large_ids_and_topics(make: Make) -> None:
    store = make()
    top = (1 << 64) - 1
    store.apply([record(0, top, T0, [0, top], topics=[0, 0xFFFFFFFF])])
    out = ask(store, [(top, [top, 0, 5], T0)], topics=[0xFFFFFFFF, 0, 5])
    assert out.ts_ms.tolist() == [T0, T0, -1]
    assert out.topic_count.tolist() == [1, 1, 0]


@pytest.mark.parametrize("int8", [False, True])
def test_state_pairs_and_profile_may_come_in_chunks_of_their_own(make: Make, int8: bool) -> None:
    store = make()
    store.apply(
        [
            record(0, 1, T0, [], value=3.0, fingerprint=33),
            record(1, 1, T0 + 5, [10, 11, 12], value=1.0, dims=StoreDims(3, 0, 0), fingerprint=44, int8=int8),
            record(2, 1, T0 + 7, [], value=6.0, dims=StoreDims(3, 2, 0), fingerprint=55),
        ]
    )
    at_7 = ask(store, [(1, [10], T0 + 7)])
    assert at_7.ts_ms.tolist() == [T0 + 5]
    assert (at_7.state_ts_ms.tolist(), at_7.state.tolist()) == ([T0 + 7], [[6.0, 6.0]])
    assert (at_7.fingerprint.tolist(), at_7.pair_fingerprint.tolist()) == ([55], [44])
    assert at_7.profile.tolist() == [[4.0, 4.0]], "the newest chunk that has a profile"
    at_6 = ask(store, [(1, [10], T0 + 6)])
    assert (at_6.state_ts_ms.tolist(), at_6.fingerprint.tolist()) == ([T0], [33])
    assert ask(store, [(1, [10], T0 + 4)]).ts_ms.tolist() == [-1]
