"""`solaris replay` and `solaris tail` as processes: Ctrl-C, kill -9, --resume, exit codes, a pipe that closes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_replay import assert_exactly_once, make_log, read_back

from topics import admin
from topics.kafka import KafkaSettings
from topics.replay_records import TOPICS

pytestmark = pytest.mark.broker

COMMAND = [sys.executable, "-m", "streams.cli"]


@pytest.fixture
def settings(kafka: KafkaSettings, tmp_path: Path) -> Path:
    """A solaris.toml for the test's broker and prefix."""
    lines = ["[kafka]", f"bootstrap = {json.dumps(kafka.bootstrap)}", f'prefix = "{kafka.prefix}"']
    lines += ["[kafka.properties]", *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in kafka.properties.items())]
    path = tmp_path / "solaris.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def start(*arguments: str | Path, **options: int) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SOLARIS_", "KAFKA_"))}
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=options.get("stdout", subprocess.PIPE), stderr=subprocess.PIPE, text=True, env=clean,
    )  # fmt: skip


def arrived(kafka: KafkaSettings) -> int:
    return sum(map(len, read_back(kafka).values()))


def wait_for_some(kafka: KafkaSettings, child: subprocess.Popen[str], more_than: int) -> None:
    deadline = time.monotonic() + 240
    while arrived(kafka) <= more_than:
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_ctrl_c_and_kill_9_and_resume_bring_every_event_once(
    kafka: KafkaSettings, settings: Path, tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    make_log(path, requests=1_000)
    command = ["replay", path, "--config", settings, "--json"]

    admin.create(kafka, TOPICS)
    child = start(*command, "--speed", "50")  # 20 s
    wait_for_some(kafka, child, 100)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 130, err
    first = json.loads(out)
    assert not first["complete"]
    assert first["events"] == first["acknowledged"] == arrived(kafka)

    child = start(*command, "--speed", "50", "--resume")
    wait_for_some(kafka, child, first["acknowledged"] + 50)
    child.kill()
    child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL

    child = start(*command, "--resume")
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    last = json.loads(out)
    assert last["complete"]
    assert last["resumed_events"] > first["acknowledged"]
    assert last["resumed_events"] + last["acknowledged"] == 50 + 3 * 1_000
    assert_exactly_once(kafka, path.read_bytes().splitlines())


def test_the_summary_says_how_to_go_on(kafka: KafkaSettings, settings: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    make_log(path, requests=200)
    admin.create(kafka, TOPICS)
    child = start("replay", path, "--config", settings, "--speed", "1")
    wait_for_some(kafka, child, 50)
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=300)
    assert child.returncode == 130
    assert "interrupted; --resume goes on here" in out


def test_tail_ends_quietly_when_its_reader_has_gone(kafka: KafkaSettings, settings: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    make_log(path, requests=2_000)
    child = start("replay", path, "--config", settings)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    # the second one has nothing more to write when its reader goes
    for more in (["--from", "beginning"], ["--from", "recent", "--json"]):
        child = start("tail", "impressions", "--config", settings, *more)
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline()
        child.stdout.close()
        assert child.wait(300) == 0  # though it follows: there is nobody to follow for
        assert child.stderr.read() == ""
        child.stderr.close()
