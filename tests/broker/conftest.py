"""Which broker the tests of this folder use.

`KAFKA_BOOTSTRAP` if set; else testcontainers where a Docker engine answers; else Apache Kafka on Java; else the
embedded broker, and then tests marked `java` are left out by name. With CI=true nothing is left out.
Properties for somebody's own cluster: `KAFKA_PROPERTIES`, a JSON object of librdkafka settings.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from topics.brokers import JavaKafka, wait_ready
from topics.brokers.jars import java_available
from topics.errors import BrokerError
from topics.kafka import KafkaSettings

KINDS = ("own cluster", "docker", "java", "embedded")


@dataclass(frozen=True)
class Chosen:
    kind: str
    settings: KafkaSettings


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


def docker_answers() -> bool:
    if shutil.which("docker") is None and not os.environ.get("DOCKER_HOST"):
        return False
    try:
        import docker

        client = docker.from_env(timeout=3)
        try:
            return bool(client.ping())
        finally:
            client.close()
    except Exception:  # no package, no socket, no permission: each means that no engine answers
        return False


def choose() -> str:
    """One of KINDS, decided once a session; cheap enough for collection time."""
    if os.environ.get("KAFKA_BOOTSTRAP"):
        return "own cluster"
    if docker_answers():
        return "docker"
    return "java" if java_available() else "embedded"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_KIND] = ""
    config.stash[_LEFT_OUT] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("java") is not None]
    if not marked or java_available():
        return
    # Fixtures such as `java_broker` start Java themselves, so a cluster at KAFKA_BOOTSTRAP does not replace it.
    if in_ci():
        raise pytest.UsageError(f"CI leaves no broker test out, but {len(marked)} need Java 17+ and Maven")
    config.stash[_LEFT_OUT] = [item.nodeid for item in marked]
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if item not in marked]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if kind := config.stash[_KIND]:
        terminalreporter.write_line(f"broker tests ran on: {kind}")
    if left_out := config.stash[_LEFT_OUT]:
        terminalreporter.write_line(
            f"left out, {len(left_out)} tests need Apache Kafka (Java 17+ and Maven, or Docker):"
        )
        for nodeid in left_out:
            terminalreporter.write_line(f"  {nodeid}")


_KIND = pytest.StashKey[str]()
_LEFT_OUT = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def session_kafka(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    """The session's broker, ready. Use `kafka` in tests: it adds a prefix of the test's own."""
    kind = choose()
    pytestconfig.stash[_KIND] = kind
    if kind == "own cluster":
        properties = json.loads(os.environ.get("KAFKA_PROPERTIES", "{}"))
        settings = KafkaSettings(bootstrap=os.environ["KAFKA_BOOTSTRAP"], properties=properties)
        wait_ready(settings, 30)
        yield settings
    elif kind == "docker":
        from testcontainers.kafka import KafkaContainer

        with KafkaContainer("apache/kafka:4.3.1").with_kraft() as container:
            settings = KafkaSettings(bootstrap=container.get_bootstrap_server())
            wait_ready(settings, 120, lambda: b"\n".join(container.get_logs()).decode("utf-8", "replace")[-4000:])
            yield settings
    elif kind == "java":
        with JavaKafka(tmp_path_factory.mktemp("kafka"), tied=True) as broker:
            yield KafkaSettings(bootstrap=broker.bootstrap)
    else:
        if in_ci():
            raise BrokerError("CI runs broker tests on a real Kafka: install Java 17+ and Maven, or Docker")
        from topics.brokers.embedded import EmbeddedBroker

        with EmbeddedBroker(tmp_path_factory.mktemp("embedded"), tied=True) as embedded:
            yield KafkaSettings(bootstrap=embedded.bootstrap)


@pytest.fixture
def kafka(session_kafka: KafkaSettings) -> KafkaSettings:
    """Settings with a prefix that no other test uses: topics, groups and transactional ids never meet."""
    return KafkaSettings(
        bootstrap=session_kafka.bootstrap,
        prefix=f"t{uuid.uuid4().hex[:8]}.",
        partitions=session_kafka.partitions,
        replication=session_kafka.replication,
        properties=session_kafka.properties,
    )


@pytest.fixture
def java_broker(tmp_path: Path) -> Iterator[JavaKafka]:
    """A started Kafka of the test's own, to kill, stop and restart. Mark such tests `java`."""
    broker = JavaKafka(tmp_path / "kafka", tied=True)
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()
