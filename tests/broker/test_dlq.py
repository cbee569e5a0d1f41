"""Dead letters on a real broker: written, listed, put back exactly once, parked when hopeless."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from topics import admin, consume_cli, dlq, dlq_retry, tail
from topics import kafka as clients
from topics.dlq_retry import RetryCounts, retry
from topics.events import Rejected
from topics.kafka import KafkaSettings

pytestmark = pytest.mark.broker


@pytest.fixture
def ready(kafka: KafkaSettings) -> KafkaSettings:
    admin.create(kafka)
    return kafka


def reject(
    kafka: KafkaSettings, values: list[bytes], reason: str = "not_json", topic: str = "impressions", attempt: int = 0
) -> None:
    out = clients.producer(kafka)
    for n, value in enumerate(values):
        key, value_kept, headers = dlq.dead_letter(
            kafka.topic(topic), 1, n, b"u%d" % n, value, Rejected(reason, "why"), "ranker", attempt,
            received=[("trace", b"t")],
        )  # fmt: skip
        out.produce(kafka.topic("dlq"), key=key, value=value_kept, headers=headers)
    assert out.flush(120) == 0


def read(kafka: KafkaSettings, name: str) -> list[tail.Record]:
    return [r for r in tail.records(kafka, name, "beginning", follow=False) if r is not None]


def test_retry_puts_back_what_was_received_once(ready: KafkaSettings) -> None:
    reject(ready, [b"a\xff", b"", b"c"])
    assert retry(ready) == RetryCounts(retried=3)
    back = sorted(read(ready, "impressions"), key=lambda r: r.key or b"")
    assert [(r.key, r.value or b"") for r in back] == [(b"u0", b"a\xff"), (b"u1", b""), (b"u2", b"c")]
    assert [r.headers for r in back] == [(("trace", b"t"), (dlq.ATTEMPT, b"1"))] * 3
    assert [dlq.attempt_of(r.headers) for r in back] == [1, 1, 1]
    assert retry(ready) == RetryCounts()
    assert len(read(ready, "impressions")) == 3


def test_attempts_are_bounded_then_parked(ready: KafkaSettings) -> None:
    attempt = 0
    for expected in (1, 2, 3):
        reject(ready, [b"x"], attempt=attempt)
        assert retry(ready, max_attempts=3).retried == 1
        attempt = max(dlq.attempt_of(r.headers) for r in read(ready, "impressions"))
        assert attempt == expected
    reject(ready, [b"x"], attempt=attempt)
    assert retry(ready, max_attempts=3) == RetryCounts(parked=1)
    assert len(read(ready, "impressions")) == 3
    parked = tail.dead_letter_of(read(ready, "dlq")[-1])
    assert parked.parked == "retried 3 times, at most 3"
    assert (parked.reason, parked.value) == ("not_json", b"x")
    assert retry(ready, max_attempts=3) == RetryCounts(already_parked=1)
    assert retry(ready, max_attempts=3) == RetryCounts()


def test_what_is_not_chosen_stays_for_later(ready: KafkaSettings) -> None:
    reject(ready, [b"a", b"b"], "not_json")
    reject(ready, [b"c"], "empty_user")
    assert retry(ready, lambda letter: letter.reason == "empty_user") == RetryCounts(retried=1, kept=2)
    assert [r.value for r in read(ready, "impressions")] == [b"c"]
    assert retry(ready) == RetryCounts(retried=2)
    assert sorted(r.value or b"" for r in read(ready, "impressions")) == [b"a", b"b", b"c"]


def test_letters_that_must_not_go_back_are_parked(ready: KafkaSettings) -> None:
    reject(ready, [b"x" * (dlq.MAX_VALUE_BYTES + 1)])
    reject(ready, [b"y"], topic="dlq")
    out = clients.producer(ready)
    out.produce(ready.topic("dlq"), b"by hand")
    assert out.flush(120) == 0
    assert retry(ready) == RetryCounts(parked=3)
    whys = sorted(tail.dead_letter_of(r).parked for r in read(ready, "dlq") if tail.dead_letter_of(r).parked)
    assert whys == [
        "no source topic in the headers",
        f"only the beginning of {dlq.MAX_VALUE_BYTES + 1} bytes was kept",
        "the source topic is not one of ours",
    ]


def test_a_run_that_dies_before_its_commit_is_repeated_whole(
    ready: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reject(ready, [b"%d" % n for n in range(60)])
    real, calls = dlq_retry._step, 0

    def dies_in_the_second_step(*args: Any) -> RetryCounts:
        nonlocal calls
        calls += 1
        counts = real(*args)
        if calls == 2:
            raise KeyboardInterrupt
        return counts

    monkeypatch.setattr(dlq_retry, "_step", dies_in_the_second_step)
    with pytest.raises(KeyboardInterrupt):
        retry(ready, batch=20)
    monkeypatch.undo()
    assert len(read(ready, "impressions")) < 60
    retry(ready, batch=20)
    assert sorted(r.value or b"" for r in read(ready, "impressions")) == sorted(b"%d" % n for n in range(60))


def test_a_run_killed_in_its_transaction_is_fenced_and_repeated(ready: KafkaSettings, tmp_path: Path) -> None:
    reject(ready, [b"%d" % n for n in range(60)])
    code = f"""
