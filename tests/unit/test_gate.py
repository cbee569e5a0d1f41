"""The gate: which pairs are worth the FM's time, and that it depends on the log alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.gate import MIN_BUCKET_PAIRS, Gate, GateSettings, above_threshold, by_value


def logits(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_accepts_everything_most_valuable_first_without_limits() -> None:
    gate = Gate(GateSettings())
    assert gate.decide(1, 1000, logits(0.1, 3.0, -2.0, 3.0)).tolist() == [1, 3, 0, 2]
    assert (gate.seen, gate.accepted) == (4, 4)


scored = st.lists(st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, math.nan]), max_size=40), max_size=6)


@given(scored)
def test_order_of_many_events_is_that_of_each_alone(events: list[list[float]]) -> None:
    splits = np.cumsum([0, *map(len, events)])
    values = logits(*(v for event in events for v in event))
    order = by_value(values, splits)
    for k, event in enumerate(events):
        lo, hi = splits[k], splits[k + 1]
        assert (order[lo:hi] - lo).tolist() == np.argsort(-logits(*event), kind="stable").tolist()
    usable = above_threshold(values[order], splits, GateSettings(threshold=0.5))
    assert usable == [sum(v >= 0 for v in event) for event in events]


def test_threshold_is_a_probability_and_nan_never_passes() -> None:
    gate = Gate(GateSettings(threshold=0.5))
    assert gate.decide(1, 0, logits(-0.1, 0.0, math.nan, 2.0)).tolist() == [3, 1]
    assert gate.refused["below_threshold"] == 2


def test_top_k_per_event() -> None:
    gate = Gate(GateSettings(top_k=2))
    assert gate.decide(1, 0, logits(1, 2, 3)).tolist() == [2, 1]
    assert gate.refused["top_k"] == 1


def test_user_cap_holds_inside_its_window_only_and_per_user() -> None:
    gate = Gate(GateSettings(per_user_cap=3, cap_window_ms=1000))
    assert len(gate.decide(1, 0, logits(1, 2))) == 2
    assert len(gate.decide(1, 999, logits(1, 2))) == 1
    assert len(gate.decide(2, 999, logits(1, 2))) == 2
    assert len(gate.decide(1, 1000, logits(1, 2))) == 2
    assert gate.refused["user_cap"] == 1


def test_budget_is_never_exceeded_in_event_time() -> None:
    gate = Gate(GateSettings(budget_pairs_per_s=10, budget_burst_s=2))
    rng = np.random.default_rng(0)
    accepted = sum(len(gate.decide(i, i * 100, rng.normal(size=50).astype(np.float32))) for i in range(600))
    assert accepted <= 10 * 60 + MIN_BUCKET_PAIRS
    assert accepted >= 0.8 * 10 * 60, "a budget is there to be used"
    assert gate.accepted == accepted
    assert gate.seen == accepted + sum(gate.refused.values()), "nothing is dropped uncounted"


def test_a_budget_smaller_than_an_events_list_is_spent_all_the_same() -> None:
    gate = Gate(GateSettings(budget_pairs_per_s=0.5, budget_burst_s=1))
    rng = np.random.default_rng(5)
    accepted = sum(len(gate.decide(i, i * 20_000, rng.normal(size=100).astype(np.float32))) for i in range(2000))
    assert 0.6 * 0.5 * 40_000 <= accepted <= 0.5 * 40_000 + MIN_BUCKET_PAIRS


def test_under_a_budget_the_valuable_pairs_are_taken() -> None:
    gate = Gate(GateSettings(budget_pairs_per_s=20, budget_burst_s=5))
    rng = np.random.default_rng(1)
    taken, all_values = [], []
    for i in range(2000):
        values = rng.normal(size=20).astype(np.float32)
        all_values.append(values)
        taken.append(values[gate.decide(i, i * 100, values)])
    late = np.concatenate(taken[500:])
    share = len(late) / (20 * 1500)
    assert late.mean() > np.quantile(np.concatenate(all_values), 1 - 2 * share)


def test_share() -> None:
    gate = Gate(GateSettings(budget_share=0.25))
    rng = np.random.default_rng(2)
    for i in range(3000):
        gate.decide(i, i, rng.normal(size=20).astype(np.float32))
    assert gate.accepted / gate.seen == pytest.approx(0.25, abs=0.02)


def test_backlog_raises_the_bar_and_at_the_top_sheds_all_pairs() -> None:
    settings = GateSettings(backlog_low_pairs=100, backlog_high_pairs=1100)
    rng = np.random.default_rng(3)
    shares = []
    for backlog in (0, 600, 1100, 10_000):
        gate = Gate(settings)
        for i in range(1500):
            gate.decide(i, i, rng.normal(size=20).astype(np.float32), backlog)
        shares.append(gate.accepted / gate.seen)
    assert shares[0] == 1.0
    assert shares[1] == pytest.approx(0.5, abs=0.05)
    assert shares[2] == shares[3] == 0.0


def test_same_log_same_decisions_and_a_restart_goes_on_from_the_saved_text() -> None:
    settings = GateSettings(budget_pairs_per_s=15, budget_burst_s=3, top_k=10)
    rng = np.random.default_rng(4)
    events = [(i % 50, i * 40, rng.normal(size=25).astype(np.float32)) for i in range(1200)]
    whole = Gate(settings)
    want = [whole.decide(*e).tolist() for e in events]
    gate = Gate(settings)
    got = []
    for k, e in enumerate(events):
        if k % 100 == 7:
            text = gate.dump()
            assert len(text) < 200
            gate = Gate.load(settings, text)
        got.append(gate.decide(*e).tolist())
    assert got == want


@pytest.mark.parametrize("text", [None, "", "nonsense", "[]", "[1,2]", "[9,0,0,0,0]", "[1,1e999,0,0,0]", '{"a":1}'])
def test_foreign_metadata_gives_a_fresh_gate(text: str | None) -> None:
    assert Gate.load(GateSettings(), text) == Gate(GateSettings())


def test_one_absurd_time_does_not_stop_the_budget() -> None:
    gate = Gate(GateSettings(budget_pairs_per_s=10, budget_burst_s=1))
    gate.decide(1, 1_000, logits(*range(10)))
    gate.decide(1, 9_000_000_000_000, logits(*range(10)))
    accepted = sum(len(gate.decide(2, 2_000 + 1_000 * i, logits(*range(20)))) for i in range(300))
    assert accepted > 500


def test_events_without_pairs_are_fine() -> None:
    assert Gate(GateSettings(budget_pairs_per_s=1)).decide(1, 5, logits()).tolist() == []


def test_one_time_a_day_ahead_does_not_stop_a_budget_that_binds_nobody() -> None:
    gate = Gate(GateSettings(budget_pairs_per_s=125))
    rng = np.random.default_rng(5)
    for wrong in (0, 23 * 3_600_000):
        gate.decide(1, 10**12 + wrong, rng.normal(size=100).astype(np.float32))
    accepted = sum(len(gate.decide(1, 10**12 + 1_000 * i, rng.normal(size=100).astype(np.float32))) for i in range(500))
    assert accepted > 0.97 * 500 * 100


def test_a_log_played_twice_is_decided_alike() -> None:
    gate = Gate(GateSettings(budget_pairs_per_s=50, per_user_cap=2_000))
    rng = np.random.default_rng(6)
    log = [rng.normal(size=100).astype(np.float32) for _ in range(8_000)]
    counts = [sum(len(gate.decide(i % 9, 10**12 + 1_000 * i, x)) for i, x in enumerate(log)) for _ in range(2)]
    assert counts[1] == pytest.approx(counts[0], rel=0.05)
