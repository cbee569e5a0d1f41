"""`solaris tail` on a real broker: where it starts, what it shows, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from topics import admin, events, packed, tail
from topics import kafka as clients
from topics.errors import ContractError, SettingsError
from topics.events import Impression
from topics.ids import hash_id
from topics.kafka import KafkaSettings

pytestmark = pytest.mark.broker


def send(kafka: KafkaSettings, name: str, records: list[tuple[str, bytes | None]], transactional: bool = False) -> None:
    out = clients.producer(kafka, transactional_id=kafka.prefix + "t" if transactional else None)
    if transactional:
        out.init_transactions(20)
        out.begin_transaction()
    for key, value in records:
        out.produce(kafka.topic(name), key=key.encode(), value=value)
    assert out.flush(120) == 0
    if transactional:
        out.abort_transaction(20)


@pytest.fixture
def filled(kafka: KafkaSettings) -> KafkaSettings:
    admin.create(kafka)
    send(
        kafka,
        "impressions",
        [(f"u{i % 7}", events.encode(Impression(f"i{i}", f"u{i % 7}", 1_573_700_000_000 + i, ["N1", 7])))
         for i in range(140)],
    )  # fmt: skip
    return kafka


def read(kafka: KafkaSettings, *args: object, **more: object) -> list[tail.Record]:
    return [r for r in tail.records(kafka, *args, **more) if r is not None]  # type: ignore[arg-type]


def test_beginning_shows_all_once_in_order_of_each_partition(filled: KafkaSettings) -> None:
    out = read(filled, "impressions", "beginning", follow=False)
    assert sorted(tail.value_of(r)["id"] for r in out) == sorted(f"i{i}" for i in range(140))
    for p in range(filled.partitions):
        offsets = [r.offset for r in out if r.partition == p]
        assert offsets == sorted(offsets)


def test_user_and_limit(filled: KafkaSettings) -> None:
    out = read(filled, "impressions", "beginning", user="u3", follow=False)
    assert len(out) == 20
    assert {r.key for r in out} == {b"u3"}
    assert len(read(filled, "impressions", "beginning", limit=5)) == 5  # ends although it would follow


def test_recent_and_full_name(filled: KafkaSettings) -> None:
    out = read(filled, filled.topic("impressions"), "recent", follow=False)
    assert 0 < len(out) <= tail.RECENT * filled.partitions
    assert all(r.topic == "impressions" for r in out)


def test_latest_waits_for_what_comes(filled: KafkaSettings) -> None:
    stream: Iterator[tail.Record | None] = tail.records(filled, "impressions", "latest")
    assert next(stream) is None
    send(filled, "impressions", [("u1", b"{}")])
    record = next(r for r in stream if r is not None)
    assert record.value == b"{}"


def test_a_time_is_compared_with_the_brokers(filled: KafkaSettings) -> None:
    time.sleep(0.05)
    before = read(filled, "impressions", "beginning", follow=False)
    newest = max(r.timestamp_ms for r in before)
    time.sleep(0.05)
    send(filled, "impressions", [("u1", b"{}"), ("u2", b"{}")])
    assert len(read(filled, "impressions", str(newest + 1), follow=False)) == 2
    assert len(read(filled, "impressions", "-1h", follow=False)) == 142
    assert read(filled, "impressions", "2099-01-01", follow=False) == []
    with pytest.raises(SettingsError, match="--from"):
        read(filled, "impressions", "yesterday")


def test_aborted_records_are_not_shown(filled: KafkaSettings) -> None:
    send(filled, "feedback", [("u1", b"{}")], transactional=True)
    assert read(filled, "feedback", "beginning", follow=False) == []


def test_a_topic_that_is_not_there_is_not_created(kafka: KafkaSettings) -> None:
    with pytest.raises(ContractError, match="topics create"):
        read(kafka, "impressions")
    assert kafka.topic("impressions") not in clients.admin(kafka).list_topics(timeout=300).topics


def test_looking_commits_nothing(filled: KafkaSettings) -> None:
    read(filled, "impressions", "beginning", follow=False)
    (state,) = admin.describe(filled, ["impressions"])
    assert sum(p.lag["ranker"] for p in state.partitions) == 140


def test_packed_and_unreadable_values(filled: KafkaSettings) -> None:
    chunk = packed.EmbeddingChunk(
        hash_id("u1"), 5, 1, 2, np.array([3], np.uint64), np.array([0], np.uint32), np.array([[0.5]], np.float16),
        None, np.array([1], np.float16), np.array([], np.float16), "c1",
    )  # fmt: skip
    send(filled, "embeddings", [("u1", packed.encode_embedding(chunk)), ("u1", b"\xff\xfe"), ("u1", None)])
    good, bad, none = read(filled, "embeddings", "beginning", follow=False)
    assert tail.to_json(good)["value"]["vectors"] == [[0.5]]
    assert tail.to_json(bad)["value"] == {"base64": "//4="}
    assert "truncated" in tail.to_json(bad)["error"]
    assert tail.to_json(none)["value"] is None
    assert "1 pairs of 1 f16" in tail.to_text(good, 10)
    assert "unreadable" in tail.to_text(bad, 10)


@pytest.fixture
def command(filled: KafkaSettings, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(*args: str) -> subprocess.Popen[str]:
        where = ["-s", f"kafka.bootstrap={filled.bootstrap}", "-s", f"kafka.prefix={filled.prefix}"]
        where += [a for k, v in filled.properties.items() for a in ("-s", f"kafka.properties.{k}={v}")]
        code = "import typer; from topics.consume_cli import tail; a = typer.Typer(); a.command()(tail); a()"
        root = str(Path(__file__).parents[2])
        return subprocess.Popen(
            [sys.executable, "-c", code, *args, *where],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


def test_json_lines_in_a_pipe(command: Callable[..., subprocess.Popen[str]]) -> None:
    out, err = command("impressions", "--from", "beginning", "--no-follow", "--json").communicate(timeout=300)
    assert err == ""
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) == 140
    assert lines[0]["value"]["type"] == "impression"


def test_a_closed_pipe_ends_it_quietly(filled: KafkaSettings, command: Callable[..., subprocess.Popen[str]]) -> None:
    process = command("impressions", "--from", "beginning")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        send(filled, "impressions", [("u1", b"{}")])
        time.sleep(0.1)
    assert process.poll() == 0
    assert process.stderr.read() == ""
    process.stderr.close()
