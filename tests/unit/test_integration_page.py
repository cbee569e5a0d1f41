"""The snippets of docs/integration.md: they are Python, the Kafka client takes their settings, and they keep the rules.

`tests/broker/test_integration_page_live.py` runs them against a broker and a ranker."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer

PAGE = (Path(__file__).parents[2] / "docs" / "integration.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.S)
JAVA = [
    dict(line.split("=", 1) for line in block.splitlines())
    for block in re.findall(r"```properties\n(.*?)```", PAGE, re.S)
]
CLIENTS = {"PRODUCER": Producer, "CONSUMER": Consumer}


def configurations() -> dict[str, dict[str, Any]]:
    found = {}
    for block in PYTHON:
        for node in ast.parse(block).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in CLIENTS:
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def test_the_snippets_are_python() -> None:
    assert len(PYTHON) == 2
    for block in PYTHON:
        compile(block, "integration.md", "exec")


@pytest.mark.parametrize("name", CLIENTS)
def test_the_client_takes_the_settings(name: str) -> None:
    conf = {**configurations()[name], "bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    CLIENTS[name](conf)
    with pytest.raises(KafkaException):
        CLIENTS[name]({**conf, "no.such.setting": 1})


def test_producers_put_users_where_java_does_and_write_once() -> None:
    ours, java = configurations()["PRODUCER"], JAVA[0]
    assert ours["partitioner"] == "murmur2_random"
    assert "partitioner.class" not in java
    assert ours["enable.idempotence"] is True
    assert java["enable.idempotence"] == "true"
    assert java["acks"] == "all"


def test_readers_of_answers_read_what_is_committed() -> None:
    assert configurations()["CONSUMER"]["isolation.level"] == JAVA[1]["isolation.level"] == "read_committed"
