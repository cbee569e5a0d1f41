"""A call of the Kafka client that does not come back ends the process with exit code 3; the one that a supervisor
starts in its place does what was left, once.

The client's own fault is used for it: librdkafka 2.16 remembers the coordinator of a group for `metadata.max.age.ms`,
and when that broker was restarted meanwhile, `send_offsets_to_transaction` waits for ever (librdkafka #5456). The roles
let it remember for five seconds only; here it is made to remember for as long as it does by default.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from pipeline import Roles

from streams.audit import read_all
from streams.settings import load
from topics import admin
from topics import kafka as clients
from topics.brokers import JavaKafka
from topics.kafka import KafkaSettings
from topics.packed import decode_precompute

pytestmark = [pytest.mark.broker, pytest.mark.java]
BUNDLE = load(environment={}).model.bundle
TS = 1_767_225_600_000
FORGETFUL = (
    "kafka.properties.metadata.max.age.ms=900000",
    "kafka.properties.topic.metadata.refresh.interval.ms=300000",
)


def offer(kafka: KafkaSettings, first: int, count: int) -> None:
    out = clients.producer(kafka)
    for n in range(first, first + count):
        event = {"type": "candidates", "id": f"c{n}", "user": f"u{n}", "ts": TS + n, "items": ["a", "b"]}
        out.produce(kafka.topic("candidates"), json.dumps(event).encode(), f"u{n}".encode())
    assert out.flush(240) == 0


def test_a_client_call_that_does_not_come_back_ends_the_process_and_nothing_is_lost(
    broker: JavaKafka, kafka: KafkaSettings, tmp_path: Path
) -> None:
    admin.create(kafka)
    with Roles(kafka, tmp_path / "roles", BUNDLE, FORGETFUL) as roles:
        roles.start("verifier")
        for first in (0, 10):  # a transaction of each identity, so that both remember the coordinator
            offer(kafka, first, 10)
            roles.wait_records("precompute", first + 10)
        broker.restart(300)
        offer(kafka, 20, 20)
        process = roles.processes.pop("verifier")
        try:
            code = process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"still there\n{roles.logs()}") from None
        said = (tmp_path / "roles" / "verifier.log").read_text()
        assert code == 3, said
        assert "does not come back from a call" in said
        roles.start("verifier")
        roles.wait_records("precompute", 40)
        assert roles.stop() == {"verifier": 0}, roles.logs()
    done = [decode_precompute(r.value).event_id for r in read_all(kafka, "precompute")]
    assert sorted(done) == sorted(f"c{n}" for n in range(40))
