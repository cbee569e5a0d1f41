"""Topics against a real broker: create, check, alter, describe, and refusals that name both sides."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewPartitions, NewTopic
from typer.testing import CliRunner

from topics import admin, contracts, topics_cli
from topics import kafka as clients
from topics.errors import BrokerError, ContractError
from topics.kafka import KafkaSettings, group_name

pytestmark = pytest.mark.broker
ALL = [c.name for c in contracts.CONTRACTS]


def reports_settings(kafka: KafkaSettings) -> bool:
    return not any("does not report" in note for note in admin.inspect(kafka).notes)


def test_create_makes_what_is_missing_and_only_that(kafka: KafkaSettings) -> None:
    needed = [c.name for c in contracts.CONTRACTS if not c.optional]
    assert [(m.topic, m.what) for m in admin.check(kafka)] == [(kafka.topic(n), "missing") for n in needed]
    assert [m.topic for m in admin.check(kafka, ["counts"])] == [kafka.topic("counts")], "asked for by name"
    first = admin.create(kafka, ["candidates", "dlq"])
    assert first == [kafka.topic("candidates"), kafka.topic("dlq")]
    rest = admin.create(kafka)
    assert sorted(first + rest) == sorted(kafka.topic(n) for n in ALL)
    assert admin.create(kafka) == []
    assert admin.check(kafka) == []
    admin.require(kafka)
    states = {s.contract.name: s for s in admin.describe(kafka)}
    assert {n: len(s.partitions) for n, s in states.items()} == {
        c.name: kafka.partitions if c.aligned else 1 for c in contracts.CONTRACTS
    }


def test_partition_counts_that_do_not_line_up_are_refused_with_both_named(kafka: KafkaSettings) -> None:
    odd = dataclasses.replace(kafka, partitions=kafka.partitions + 3)
    admin.create(odd, ["candidates"])
    admin.create(kafka)
    found = [m for m in admin.check(kafka) if m.what == "partitions"]
    assert [m.topic for m in found] == [kafka.topic("candidates")]
    with pytest.raises(ContractError) as e:
        admin.require(kafka)
    for part in (kafka.topic("candidates"), str(odd.partitions), str(kafka.partitions), "create --alter"):
        assert part in str(e.value)
    admin.require(kafka, ["items", "impressions"])  # what a role does not use does not stop it


def test_a_setting_that_is_not_what_the_topics_have_is_refused_with_the_remedy(kafka: KafkaSettings) -> None:
    n = kafka.partitions
    admin.create(kafka)
    less, more = (dataclasses.replace(kafka, partitions=k) for k in (n - 1, n + 1))
    with pytest.raises(ContractError) as e:
        admin.require(less)
    assert f"topics have {n} partitions, kafka.partitions is {n - 1}: set kafka.partitions = {n}" in str(e.value)
    assert "--alter" not in str(e.value), "partitions are only added"
    with pytest.raises(ContractError, match=rf"set kafka.partitions = {n}, or stop the roles.*--alter"):
        admin.require(more, ["impressions"])
    admin.require(less, ["impressions"], any_partitions=True)
    admin.require(less, ["items", "stats"])
    admin.alter(less)
    assert admin.check(kafka) == [], "nothing was changed by a setting that is too small"
    admin.alter(more)
    assert admin.check(more) == []


def test_copies_that_are_not_there_are_said_and_never_made_unwritable(kafka: KafkaSettings) -> None:
    admin.create(kafka)
    three = dataclasses.replace(kafka, replication=3)
    assert admin.config_of(three, contracts.BY_NAME["dlq"])["min.insync.replicas"] == "2"
    assert "min.insync.replicas" not in admin.config_of(kafka, contracts.BY_NAME["dlq"])
    report = admin.inspect(three, ["dlq"])
    assert report.mismatches == []
    copies = f"{kafka.topic('dlq')}: copies 1, kafka.replication = 3"
    assert [n for n in report.notes if copies in n]
    assert admin.alter(three, ["dlq"]) == []


def test_settings_that_differ_are_named_and_changed_only_on_demand(kafka: KafkaSettings) -> None:
    client = clients.admin(kafka)
    wrong = {"retention.ms": "1000", "message.timestamp.type": "CreateTime", "max.message.bytes": "1000"}
    futures = client.create_topics([NewTopic(kafka.topic("precompute"), kafka.partitions, 1, config=wrong)])
    futures[kafka.topic("precompute")].result()
    late = {"cleanup.policy": "delete", "message.timestamp.type": "LogAppendTime", "max.message.bytes": str(8 << 20)}
    futures = client.create_topics([NewTopic(kafka.topic("items"), 1, 1, config=late)])
    futures[kafka.topic("items")].result()
    admin.create(kafka)
    found = {(m.topic, m.what): m.found for m in admin.check(kafka)}
    assert found == {(kafka.topic("precompute"), what): value for what, value in wrong.items()} | {
        (kafka.topic("items"), "cleanup.policy"): "delete"
    }
    with pytest.raises(ContractError, match="CreateTime, the contract says LogAppendTime"):
        admin.require(kafka)
    assert {(m.topic, m.what) for m in admin.check(kafka)} == set(found), "looking changes nothing"
    changed = admin.alter(kafka)
    assert len(changed) == 4
    deadline = time.monotonic() + 240
    while admin.check(kafka) and time.monotonic() < deadline:
        time.sleep(0.05)  # brokers hear of it after the controller has answered
    assert admin.check(kafka) == []
    assert admin.alter(kafka) == []


def test_keeping_more_than_declared_is_no_mismatch(kafka: KafkaSettings) -> None:
    longer = {"retention.ms": "-1", "message.timestamp.type": "LogAppendTime", "max.message.bytes": str(16 << 20)}
    client = clients.admin(kafka)  # a name of its own: the futures die with their client
    futures = client.create_topics([NewTopic(kafka.topic("dlq"), 1, 1, config=longer)])
    futures[kafka.topic("dlq")].result()
    assert admin.check(kafka, ["dlq"]) == []


def test_alter_adds_partitions_until_all_line_up(kafka: KafkaSettings) -> None:
    admin.create(kafka)
    more = kafka.partitions + 2
    topic = kafka.topic("impressions")
    client = clients.admin(kafka)
    client.create_partitions([NewPartitions(topic, more)])[topic].result()
    deadline = time.monotonic() + 240
    while not admin.check(kafka) and time.monotonic() < deadline:
        time.sleep(0.05)  # brokers hear of it after the controller has answered
    assert [m.topic for m in admin.check(kafka)] == [topic]
    admin.alter(kafka)
    assert admin.check(dataclasses.replace(kafka, partitions=more)) == []
    assert [m.what for m in admin.check(kafka)] == ["kafka.partitions"], "the setting is to follow"
    counts = {s.contract.name: len(s.partitions) for s in admin.describe(kafka) if s.contract.aligned}
    assert set(counts.values()) == {more}


def test_retention_setting_is_what_the_topic_gets(kafka: KafkaSettings) -> None:
    own = dataclasses.replace(kafka, retention_ms={"stats": 3_600_000})
    admin.create(own)
    assert admin.check(own) == []
    if reports_settings(own):
        (state,) = admin.describe(own, ["stats"])
        assert state.config["retention.ms"] == "3600000"
        assert [m.what for m in admin.check(kafka)] == ["retention.ms"]


def test_describe_shows_offsets_and_lag_by_role(kafka: KafkaSettings) -> None:
    admin.create(kafka)
    topic = kafka.topic("impressions")
    out = clients.producer(kafka)
    for p in range(2):
        for _ in range(10):
            out.produce(topic, b"x", partition=p)
    assert out.flush(120) == 0
    ranker = clients.consumer(kafka, group_name(kafka, "ranker"))
    ranker.commit(offsets=[TopicPartition(topic, 0, 4)], asynchronous=False)
    ranker.close()
    (state,) = admin.describe(kafka, ["impressions"])
    assert [p.lag for p in state.partitions[:3]] == [{"ranker": 6}, {"ranker": 10}, {"ranker": 0}]
    counter = clients.consumer(kafka, group_name(kafka, "counter"))
    counter.commit(offsets=[TopicPartition(topic, 0, 9)], asynchronous=False)
    counter.close()
    (state,) = admin.describe(kafka, ["impressions"])
    assert state.partitions[0].lag == {"ranker": 6, "counter": 1}, "shown once there is one"
    assert [(p.low, p.high) for p in state.partitions[:2]] == [(0, 10), (0, 10)]
    (state,) = admin.describe(kafka, ["precompute"])
    assert state.partitions[0].lag == {"embedder": 0, "embedder-state": 0}, "one for each lane"


def test_describe_of_a_missing_topic_says_so(kafka: KafkaSettings) -> None:
    (state,) = admin.describe(kafka, ["stats"])
    assert not state.exists
    assert state.partitions == []
    assert kafka.topic("stats") not in clients.admin(kafka).list_topics(timeout=300).topics, "looking creates nothing"


def test_unknown_names_are_refused(kafka: KafkaSettings) -> None:
    with pytest.raises(ContractError, match="no contract for topic 'candidate'"):
        admin.create(kafka, ["candidate"])


def test_an_address_without_a_broker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    monkeypatch.setattr(admin, "TIMEOUT_S", 2.0)
    with pytest.raises(BrokerError, match=rf"127\.0\.0\.1:{port}.*refused"):
        admin.check(KafkaSettings(bootstrap=f"127.0.0.1:{port}"))


def test_command_line(kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    where = ["--set", f"kafka.bootstrap={kafka.bootstrap}", "--set", f"kafka.prefix={kafka.prefix}"]
    where += [a for k, v in kafka.properties.items() for a in ("--set", f"kafka.properties.{k}={v}")]

    def run(*args: str, code: int = 0) -> str:
        out = CliRunner().invoke(topics_cli.app, [*args, *where])
        assert out.exit_code == code, out.output
        return out.output

    assert f"mismatch {kafka.topic('dlq')}: missing" in run("check", code=1)
    assert json.loads(run("create", "--json"))["created"] == [kafka.topic(n) for n in ALL]
    assert "nothing to create" in run("create")
    assert "match their contracts" in run("check")
    assert json.loads(run("check", "--json"))["mismatches"] == []
    assert kafka.topic("ranked-ads") in run("list")
    assert [t["name"] for t in json.loads(run("list", "--json"))] == ALL
    described = json.loads(run("describe", "impressions", "--json"))
    assert described[0]["partitions"][0]["lag"] == {"ranker": 0}
    assert "ranker lag 0" in run("describe", "impressions")
