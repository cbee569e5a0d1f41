"""The monitor against a real broker: known records in, exact figures out; killed, restarted, refused."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from topics.admin import create
from topics.brokers import JavaKafka
from topics.events import Feedback, RankedAds, encode
from topics.kafka import KafkaSettings, producer

pytestmark = pytest.mark.broker
ROOT = Path(__file__).parents[2]


class Monitor:
    """`solaris monitor` as a process."""

    def __init__(self, kafka: KafkaSettings, folder: Path, sets: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.log = folder / f"monitor-{self.port}.log"
        arguments = [
            f"kafka.bootstrap={kafka.bootstrap}", f"kafka.prefix={kafka.prefix}", f"store.dir={folder / 'state'}",
            f"http.monitor_port={self.port}", "loop.session_timeout_ms=6000",
            *(f"kafka.{k}={v}" for k, v in kafka.properties.items()), *sets,
        ]  # fmt: skip
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streams.cli", "monitor", *(a for s in arguments for a in ("--set", s))],
                stdout=log, stderr=log, cwd=ROOT,
            )  # fmt: skip

    def get(self, path: str, method: str = "GET") -> tuple[int, str, dict[str, str]]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=300) as r:
                return r.status, r.read().decode(), dict(r.headers)
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode(), dict(e.headers)

    def figures(self, minutes: int = 60) -> dict[str, Any]:
        return json.loads(self.get(f"/api/figures?minutes={minutes}")[1])

    def wait(self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = 300.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        f: dict[str, Any] = {}
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"ended with code {self.process.returncode}\n{self.log.read_text()}"
            try:
                f = self.figures()
                if self.get("/ready")[0] == 200 and wanted(f):
                    return f
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.3)
        raise AssertionError(f"not within {timeout_s} s: {json.dumps(f)}\n{self.log.read_text()}")

    def stop(self, with_signal: int = signal.SIGTERM) -> int:
        self.process.send_signal(with_signal)
        try:
            return self.process.wait(300)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@pytest.fixture
def start(kafka: KafkaSettings, tmp_path: Path) -> Iterator[Callable[..., Monitor]]:
    create(kafka)
    made: list[Monitor] = []

    def begin(*sets: str) -> Monitor:
        made.append(Monitor(kafka, tmp_path, sets))
        return made[-1]

    yield begin
    for m in made:
        if m.process.poll() is None:
            m.process.kill()
            m.process.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def feed(kafka: KafkaSettings, tag: str, n: int, **properties: Any) -> None:
    """n impressions of two ads (pCTR 0.25 direct, 0.1 none); one in four has a click on the first."""
    p = producer(kafka, **properties)
    now = int(time.time() * 1000)
    for i in range(n):
        user = f"u{i % 40}"
        answer = RankedAds(
            id=f"{tag}{i}", user=user, ts=1000 + i, ads=["a", 17], positions=[0, 1], scores=[0.25, 0.1],
            sources=["direct", "none"], ages_ms=[60_000, None], vm="v1", fm="f1", state="live", received_ms=now,
            ranked_ms=now + 7,
        )  # fmt: skip
        feedback = Feedback(id=f"{tag}{i}", user=user, ts=2000 + i, clicked=["a"] if i % 4 == 0 else [])
        records = [("ranked-ads", encode(answer)), ("feedback", encode(feedback))]
        for topic, value in records if i % 2 else reversed(records):
            p.produce(kafka.topic(topic), value, user.encode())
    assert p.flush(120) == 0


def say(kafka: KafkaSettings, role: str, pid: int, **counters: int) -> None:
    p = producer(kafka)
    record = {"type": "stats", "ts": int(time.time() * 1000), "role": role, "instance": "host", "pid": pid,
              "live": True, "ready": True, "partitions": {role: [0, 1, 2, 3]}, "counters": counters}  # fmt: skip
    p.produce(kafka.topic("stats"), msgspec.json.encode(record), role.encode())
    assert p.flush(120) == 0


def expect(f: dict[str, Any], n: int) -> None:
    """Every figure of `feed(n)`, n a multiple of 4."""
    s, c = f["sampled"], f["calibration"]
    assert (s["impressions"], s["ads"], s["joined"], s["feedback"]) == (n, 2 * n, n, n)
    assert (s["duplicates"], s["undecodable"], s["feedback_repeated"], s["feedback_unmatched"]) == (0, 0, 0, 0)
    assert f["coverage"] == {"direct": 0.5, "none": 0.5, "topic": 0, "state": 0, "aggregate": 0, "similar": 0}
    assert (c["ads"], c["clicks"]) == (2 * n, n // 4)
    assert c["mean_pctr"] == pytest.approx(0.175)
    assert c["ratio"] == pytest.approx(1.4)
    direct = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    assert c["by_source"]["direct"]["log_loss"] == pytest.approx(direct)
    assert f["log_loss"]["solaris"] == pytest.approx((direct - math.log(0.9)) / 2)
    assert f["age_ms"]["p50"] == pytest.approx(60_000, rel=0.1)
    assert f["rank_latency_ms"]["p99"] == pytest.approx(7, rel=0.1)


def test_known_records_give_exact_figures(kafka: KafkaSettings, start: Callable[..., Monitor]) -> None:
    say(kafka, "verifier", 1, pairs_seen=0, pairs_accepted=0)
    say(kafka, "embedder", 2, embedder_pairs_embedded=0, embedder_pairs_saved=0)
    say(kafka, "ranker", 3, impressions=0, ads=0, source_direct=0)
    feed(kafka, "i", 400)
    say(kafka, "verifier", 1, pairs_seen=1000, pairs_accepted=300, refused_budget=700)
    say(kafka, "embedder", 2, embedder_pairs_embedded=200, embedder_pairs_saved=100)
    say(kafka, "ranker", 3, impressions=400, ads=800, source_direct=400)
    m = start()
    f = m.wait(lambda f: f["sampled"]["joined"] == 400 and f["pairs"]["seen"] == 1000 and bool(f["lag"]))
    expect(f, 400)
    assert f["pairs"] == {"seen": 1000, "accepted": 300, "embedded": 200, "saved": 100}
    assert f["verifier"] == {"acceptance": 0.3, "refused": {"budget": 700}}
    assert f["fm_calls_saved"] == {"by_verifier": 700, "by_freshness": 100, "share_of_seen": 0.8}
    assert f["hits_per_fm_call"] == 2.0
    assert f["lag"]["ranker"] == 0
    assert {r["role"] for r in json.loads(m.get("/api/roles")[1])} == {"verifier", "embedder", "ranker"}
    assert sum(p["impressions"] for p in json.loads(m.get("/api/series")[1])) == 400
    say(kafka, "verifier", 1, pairs_seen=1100, pairs_accepted=300)  # heard of just now
    m.wait(lambda f: f["pairs"]["seen"] == 1100)
    metrics = m.get("/metrics")[1]
    assert 'solaris_role_pairs_seen_total{role="verifier",instance="host",pid="1"} 1100' in metrics
    assert 'solaris_lag_records{role="ranker"} 0' in metrics
    feed(kafka, "j", 400)
    expect(m.wait(lambda f: f["sampled"]["joined"] == 800), 800)
    assert m.stop() == 0


def test_http_only_reads_and_serves_nothing_else(start: Callable[..., Monitor]) -> None:
    m = start()
    m.wait(lambda f: True)
    code, page, headers = m.get("/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "<title>Solaris monitor</title>" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert m.get("/live")[0] == 200
    for path in ("/table/blocks", "/tables", "/router", "/graph", "/stats", "/performance", "/favicon.ico", "/api",
                 "/api/", "//etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/page.html", "/page.html"):  # fmt: skip
        assert m.get(path)[0] == 404, path
    for query in ("0", "-1", "1.5", "61", "9" * 400, "", "a", "%D9%A1", "1&minutes=x%00"):
        assert m.get(f"/api/figures?minutes={query}")[0] == (200 if query.startswith("1&") else 400), query
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert m.get("/api/figures", method)[0] == 405, method
    code, body, headers = m.get("/api/figures", "HEAD")
    assert (code, body) == (200, "")
    assert m.stop() == 0


@pytest.mark.java  # the embedded broker keeps a killed process in its group for ever
def test_killed_again_and_again_the_figures_stay_exact(kafka: KafkaSettings, start: Callable[..., Monitor]) -> None:
    n = 0
    for k in range(3):
        m = start()
        feed(kafka, f"k{k}-", 2000)
        n += 2000
        m.wait(lambda f: f["sampled"]["impressions"] > 0)
        time.sleep(k * 2.0)  # before, around and after the rows are stored
        m.stop(signal.SIGKILL)
    feed(kafka, "last-", 400)
    m = start()
    expect(m.wait(lambda f, n=n: f["sampled"]["joined"] >= n + 400), n + 400)
    time.sleep(6)  # and once the rows have been stored and sums of later windows come in
    expect(m.figures(), n + 400)


def test_rows_older_than_what_is_read_again_come_from_the_table(
    kafka: KafkaSettings, start: Callable[..., Monitor]
) -> None:
    feed(kafka, "i", 400)
    m = start("monitor.feedback_window_ms=1000")
    m.wait(lambda f: f["sampled"]["joined"] == 400)
    time.sleep(24)  # more than the window of feedback and two blocks
    assert m.stop() == 0
    feed(kafka, "j", 400)
    m = start("monitor.feedback_window_ms=1000")
    expect(m.wait(lambda f: f["sampled"]["joined"] == 800), 800)


def test_what_a_transaction_aborted_is_not_counted(kafka: KafkaSettings, start: Callable[..., Monitor]) -> None:
    p = producer(kafka, transactional_id=f"{kafka.prefix}test")
    p.init_transactions(30)
    p.begin_transaction()
    p.produce(kafka.topic("ranked-ads"), b'{"type":"ranked_ads"', b"u")
    p.flush(120)
    p.abort_transaction(30)
    feed(kafka, "i", 40)
    expect(start().wait(lambda f: f["sampled"]["joined"] == 40), 40)


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_every_compression_is_read(kafka: KafkaSettings, start: Callable[..., Monitor], compression: str) -> None:
    feed(kafka, "i", 400, compression_type=compression)
    expect(start().wait(lambda f: f["sampled"]["joined"] == 400), 400)


def test_a_share_of_the_impressions(kafka: KafkaSettings, start: Callable[..., Monitor]) -> None:
    feed(kafka, "i", 4000)
    m = start("monitor.sample_share=0.25")
    feed(kafka, "end", 400)
    f = m.wait(lambda f: f["sampled"]["feedback"] > 1000)
    assert f["sample_share"] == 0.25
    assert 1000 < f["sampled"]["impressions"] < 1200
    assert f["coverage"]["direct"] == 0.5


def test_a_second_monitor_and_a_taken_port_are_refused(kafka: KafkaSettings, start: Callable[..., Monitor]) -> None:
    m = start()
    m.wait(lambda f: True)
    second = start()
    assert second.process.wait(300) == 1
    assert "another monitor is running" in second.log.read_text()
    assert m.get("/ready")[0] == 200
    m.stop()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        third = start(f"http.monitor_port={s.getsockname()[1]}")
        assert third.process.wait(300) == 1
    assert "http.monitor_port" in third.log.read_text()
    assert "Traceback" not in third.log.read_text().rsplit("solaris:", 1)[1]


@pytest.mark.java
def test_a_broker_that_goes_and_comes_back(java_broker: JavaKafka, tmp_path: Path) -> None:
    kafka = KafkaSettings(bootstrap=java_broker.bootstrap, prefix="r.")
    create(kafka)
    feed(kafka, "i", 400)
    m = Monitor(kafka, tmp_path)
    try:
        m.wait(lambda f: f["sampled"]["joined"] == 400)
        time.sleep(6)
        java_broker.kill()
        time.sleep(3)
        assert m.figures()["sampled"]["joined"] == 400, "the page stays up"
        java_broker.start()
        feed(kafka, "j", 400)
        expect(m.wait(lambda f: f["sampled"]["joined"] == 800), 800)
        assert m.stop() == 0
    finally:
        if m.process.poll() is None:
            m.process.kill()
            m.process.wait()
    assert len(m.log.read_text().splitlines()) < 60


def test_without_topics_it_says_what_is_missing(kafka: KafkaSettings, tmp_path: Path) -> None:
    m = Monitor(kafka, tmp_path)
    assert m.process.wait(300) == 1
    assert "solaris topics create" in m.log.read_text()
    assert os.listdir(tmp_path) == [m.log.name]
