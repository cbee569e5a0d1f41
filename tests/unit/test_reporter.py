"""The thread that sends a process's counters outlives whatever goes wrong in it."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from streams.loop import Loop
from streams.reporter import Reporter
from topics.kafka import KafkaSettings


def test_a_status_that_fails_is_counted_and_logged_once_and_the_next_one_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = 0
    well = threading.Event()

    def status() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked <= 3:
            raise RuntimeError("dictionary changed size during iteration")
        if asked == 4:
            return {"counters": object()}  # nothing that JSON has
        well.set()
        return {"counters": {}}

    nowhere = KafkaSettings(bootstrap="127.0.0.1:1", properties={"socket.timeout.ms": 10})
    reporter = Reporter(nowhere, "ranker", status, every_s=0.001)
    with caplog.at_level(logging.WARNING, "streams.reporter"):
        reporter.start()
        try:
            assert well.wait(120)
        finally:
            reporter.stop()
    assert reporter.dropped == 4
    said = [r.message for r in caplog.records if r.name == "streams.reporter"]
    assert len(said) == 1
    assert said[0].startswith("stats record dropped, 1 so far: RuntimeError")


def test_totals_are_taken_again_when_a_counter_appeared_meanwhile() -> None:
    tries = 0

    def totals() -> dict[str, int]:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise RuntimeError("dictionary changed size during iteration")
        return {"ads": 7}

    loop = Loop.__new__(Loop)
    loop.step, loop.counters = SimpleNamespace(totals=totals), Counter(steps=3)
    assert loop.totals() == {"ads": 7, "loop_steps": 3}

    def broken() -> dict[str, int]:
        raise RuntimeError("something else")

    loop.step = SimpleNamespace(totals=broken)
    with pytest.raises(RuntimeError, match="something else"):
        loop.totals()
