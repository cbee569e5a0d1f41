"""The health pages: what they say, and that they say it to readers only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from streams.health import HealthServer, prometheus

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
    assert b'solaris_ads_total{role="ranker"} 7' in body
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
