"""What the simulator's parameters must give (docs/simulator.md), loosely, on small worlds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from topics.events import Event, decode_event
from topics.simulator import SimulatorConfig, preset, write
from topics.simulator.measure import history_match, measure
from topics.simulator.world import build


def _figures(config: SimulatorConfig, folder: Path, delays: tuple[float, ...]) -> dict[str, float]:
    log, truth = folder / "log.jsonl", folder / "truth.npz"
    write(config, log, truth)

    def events() -> Iterator[Event]:
        with open(log, "rb") as f:
            yield from map(decode_event, f)

    return measure(events(), np.load(truth)["p"], delays) | history_match(events())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return _figures(preset("demo").with_(users=300), tmp_path_factory.mktemp("demo"), (0.0, 21_600.0))


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    return _figures(preset("sessions").with_(users=250), tmp_path_factory.mktemp("sessions"), (0.0, 10.0, 60.0))


def test_click_rate(demo, sessions):
    assert 0.02 < demo["ctr"] < 0.05
    assert 0.02 < sessions["ctr"] < 0.05


def test_half_of_the_pairs_were_candidates_and_many_of_them_hours_ago(demo):
    assert 0.4 < demo["seen_6h"] < 0.65
    assert 0.25 < demo["seen_1_6h"] / demo["seen_6h"] < 0.65


def test_requests_come_in_sessions(demo, sessions):
    assert demo["gap_under_30min"] > 0.35
    assert demo["gap_1_6h"] > 0.15
    assert sessions["gap_under_30min"] > 0.8


def test_interests_move_on_a_scale_of_hours(demo):
    assert demo["same_0.02_0.1h"] > 0.5
    assert demo["same_0.1_1h"] > 1.15 * demo["same_3_6h"]
    assert demo["same_3_6h"] > 1.3 * demo["same_12_24h"]


def test_interests_of_sessions_move_on_a_scale_of_a_minute(sessions):
    assert sessions["same_0_0.02h"] > 2.5 * sessions["same_0.02_0.1h"]


def test_demographics_share_trends(demo):
    assert demo["same_hour_within_demographic"] > 4 * demo["same_hour_across_demographics"]


def test_items_live_for_days():
    config = preset("week").with_(users=10)
    world, _ = build(config)
    days = (world.items["dies"] - world.born) / 86_400_000
    assert 2.0 < days.mean() < 4.0
    for at in (config.start_ms, config.end_ms - 1):
        live = (world.born <= at) & (world.items["dies"] > at)
        assert abs(live.sum() - config.live_items) <= config.topics * config.subtopics


def test_losses_are_clearly_apart(demo):
    assert demo["loss_oracle"] < 0.97 * demo["loss_with_history"]
    assert demo["loss_with_history"] < 0.97 * demo["loss_without_history"]
    assert demo["loss_without_history"] < demo["loss_mean"]
    assert demo["loss_with_history"] < demo["loss_history_21600s_late"]


def test_sessions_ten_seconds_are_far_better_than_a_minute(sessions):
    whole = sessions["loss_without_history"] - sessions["loss_with_history"]
    at = {s: (sessions["loss_without_history"] - sessions[f"loss_history_{s}s_late"]) / whole for s in (10, 60)}
    assert whole > 0.05 * sessions["loss_without_history"]
    assert 0.3 < at[10] < 0.9
    assert at[60] < 0.6 * at[10]
