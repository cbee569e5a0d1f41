"""Replay while the broker dies and comes back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from test_replay import assert_exactly_once, make_log

from topics import admin
from topics.brokers import JavaKafka
from topics.kafka import KafkaSettings
from topics.readers import EventLog
from topics.replay import Replay, ReplayState
from topics.replay_records import TOPICS

pytestmark = [pytest.mark.broker, pytest.mark.java]


def test_a_broker_killed_in_mid_stream_costs_time_and_nothing_else(java_broker: JavaKafka, tmp_path: Path) -> None:
    kafka = KafkaSettings(bootstrap=java_broker.bootstrap, prefix="restart.")
    admin.create(kafka, TOPICS)
    path = tmp_path / "log.jsonl"
    make_log(path, requests=2_000)
    going = threading.Event()
    done: list[ReplayState | BaseException] = []

    def run() -> None:
        def told(state: ReplayState) -> None:
            if state.acknowledged > 300:
                going.set()

        try:
            # 2,000 s of event time in at least 5 s
            done.append(Replay(EventLog(path), kafka, 400.0, on_progress=told).run())
        except BaseException as e:
            done.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert going.wait(300)
    java_broker.kill()
    java_broker.restart()
    thread.join(120)
    assert not thread.is_alive()
    state = done[0]
    assert isinstance(state, ReplayState), state
    assert state.complete
    assert state.acknowledged == 50 + 3 * 2_000
    assert_exactly_once(kafka, path.read_bytes().splitlines())
