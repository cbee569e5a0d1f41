"""Every consumer group of the roles is one whose lag is shown, and the contracts name it as a reader of its topic."""

from __future__ import annotations

from streams.counter_steps import ClickedLane, ShownLane
from streams.roles import PairLane, RankerStep, StateLane, VerifierStep
from topics.admin import ROLES
from topics.contracts import BY_NAME

STEPS = (VerifierStep, StateLane, PairLane, RankerStep, ShownLane, ClickedLane)


def test_every_lane_s_lag_is_shown() -> None:
    assert {s.role for s in STEPS} | {"monitor"} == set(ROLES)
    for step in STEPS:
        assert step.role in BY_NAME[step.input_topic].reads.split(", "), f"{step.role} reads {step.input_topic}"
