"""Few records wait a moment after a commit, in proportion to what commits take; after a pause they do not."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, cast

import pytest

from streams.settings import Loop, Settings
from streams.step import PlainStep
from streams.transactions import Committer


class Idle(PlainStep):
    role = "idle"
    input_topic = "impressions"


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("streams.transactions.time.monotonic", lambda: now[0])
    return now


def committer(guarantee: Literal["exactly_once", "at_least_once"]) -> Committer:
    settings = Settings(loop=Loop(guarantee=guarantee))
    return Committer(cast(Any, Idle()), settings, cast(Any, None), "0", Counter(), lambda: False)


def test_rest_is_twice_what_a_commit_takes_within_a_bound(now_s: list[float]) -> None:
    few = committer("at_least_once")
    assert few.rest_s == 0.0  # nothing was committed yet
    few._committed_s, few._took_s = 100.0, 0.01
    assert few.rest_s == pytest.approx(0.02)
    now_s[0] = 100.015
    assert few.rest_s == pytest.approx(0.005)
    now_s[0] = 100.5
    assert few.rest_s == 0.0
    few._committed_s, few._took_s = 100.5, 3.0  # a broker that hardly answers does not stop the role
    assert few.rest_s == pytest.approx(0.04)


def test_quick_transactions_ask_for_none(now_s: list[float]) -> None:
    few = committer("exactly_once")
    few._committed_s, few._took_s = 100.0, 0.01
    assert few.rest_s == 0.0
    few._took_s = 0.02
    assert few.rest_s == pytest.approx(0.016)
