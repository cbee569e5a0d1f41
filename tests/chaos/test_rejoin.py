"""A role whose identity at the broker is taken from it, and topics that change their shape under a role."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions
from pipeline import Roles

from models.runtime import open_runtime
from streams.audit import audit, read_all
from streams.loop import Loop
from streams.roles import VerifierStep
from streams.settings import load
from topics import admin
from topics import kafka as clients
from topics.errors import IdentityLost
from topics.kafka import KafkaSettings, group_name

pytestmark = [pytest.mark.broker, pytest.mark.java]
BUNDLE = load(environment={}).model.bundle
TS = 1_767_225_600_000
HOST = re.sub(r"[^a-zA-Z0-9._-]", "-", socket.gethostname())


def feed(kafka: KafkaSettings, kind: str, first: int, n: int) -> None:
    topic, field = {"impression": ("impressions", "ads"), "candidates": ("candidates", "items")}[kind]
    out = clients.producer(kafka)
    for k in range(first, first + n):
        event = {"type": kind, "id": f"{kind[0]}{k}", "user": f"u{k % 30}", "ts": TS + k, field: ["i1", "i2"]}
        out.produce(kafka.topic(topic), json.dumps(event).encode(), f"u{k % 30}".encode())
    assert out.flush(60) == 0


def test_a_taken_producer_and_a_taken_place_in_the_group_are_taken_back(kafka: KafkaSettings, tmp_path: Path) -> None:
    """The same process goes on, each event is answered once."""
    admin.create(kafka)
    with Roles(kafka, tmp_path / "roles", BUNDLE) as roles:
        roles.start("ranker")
        roles.start("verifier")
        roles.wait_ready()
        pids = {name: p.pid for name, p in roles.processes.items()}
        feed(kafka, "impression", 0, 60)
        feed(kafka, "candidates", 0, 60)
        roles.wait_ranked(60)
        roles.wait_records("precompute", 60)

        clients.producer(kafka, f"{kafka.prefix}ranker-{HOST}-0").init_transactions(30)
        feed(kafka, "impression", 60, 60)
        roles.wait_ranked(120)

        intruder = clients.consumer(
            kafka, group_name(kafka, "verifier"), group_instance_id=f"verifier-{HOST}-0",
            partition_assignment_strategy="cooperative-sticky", session_timeout_ms=6000,
        )  # fmt: skip
        intruder.subscribe([kafka.topic("candidates")])
        deadline = time.monotonic() + 60
        while "joining anew" not in (log := (tmp_path / "roles" / "verifier.log").read_text()):
            intruder.poll(0.2)
            assert time.monotonic() < deadline, log
        intruder.close()
        feed(kafka, "candidates", 60, 60)
        roles.wait_records("precompute", 120)

        assert {name: p.pid for name, p in roles.processes.items()} == pids
        assert (tmp_path / "roles" / "ranker.log").read_text().count("joining anew") == 1
        assert set(roles.stop().values()) == {0}, roles.logs()
    found = audit(kafka)
    assert found.clean, found
    assert found.ranked == 120
    assert len(read_all(kafka, "precompute")) == 120


def test_nothing_is_committed_under_a_name_that_did_not_get_the_partitions(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    """As when a frozen process joins again and is not told that another had its partitions meanwhile."""
    admin.create(kafka)
    settings = load(
        sets=[f"kafka.bootstrap={kafka.bootstrap}", f"kafka.prefix={kafka.prefix}", f"store.dir={tmp_path}",
              "loop.session_timeout_ms=6000"], environment={},
    )  # fmt: skip
    loop = Loop(VerifierStep(open_runtime(BUNDLE), settings), settings, "one")
    raised: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    feed(kafka, "candidates", 0, 60)
    deadline = time.monotonic() + 60
    while len(read_all(kafka, "precompute")) < 60:
        assert not raised
        assert time.monotonic() < deadline
        time.sleep(0.2)
    loop._member = "a former name"
    loop._metadata_fresh.clear()
    while not loop._stale:
        assert not raised
        assert time.monotonic() < deadline
        time.sleep(0.05)
    feed(kafka, "candidates", 60, 60)
    thread.join(60)
    assert not thread.is_alive()
    (error,) = raised
    assert isinstance(error, IdentityLost)
    assert "read from what is committed" in str(error)
    assert len(read_all(kafka, "precompute")) == 60

    with Roles(kafka, tmp_path / "roles", BUNDLE) as roles:
        roles.start("verifier")
        roles.wait_records("precompute", 120)
    assert len(read_all(kafka, "precompute")) == 120


def test_partitions_added_under_a_role_stop_it_with_the_remedy(kafka: KafkaSettings, tmp_path: Path) -> None:
    admin.create(kafka)
    sets = ("kafka.properties.topic.metadata.refresh.interval.ms=1000",)
    with Roles(kafka, tmp_path / "roles", BUNDLE, sets) as roles:
        roles.start("verifier")
        roles.wait_ready()
        broker = AdminClient({"bootstrap.servers": kafka.bootstrap})
        for done in broker.create_partitions([NewPartitions(kafka.topic("candidates"), 6)]).values():
            done.result(30)
        assert roles.processes["verifier"].wait(60) == 1, roles.logs()
        said = (tmp_path / "roles" / "verifier.log").read_text()
    assert "was given partitions beyond the 4 of kafka.partitions while verifier ran" in said
    assert "`solaris topics create --alter`" in said
    assert "Traceback" not in said
