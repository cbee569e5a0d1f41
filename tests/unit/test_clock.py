"""The event clock: monotone, and not moved by one wrong timestamp."""

from __future__ import annotations

from streams.clock import CONFIRM, MAX_STEP_MS, EventClock

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


def test_disagreeing_jumps_are_not_a_gap() -> None:
    clock = started()
    t = clock.now_ms
    for i in range(1, 50):
        clock.see(t + 3 * i * MAX_STEP_MS)
    assert clock.now_ms == t


def test_a_new_clock_needs_agreement_too() -> None:
    clock = EventClock()
    clock.see(9_000_000_000_000)
    assert clock.now_ms == -1
    for i in range(CONFIRM):
        clock.see(1_573_700_000_000 + i)
    assert clock.now_ms == 1_573_700_000_000
