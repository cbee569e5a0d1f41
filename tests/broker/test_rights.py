"""Roles that may do on the bus what docs/security.md says, and nothing else, against Kafka's own authorizer."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType
from pipeline import Roles
from test_brokers_security import make_authority, make_server_pem

from streams.audit import read_all
from streams.settings import load
from topics import admin
from topics import kafka as clients
from topics.brokers import JavaKafka, Secured
from topics.brokers.ports import free_port
from topics.kafka import KafkaSettings
from topics.readers import EventLog
from topics.replay import replay
from topics.rights import BY_PRINCIPAL, Rights, topics_of
from topics.simulator import preset, write

pytestmark = [pytest.mark.broker, pytest.mark.java]
STARTED = ("verifier", "embedder", "ranker", "counter", "monitor")
LITERAL, PREFIXED = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
Op, Res = AclOperation, ResourceType


def password(principal: str) -> str:
    return f"secret-of-{principal}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rights")


@pytest.fixture(scope="module")
def broker(folder: Path) -> Iterator[JavaKafka]:
    make_authority(folder, "ca")
    users = {name: password(name) for name in STARTED}
    secured = Secured(make_server_pem(folder, "ca"), users, mechanism="PLAIN")
    # Whoever comes by the inner listener, without a name, is the cluster's administrator.
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with JavaKafka(folder / "kafka", secured=secured, properties=properties, tied=True) as one:
        yield one


def grants(kafka: KafkaSettings, r: Rights) -> list[AclBinding]:
    def one(kind: ResourceType, name: str, how: ResourcePatternType, *what: AclOperation) -> list[AclBinding]:
        full, who = kafka.prefix + name, f"User:{r.principal}"
        return [AclBinding(kind, full, how, who, "*", o, AclPermissionType.ALLOW) for o in what]

    wanted = [
        *((Res.TOPIC, name, LITERAL, Op.READ) for name in r.read),
        *((Res.TOPIC, name, LITERAL, Op.WRITE) for name in r.write),
        *((Res.TOPIC, name, LITERAL, Op.DESCRIBE) for name in r.describe),
        *((Res.GROUP, name, PREFIXED, Op.READ) for name in r.groups),
        *((Res.GROUP, name, LITERAL, Op.DESCRIBE) for name in r.describe_groups),
        *((Res.TRANSACTIONAL_ID, name, PREFIXED, Op.WRITE, Op.DESCRIBE) for name in r.transactional_ids),
        *((Res.TOPIC, name, PREFIXED, Op.CREATE, Op.READ, Op.WRITE) for name in r.own_topics),
    ]
    return [binding for kind, name, how, *what in wanted for binding in one(kind, name, how, *what)]


def login(broker: JavaKafka, folder: Path, name: str) -> list[str]:
    properties = {
        "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": name,
        "ssl.ca.location": str(folder / "ca.pem"),
    }  # fmt: skip
    return [f"kafka.bootstrap={broker.bootstrap}", *(f"kafka.properties.{k}={v}" for k, v in properties.items())]


def secret(name: str) -> dict[str, str]:
    return {"SOLARIS_KAFKA_PROPERTIES__SASL_PASSWORD": password(name)}


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def test_the_documented_rights_are_enough(broker: JavaKafka, folder: Path, tmp_path: Path) -> None:
    kafka = KafkaSettings(bootstrap=broker.inner_bootstrap, prefix="rights.", partitions=2)
    admin.create(kafka)
    client = clients.admin(kafka)
    futures = client.create_acls([b for name in STARTED for b in grants(kafka, BY_PRINCIPAL[name])])
    for future in futures.values():
        future.result()
    as_verifier = load(sets=login(broker, folder, "verifier"), environment=secret("verifier")).kafka
    assert set(admin.partition_counts(as_verifier)) == {kafka.topic(t) for t in topics_of("verifier")}, "no others"
    log = tmp_path / "log.jsonl"
    write(preset("tiny"), log)
    page = free_port()
    with Roles(kafka, tmp_path / "roles", load().model.bundle, ["verifier.top_k=5"]) as roles:
        for name in STARTED:
            sets = [*login(broker, folder, name), f"http.monitor_port={page}"]
            roles.start(name, sets=sets, env=secret(name))
        replay(EventLog(log), kafka, "max", topics=("items", "candidates", "impressions"))
        roles.wait_ranked(1)
        roles.wait_records("embeddings", 1)
        roles.wait_records("item-counts", 1)
        deadline = time.monotonic() + 240
        while not answers(f"http://127.0.0.1:{page}/ready"):
            assert time.monotonic() < deadline, roles.logs()
            roles._check_alive()
            time.sleep(0.3)
        roles.wait_records("stats", 12)  # some looks at the embedder's group, and one at the lag of all
        assert set(roles.stop().values()) == {0}, roles.logs()
    last = {s["pid"]: s["stopping"] for s in (msgspec.json.decode(r.value or b"") for r in read_all(kafka, "stats"))}
    assert list(last.values()) == [True] * 4, "the monitor hears that they were told to stop"
    # DescribeConfigs is not among the rights: that settings were not compared is said, and harmless.
    lines = [line for line in roles.logs().splitlines() if "settings not compared" not in line]
    assert not [line for line in lines if "authoriz" in line.lower() or "not known" in line]
