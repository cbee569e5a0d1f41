"""Chaos tests kill and freeze brokers, so each gets a Kafka of its own making (Java 17+ and Maven). Without Java they
are left out by name; in CI never."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from topics.brokers import JavaKafka
from topics.brokers.jars import java_available
from topics.kafka import KafkaSettings

_LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT_OUT] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [i for i in items if i.get_closest_marker("java") is not None and "tests/chaos" in i.path.as_posix()]
    if not marked or java_available():
        return
    if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        raise pytest.UsageError(f"CI leaves no chaos test out, but {len(marked)} need Java 17+ and Maven")
    config.stash[_LEFT_OUT] = [item.nodeid for item in marked]
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if item not in marked]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash[_LEFT_OUT]:
        terminalreporter.write_line(f"left out, {len(left_out)} chaos tests need Java 17+ and Maven:")
        for nodeid in left_out:
            terminalreporter.write_line(f"  {nodeid}")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaKafka]:
    """A started Kafka of the module's own."""
    node = JavaKafka(tmp_path_factory.mktemp("kafka"), tied=True)
    node.start(300)
    try:
        yield node
    finally:
        node.kill()


@pytest.fixture
def kafka(broker: JavaKafka) -> KafkaSettings:
    """Settings with a prefix of the test's own."""
    return KafkaSettings(bootstrap=broker.bootstrap, prefix=f"c{uuid.uuid4().hex[:8]}.")