import os, signal
from topics import dlq_retry
from topics.kafka import KafkaSettings
real, calls = dlq_retry._step, []
def step(out, *args):
    counts = real(out, *args)
    calls.append(1)
    if len(calls) == 2:
        out.flush(120)
        os.kill(os.getpid(), signal.SIGKILL)
    return counts
dlq_retry._step = step
dlq_retry.retry(KafkaSettings({ready.bootstrap!r}, {ready.prefix!r}, properties={dict(ready.properties)!r}), batch=20)
"""
    root = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    retry(ready, batch=20)
    assert sorted(r.value or b"" for r in read(ready, "impressions")) == sorted(b"%d" % n for n in range(60))


def test_command_line(ready: KafkaSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    where = ["--set", f"kafka.bootstrap={ready.bootstrap}", "--set", f"kafka.prefix={ready.prefix}"]
    where += [a for k, v in ready.properties.items() for a in ("--set", f"kafka.properties.{k}={v}")]

    def run(*args: str) -> str:
        out = CliRunner().invoke(consume_cli.dlq_app, [*args, *where])
        assert out.exit_code == 0, out.output
        return out.output

    assert run("list").strip() == "0 rejected"
    reject(ready, [b"\x00\x01bad", b"b"])
    reject(ready, [b"c"], "empty_user", "feedback")
    listed = run("list")
    assert "3 rejected: not_json 2, empty_user 1" in listed
    assert f"not_json from {ready.topic('impressions')}/1@0 by ranker: why" in listed
    assert "1 rejected" in run("list", "--topic", "feedback")
    assert "2 rejected: not_json 2 (1 shown)" in run("list", "--reason", "not_json", "--limit", "1")
    lines = [json.loads(line) for line in run("list", "--json").splitlines()]
    assert [x["headers"][dlq.REASON] for x in lines] == ["not_json", "not_json", "empty_user"]
    shown = run("show", "0@0")
    for part in ("not_json", "ranker", "partition 1 offset 0", "00 01 62 61 64", "..bad"):
        assert part in shown
    out = CliRunner().invoke(consume_cli.dlq_app, ["show", "0@0", "--raw", *where])
    assert out.stdout_bytes == b"\x00\x01bad"
    assert CliRunner().invoke(consume_cli.dlq_app, ["show", "0@99", *where]).exit_code == 1
    assert "1 put back, 0 parked, 2 not chosen and kept" in run("retry", "--topic", "feedback")
    assert "2 rejected: not_json 2" in run("list")
    assert "5 rejected: not_json 4, empty_user 1" in run("list", "--all")
    assert json.loads(run("retry", "--json")) == {"retried": 2, "parked": 0, "already_parked": 0, "kept": 0}
    assert run("list").strip() == "0 rejected"
