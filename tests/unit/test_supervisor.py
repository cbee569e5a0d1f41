"""Supervision of real processes: restart with back-off, stop in order, nobody left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from streams import orphan, supervisor
from streams.supervisor import Child, Supervisor

STEADY = "import signal,sys,time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntime.sleep(60)"


def child(role: str, code: str) -> Child:
    return Child(role, 0, [sys.executable, "-c", code])


def started(*children: Child, deadline_s: float = 1.0) -> Supervisor:
    s = Supervisor({c.role: 1 for c in children}, shutdown_deadline_s=deadline_s)
    for c in children:
        s.children.append(c)
        s._spawn(c)
    return s


def until(check, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_what_ends_is_started_again_with_growing_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACK_OFF_S", (0.05, 0.3))
    s = started(child("ranker", "raise SystemExit(1)"))
    c = s.children[0]
    gaps = []
    last = time.monotonic()
    for n in (1, 2, 3):

        def again(n: int = n) -> bool:
            s.watch()
            return c.restarts >= n

        until(again)
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    s.stop()
    assert gaps[2] >= 0.3
    assert c.fast_exits >= 3


def test_stop_goes_in_the_order_of_the_roles(tmp_path: Path) -> None:
    log = tmp_path / "order"

    def code(name: str) -> str:
        return (
            f"import signal,sys,time\ndef end(*_):\n open({str(log)!r},'a').write({name!r})\n sys.exit(0)\n"
            f"signal.signal(signal.SIGTERM, end)\nopen({str(tmp_path / name)!r},'w').close()\ntime.sleep(60)"
        )

    s = started(child("v", code("v")), child("e", code("e")), child("r", code("r")), deadline_s=20)
    until(lambda: all((tmp_path / n).exists() for n in "ver"))
    s.stop()
    assert log.read_text() == "ver"
    assert all(c.process is not None and c.process.returncode == 0 for c in s.children)


def test_a_process_that_ignores_the_signal_is_killed_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "Deadline", lambda s: _Over())
    ready = tmp_path / "ready"
    deaf = (
        "import signal,time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(ready)!r},'w').close()\ntime.sleep(60)"
    )
    s = started(child("ranker", deaf))
    until(ready.exists)
    s.stop()
    process = s.children[0].process
    assert process is not None
    assert process.returncode == -9


class _Over:
    def left(self, at_most: float = 0.0) -> float:
        return 0.0


def test_the_whole_of_run_ends_on_a_stop() -> None:
    s = Supervisor({})
    s.stopping.set()
    s.run()
    assert s.children == []


def test_children_stop_in_order_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """... and so do not run beside those of the next one."""
    ready, ended = tmp_path / "ready", tmp_path / "ended"
    code = (
        "import signal,sys,time\nfrom streams.orphan import stop_with_supervisor\n"
        f"def end(*_):\n open({str(ended)!r},'w').close()\n sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, end)\nstop_with_supervisor()\nopen({str(ready)!r},'w').close()\ntime.sleep(60)"
    )
    supervisor = (
        "import sys,time\nfrom streams.supervisor import Child, Supervisor\n"
        f"s = Supervisor({{'r': 1}})\ns._spawn(Child('r', 0, [sys.executable, '-c', {code!r}]))\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", supervisor])
    until(ready.exists)
    assert not ended.exists()
    process.kill()
    process.wait()
    until(ended.exists)


def test_a_process_without_a_supervisor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(orphan.SUPERVISOR, raising=False)
    orphan.stop_with_supervisor()
    assert not [t for t in threading.enumerate() if t.name == "supervisor-watch"]


def test_processes_have_consecutive_ports_and_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor.sys, "executable", "/bin/true")
    monkeypatch.setattr(supervisor, "BACK_OFF_S", (0.0,))
    s = Supervisor({"verifier": 1, "ranker": 2, "monitor": 1}, ["--set", "http.port=9000"], http_port=9000)
    assert list(s.ports) == [9000, 9001, 9002]
    s.start()
    commands = {c.name: list(c.command) for c in s.children}
    assert {name: c[-1] for name, c in commands.items()} == {
        "verifier-0": "http.port=9000", "ranker-0": "http.port=9001", "ranker-1": "http.port=9002",
        "monitor-0": "http.port=9000",
    }  # fmt: skip
    assert len(commands["monitor-0"]) == len(commands["ranker-1"]) - 2, "the monitor has http.monitor_port"

    def all_again() -> bool:
        s.watch()
        return all(c.restarts for c in s.children)

    until(all_again)
    assert {c.name: list(c.command) for c in s.children} == commands
    s.stop()


def test_without_a_port_none_is_given() -> None:
    assert list(Supervisor({"verifier": 2}).ports) == []
