"""`solaris up`, `status`, `down` without Docker, as a person types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from topics.brokers.local import LocalStack
from topics.brokers.ports import free_port

pytestmark = [pytest.mark.broker, pytest.mark.java]


def solaris(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streams.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=600)


def alive(process: psutil.Process) -> bool:
    """A zombie has ended: whether init has collected it yet is not our matter."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_up_status_down_wipe(tmp_path: Path) -> None:
    port = free_port()
    try:
        first = solaris("up", "--java", "--port", str(port), cwd=tmp_path)
        assert first.returncode == 0, first.stderr
        assert f"Kafka at 127.0.0.1:{port}" in first.stdout
        assert f"solaris tail ranked-ads --set kafka.bootstrap=127.0.0.1:{port}" in first.stdout
        stack = LocalStack(tmp_path / ".run")
        kafka, roles = stack.kafka.pid, stack._roles.pid
        assert kafka is not None
        assert roles is not None
        started = [psutil.Process(kafka), psutil.Process(roles), *psutil.Process(roles).children()]

        status = solaris("status", "--java", "--json", cwd=tmp_path)
        assert status.returncode == 0
        rows = {row["name"]: row for row in json.loads(status.stdout)}
        assert {name: row["running"] for name, row in rows.items()} == {"kafka": True, "roles": True}
        assert rows["roles"]["detail"].startswith("verifier, embedder, ranker, monitor; process")

        second = solaris("up", "--java", cwd=tmp_path)
        assert second.returncode == 0, second.stderr
        assert "already up" in second.stderr
        assert (stack.kafka.pid, stack._roles.pid) == (kafka, roles)

        down = solaris("down", "--deadline-s", "150", cwd=tmp_path)
        assert down.returncode == 0, down.stderr
        assert "roles, kafka" in down.stderr
        assert not any(alive(process) for process in started)
        assert (tmp_path / ".run" / "kafka" / "log").is_dir(), "data is kept"
        assert solaris("status", "--java", cwd=tmp_path).returncode == 1

        again = solaris("up", "--java", "--broker-only", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert f"127.0.0.1:{port}" in again.stdout, "the port of the last time"
        assert "topics created" not in again.stderr, "the topics are still there"
    finally:
        wiped = solaris("down", "--wipe", cwd=tmp_path)
    assert wiped.returncode == 0, wiped.stderr
    assert list((tmp_path / ".run").iterdir()) == []
