"""What a broker may do to roles that are at work: its topics go, its records go, its leaders move."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from feeder import Feeder
from pipeline import Roles

from streams.audit import audit, read_all
from streams.settings import load
from topics import admin
from topics import kafka as clients
from topics.brokers import JavaCluster
from topics.events import Impression
from topics.kafka import KafkaSettings
from topics.readers import EventLog, open_log
from topics.replay import replay
from topics.simulator import preset, write

pytestmark = [pytest.mark.broker, pytest.mark.java]
BUNDLE = load(environment={}).model.bundle


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "tiny.jsonl"
    write(replace(preset("tiny"), users=60), path)
    return path


def impressions(log: Path) -> int:
    return sum(isinstance(e, Impression) for e in open_log(log))


def wait_end(roles: Roles, name: str, timeout_s: float = 240.0) -> int:
    code = roles.processes[name].wait(timeout_s)
    roles.processes.pop(name)
    return code


@pytest.mark.parametrize("topic", ["impressions", "embeddings", "ranked-ads"])
def test_a_topic_deleted_under_a_role_stops_it_and_is_named(
    kafka: KafkaSettings, tmp_path: Path, log: Path, topic: str
) -> None:
    admin.create(kafka)
    with Roles(kafka, tmp_path / "roles", BUNDLE) as roles:
        roles.start("ranker")
        roles.wait_ready()
        name = kafka.topic(topic)
        client = clients.admin(kafka)
        client.delete_topics([name])[name].result(10)
        if topic == "ranked-ads":  # an answer that has nowhere to go
            replay(EventLog(log), kafka, "max", topics=("impressions",))
        assert wait_end(roles, "ranker", 240) == 1
        last = (tmp_path / "roles" / "ranker.log").read_text().splitlines()[-1]
    assert last.startswith("solaris: ")
    assert name in last


def test_a_changelog_cut_off_under_a_frozen_ranker_is_rebuilt(kafka: KafkaSettings, tmp_path: Path, log: Path) -> None:
    admin.create(kafka)
    n = impressions(log)
    with Roles(kafka, tmp_path / "roles", BUNDLE) as roles:
        roles.start_all()
        roles.wait_ready()
        roles.processes["ranker"].send_signal(signal.SIGSTOP)
        replay(EventLog(log), kafka, "max", topics=("items", "candidates"))
        deadline = time.monotonic() + 240
        while len(read_all(kafka, "embeddings")) < 100:
            assert time.monotonic() < deadline
            time.sleep(0.3)
        roles.settle()
        cut = [TopicPartition(kafka.topic("embeddings"), p, 10) for p in range(kafka.partitions)]
        client = clients.admin(kafka)
        for done in client.delete_records(cut).values():
            done.result(10)
        roles.processes["ranker"].send_signal(signal.SIGCONT)
        code = wait_end(roles, "ranker", 240)
        said = (tmp_path / "roles" / "ranker.log").read_text()
        assert code == 1
        assert "records were deleted before this store had read them" in said.splitlines()[-1]
        roles.start("ranker")
        replay(EventLog(log), kafka, "max", topics=("impressions",))
        roles.wait_ranked(n)
    found = audit(kafka)
    assert (found.lost, found.duplicated, found.invented, found.wrong_ads) == (0, 0, 0, 0), found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[JavaCluster]:
    nodes = JavaCluster(tmp_path / "cluster", heap_mb=256, tied=True)
    nodes.start(300)
    try:
        yield nodes
    finally:
        nodes.kill()


def test_leaders_move_when_a_node_of_three_dies(cluster: JavaCluster, tmp_path: Path, log: Path) -> None:
    kafka = KafkaSettings(bootstrap=cluster.bootstrap, prefix="three.", replication=3)
    admin.create(kafka)
    n = impressions(log)
    with Roles(kafka, tmp_path / "roles", BUNDLE) as roles:
        roles.start_all()
        roles.wait_ready()
        span_s = 12 * 3600
        feeder = Feeder(log, kafka)
        feeder.start(span_s / 300)
        roles.wait_ranked(3)
        meta = clients.admin(kafka).list_topics(kafka.topic("impressions"), timeout=10)
        leader = meta.topics[kafka.topic("impressions")].partitions[0].leader
        assert feeder.going, "in mid-stream"
        cluster.node(leader).kill()
        time.sleep(3)
        assert feeder.finish(300)
        assert feeder.error is None
        deadline = time.monotonic() + 240
        while len(read_all(kafka, "ranked-ads")) < n:
            for role, process in list(roles.processes.items()):
                if process.poll() is not None:  # as a supervisor would
                    roles.start(role)
            assert time.monotonic() < deadline, roles.logs()
            time.sleep(0.5)
        roles.stop()
    found = audit(kafka)
    assert found.clean, found
    assert found.ranked == n
