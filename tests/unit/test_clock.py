"""The event clock: monotone, and not moved by one wrong timestamp."""

from __future__ import annotations

import pytest

from streams.clock import CONFIRM, MAX_STEP_MS, NEAR_MS, ElapsedClock, EventClock

HOUR = 3_600_000


def started(at: int = 1_000_000_000_000) -> EventClock:
    clock = EventClock(at)
    return clock


def test_moves_with_events_and_never_back() -> None:
    clock = started()
    t = clock.now_ms
    assert clock.see(t + 10) == t + 10
    assert clock.see(t - HOUR) == t + 10
    assert clock.late == 1


def test_one_far_future_event_does_not_move_it() -> None:
    clock = started()
    t = clock.now_ms
    assert clock.see(t + 1000 * HOUR) == t
    assert clock.see(t + 1) == t + 1
    assert clock.jumps_doubted == 1


def test_wrong_times_scattered_among_good_ones_never_add_up() -> None:
    clock = started()
    t = clock.now_ms
    for i in range(200):
        clock.see(t + 1000 * HOUR)
        clock.see(t + i)
    assert clock.now_ms == t + 199


def test_a_real_gap_is_believed_after_enough_events_agree() -> None:
    clock = started()
    t = clock.now_ms + 48 * HOUR
    for i in range(CONFIRM):
        clock.see(t + i)
    assert clock.now_ms == t


def test_few_events_far_apart_move_the_clock_to_the_least_of_those_in_a_row() -> None:
    clock = started()
    t = clock.now_ms
    for i in range(1, CONFIRM):
        clock.see(t + 3 * i * MAX_STEP_MS)
    assert clock.now_ms == t
    clock.see(t + 3 * CONFIRM * MAX_STEP_MS)
    assert clock.now_ms == t + 3 * MAX_STEP_MS


def test_a_new_clock_needs_agreement_too() -> None:
    clock = EventClock()
    clock.see(9_000_000_000_000)
    assert clock.now_ms == -1
    for i in range(CONFIRM):
        clock.see(1_573_700_000_000 + i)
    assert clock.now_ms == 1_573_700_000_000 + CONFIRM - 1


def test_time_goes_on_by_what_events_are_ahead_and_a_late_one_adds_nothing() -> None:
    clock = ElapsedClock()
    assert [clock.elapsed(t) for t in (1_000, 1_500, 1_200, 1_500, 61_500, 61_499)] == [0, 500, 0, 0, 60_000, 0]


@pytest.mark.parametrize("wrong", [23 * HOUR, -23 * HOUR, HOUR // 2, -HOUR // 2, 2 * NEAR_MS, -2 * NEAR_MS])
def test_one_wrong_time_in_a_hundred_neither_stops_time_nor_makes_it_run(wrong: int) -> None:
    """Two days of an event a second; a step counts as a minute at most, so a wrong one ahead adds that."""
    clock = ElapsedClock()
    n = 2 * 86_400
    passed = sum(clock.elapsed(10**12 + wrong * (i % 100 == 50) + i * 1_000) for i in range(n))
    assert 0.88 * n * 1_000 <= passed <= n * 1_000 + n // 100 * NEAR_MS


def test_one_wrong_time_counts_as_a_minute_at_most() -> None:
    for wrong in (23 * HOUR, HOUR // 2, -HOUR // 2):
        clock = ElapsedClock()
        times = [10**12 + wrong * (i == 10) + i * 1_000 for i in range(300)]
        assert 280_000 <= sum(map(clock.elapsed, times)) <= 360_000


def test_a_log_that_is_played_again_counts_again() -> None:
    for apart in (30_000, 600_000):
        clock = ElapsedClock()
        first, second = (sum(clock.elapsed(10**12 + i * apart) for i in range(1_000)) for _ in range(2))
        assert second >= first * (1_000 - CONFIRM - 1) / 1_000


def test_runs_of_late_events_add_their_own_time_and_not_the_jumps() -> None:
    """Runs of 20 events, by turns live and late: 50 jumps each way, of which those of hours count as a minute."""
    for late in (HOUR // 12, 2 * HOUR):
        clock = ElapsedClock()
        passed = sum(clock.elapsed(10**12 + i * 1_000 - late * ((i // 20) % 2)) for i in range(2_000))
        assert 0.4 * 2_000_000 <= passed <= 1.2 * 2_000_000 + 50 * NEAR_MS


def test_a_partition_with_few_events_loses_no_time() -> None:
    clock = ElapsedClock()
    passed = sum(clock.elapsed(10**12 + i * 120_000) for i in range(800))
    assert passed == 799 * NEAR_MS
