"""The health pages: what they say, and that they say it to readers only."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from streams.health import HealthServer, prometheus, require_free
from topics.errors import SettingsError

STATUS: dict[str, Any] = {"live": True, "ready": False, "role": "ranker", "counters": {"ads": 7, "source_direct": 3}}


@pytest.fixture
def server() -> Iterator[HealthServer]:
    s = HealthServer("127.0.0.1", 0, lambda: STATUS)
    s.start()
    yield s
    s.stop()


def ask(server: HealthServer, method: str, path: str) -> tuple[int, bytes, str | None]:
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        c.request(method, path)
        r = c.getresponse()
        return r.status, r.read(), r.getheader("Server")
    finally:
        c.close()


def test_live_ready_status_metrics(server: HealthServer) -> None:
    assert ask(server, "GET", "/live")[:2] == (200, b"live\n")
    assert ask(server, "GET", "/ready")[:2] == (503, b"not ready\n")
    assert json.loads(ask(server, "GET", "/status")[1]) == STATUS
    code, body, _ = ask(server, "GET", "/metrics")
    assert code == 200
    assert b'# TYPE solaris_ads_total counter\nsolaris_ads_total{role="ranker"} 7\n' in body
    assert ask(server, "HEAD", "/metrics")[:2] == (200, b"")


@pytest.mark.parametrize(
    "path", ["/", "/../../etc/passwd", "/live/../../etc/passwd", "/%2e%2e/etc/passwd", "/status?x=1"]
)
def test_nothing_else_is_served(server: HealthServer, path: str) -> None:
    code, body, name = ask(server, "GET", path)
    assert code == 404
    assert b"root:" not in body
    assert name is not None
    assert "Python" not in name


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(server: HealthServer, method: str) -> None:
    assert ask(server, method, "/live")[0] == 501


def test_a_status_that_fails_is_an_answer_too() -> None:
    def status() -> dict[str, Any]:
        raise RuntimeError("no")

    s = HealthServer("127.0.0.1", 0, status)
    s.start()
    try:
        assert [ask(s, "GET", path)[:2] for path in ("/live", "/metrics")] == [(500, b"status not known\n")] * 2
    finally:
        s.stop()


def test_metric_names_are_prometheus_names() -> None:
    text = prometheus({"live": True, "ready": True, "role": "verifier", "counters": {"rejected_far-future x": 1}})
    assert 'solaris_rejected_far_future_x_total{role="verifier"} 1' in text


def test_what_goes_up_and_down_is_no_counter() -> None:
    held = {"item_counts_bytes": 5, "item_counts_records": 9}
    text = prometheus({"live": True, "ready": True, "role": "ranker", "counters": held})
    assert '# TYPE solaris_item_counts_bytes gauge\nsolaris_item_counts_bytes{role="ranker"} 5\n' in text
    assert "# TYPE solaris_item_counts_records_total counter\n" in text
    assert "# TYPE solaris_ready gauge\n" in text
    samples = [x.partition("{")[0] for x in text.splitlines() if not x.startswith("#")]
    assert all(f"# TYPE {name} " in text for name in samples)


def test_a_port_in_use_is_a_setting_that_is_wrong(server: HealthServer) -> None:
    for begin in (
        lambda: HealthServer("127.0.0.1", server.port, lambda: STATUS),
        lambda: require_free("127.0.0.1", [server.port]),
    ):
        with pytest.raises(SettingsError, match=rf"^setting http\.port = {server.port}: is in use$"):
            begin()
    with pytest.raises(SettingsError, match=r"http\.host = '::1': cannot be listened on"):
        HealthServer("::1", 0, lambda: STATUS)


def test_a_port_is_free_again_once_the_server_has_stopped() -> None:
    s = HealthServer("127.0.0.1", 0, lambda: STATUS)
    s.start()
    ask(s, "GET", "/live")
    s.stop()
    require_free("127.0.0.1", [s.port])


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["http.port={taken}"], "http.port = {taken}: is in use"),
        (["http.port=65534"], "http.port = 65534: the 3 processes need as many ports"),
        (["http.port=6064"], "http.monitor_port = 6066: is one of the processes', 6064 to 6066"),
    ],
)
def test_run_looks_at_its_ports_before_it_starts_anything(server: HealthServer, sets: list[str], said: str) -> None:
    flags = [a for s in sets for a in ("--set", s.format(taken=server.port))]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SOLARIS_", "KAFKA_"))}
    command = [sys.executable, "-m", "streams.cli", "run", "--monitor", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, check=False, timeout=300)
    assert done.returncode == 1
    assert said.format(taken=server.port) in done.stderr
    assert "Traceback" not in done.stderr
