"""Which events lie too far ahead, when hosts' clocks are wrong."""

from __future__ import annotations

import json

from streams.decoding import keyed_events
from streams.step import Record
from topics.events import decode_impression

NOW = 1_767_225_600_000
DAY = 86_400_000


def refused(ahead_ms: int, host_ms: int, broker_ms: int = -1) -> bool:
    event = {"type": "impression", "id": "i", "user": "u", "ts": NOW + ahead_ms, "ads": ["a"]}
    record = Record("impressions", 0, 0, b"u", json.dumps(event).encode(), host_ms, (), broker_ms)
    events, _, dead = keyed_events([record], decode_impression, DAY)
    assert len(events) + len(dead) == 1
    assert all(d.rejected.reason == "far_future" for d in dead)
    return bool(dead)


def test_the_hosts_clock_decides_where_the_topic_has_the_producers_time() -> None:
    assert not refused(DAY, NOW)
    assert refused(DAY + 1, NOW)


def test_a_host_whose_clock_was_set_back_refuses_nothing_for_it() -> None:
    assert not refused(0, host_ms=0, broker_ms=NOW)
    assert not refused(DAY, host_ms=NOW - 400 * DAY, broker_ms=NOW)
    assert refused(DAY + 1, host_ms=NOW - 400 * DAY, broker_ms=NOW)


def test_a_broker_whose_clock_was_set_back_neither() -> None:
    assert not refused(DAY, host_ms=NOW, broker_ms=0)
    assert refused(DAY + 1, host_ms=NOW, broker_ms=0)
