"""Background processes are known by pid and start time, and nothing else is ever signalled."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from topics.brokers.ports import free_port, is_free
from topics.brokers.process import BackgroundProcess, tail
from topics.errors import BrokerError

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print(child.pid, flush=True); time.sleep(60)",
]


def wait_for_output(process: BackgroundProcess) -> str:
    for _ in range(200):
        if text := process.output_tail():
            return text
        time.sleep(0.02)
    raise AssertionError("no output")


def test_spawn_find_stop(tmp_path: Path) -> None:
    process = BackgroundProcess("sleeper", tmp_path)
    assert process.find() is None
    pid = process.spawn(SLEEP)
    wait_for_output(process)
    assert BackgroundProcess("sleeper", tmp_path).pid == pid, "another object finds it by its pid file"
    with pytest.raises(BrokerError, match=f"runs already as process {pid}"):
        process.spawn(SLEEP)
    assert process.stop(5.0)
    assert not psutil.pid_exists(pid)
    assert not process.pid_file.exists()
    assert process.stop(5.0), "stopping what is stopped is nothing"


def test_what_ignores_sigterm_is_killed_at_the_deadline_with_its_children(tmp_path: Path) -> None:
    process = BackgroundProcess("deaf", tmp_path)
    pid = process.spawn(DEAF)
    child = int(wait_for_output(process))
    began = time.monotonic()
    assert not process.stop(0.3)
    assert time.monotonic() - began < 40  # of the 60 it sleeps
    assert not psutil.pid_exists(pid)
    for _ in range(3_000):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.02)
    else:
        raise AssertionError("the child lives on")


def test_a_pid_that_is_another_process_now_is_left_alone(tmp_path: Path) -> None:
    process = BackgroundProcess("stale", tmp_path)
    started = psutil.Process(os.getpid()).create_time()
    process.pid_file.write_text(json.dumps({"pid": os.getpid(), "started": started - 1000, "command": "x"}))
    assert process.find() is None
    process.kill()  # would end the test run if it took this process for its own
    assert not process.pid_file.exists()


@pytest.mark.parametrize("content", ["", "12", "{}", '{"pid": "x", "started": 1}', '{"pid": 999999999, "started": 1}'])
def test_an_unreadable_or_stale_pid_file_means_not_running(tmp_path: Path, content: str) -> None:
    process = BackgroundProcess("odd", tmp_path)
    process.pid_file.write_text(content)
    assert process.find() is None
    assert process.stop(1.0)


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="cannot run /no/such/program"):
        BackgroundProcess("none", tmp_path).spawn(["/no/such/program"])


def test_tail_reads_the_end_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert tail(path, 2) == "line 99998\nline 99999"
    assert tail(tmp_path / "absent", 2) == ""


def test_free_ports_lie_below_the_ephemeral_range() -> None:
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(path.read_text().split()[0]) if path.exists() else 32_768
    port = free_port()
    assert is_free(port)
    assert port < max(lowest, 17_001)
