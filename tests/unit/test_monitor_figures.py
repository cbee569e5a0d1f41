"""Figures from known blocks and stats; the metrics' text; the broker settings for Faust's client."""

from __future__ import annotations

import itertools
import math
import ssl
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from streams.monitor.blocks import BLOCK_MS, Block, Blocks, Labelled
from streams.monitor.connect import broker_urls, credentials
from streams.monitor.figures import View
from streams.monitor.processes import STALE_MS, Processes
from streams.monitor.transport import BUNDLE_RECORDS, Unbundler, bundles
from streams.monitor.web import prometheus
from topics.errors import SettingsError
from topics.events import Feedback, RankedAds, encode

T = 1_700_000_000_000


def stats(role: str, pid: int, at: int, **counters: int) -> tuple[int, bytes]:
    record = {"type": "stats", "ts": 1, "role": role, "instance": "h", "pid": pid, "live": True, "ready": True,
              "device": "cpu", "vm": "v", "fm": "f", "partitions": {role: [0, 1]}, "counters": counters}  # fmt: skip
    return at, msgspec.json.encode(record)


def view(processes: Processes | None = None) -> View:
    return View(Blocks(1.0, 60_000, 3_600_000), processes or Processes(3_600_000), 1.0)


def test_work_is_the_difference_of_totals_process_by_process() -> None:
    p = Processes(3_600_000)
    p.stats(*stats("verifier", 1, T, pairs_seen=1000, pairs_accepted=500, refused_budget=500))
    p.stats(*stats("verifier", 1, T + 60_000, pairs_seen=1300, pairs_accepted=600, refused_budget=700))
    p.stats(*stats("verifier", 2, T + 30_000, pairs_seen=0, pairs_accepted=0))  # a restarted one begins at zero
    p.stats(*stats("verifier", 2, T + 31_000, pairs_seen=60, pairs_accepted=20, refused_budget=40))
    p.stats(*stats("embedder", 3, T, embedder_pairs_embedded=0, embedder_pairs_saved=0))
    p.stats(*stats("embedder", 3, T + 50_000, embedder_pairs_embedded=100, embedder_pairs_saved=20))
    p.stats(*stats("ranker", 4, T, impressions=0, ads=0, source_direct=0))
    p.stats(*stats("ranker", 4, T + 50_000, impressions=10, ads=200, source_direct=50))
    f = view(p).figures(600_000, T + 61_000)
    assert f["pairs"] == {"seen": 360, "accepted": 120, "embedded": 100, "saved": 20}
    assert f["verifier"] == {"acceptance": 120 / 360, "refused": {"budget": 240}}
    assert f["fm_calls_saved"] == {"by_verifier": 240, "by_freshness": 20, "share_of_seen": 260 / 360}
    assert f["hits_per_fm_call"] == 0.5
    assert f["ranked"] == {"impressions": 10, "ads": 200}
    # A span that begins after the first record starts from the total before it.
    assert view(p).figures(30_000, T + 61_000)["pairs"]["seen"] == 360


def test_a_start_under_the_same_pid_begins_at_zero_too() -> None:
    def said(started_ms: int | None, at: int, seen: int) -> tuple[int, bytes]:
        _, value = stats("verifier", 1, at, pairs_seen=seen)
        record = msgspec.json.decode(value)
        return at, msgspec.json.encode(record if started_ms is None else {**record, "started_ms": started_ms})

    p = Processes(3_600_000)
    p.stats(*said(None, T, 1_000))  # of a release that did not say when it started
    p.stats(*said(None, T + 20_000, 1_500))
    p.stats(*said(T + 22_000, T + 23_000, 0))
    p.stats(*said(T + 22_000, T + 33_000, 70))
    p.stats(*said(T + 35_000, T + 36_000, 0))
    p.stats(*said(T + 35_000, T + 37_000, 5))
    assert p.done("verifier", 0, 2 * T) == {"pairs_seen": 575}
    rows = msgspec.json.decode(msgspec.json.encode(p.changed()))
    for said_twice in (row for _, _, row in rows if not row["last"]["started_ms"]):
        del said_twice["first"]["started_ms"], said_twice["last"]["started_ms"]  # as they were stored before
    loaded = Processes(3_600_000)
    for _, _, row in rows:
        loaded.load(row)
    assert loaded.done("verifier", 0, 2 * T) == {"pairs_seen": 575}
    assert [r["counters"] for r in view(p).roles(T + 40_000)] == [{"pairs_seen": 5}], "one process, its newest start"
    lines = [x.rsplit(" ", 1)[0] for x in prometheus(view(p), T + 40_000).splitlines() if not x.startswith("#")]
    assert len(lines) == len(set(lines)), "a sample given twice makes Prometheus refuse the whole scrape"


def test_records_read_again_or_out_of_order_change_nothing() -> None:
    records = [stats("ranker", 1, T + i * 3000, impressions=i) for i in range(12)]
    once, again = Processes(3_600_000), Processes(3_600_000)
    for r in records:
        once.stats(*r)
    for r in [*records[3:8], *reversed(records), *records]:
        again.stats(*r)
    assert sorted(once.changed()) == sorted(again.changed())
    loaded = Processes(3_600_000)
    for r in records[6:]:
        loaded.stats(*r)
    for r in records:
        once.stats(*r)
    for _, _, row in once.changed():
        loaded.load(msgspec.json.decode(msgspec.json.encode(row)))
    assert loaded.done("ranker", 0, 2 * T) == once.done("ranker", 0, 2 * T) == {"impressions": 11}


def test_a_process_not_heard_of_is_gone_then_forgotten_and_bad_stats_are_counted() -> None:
    p = Processes(60_000)
    p.stats(*stats("ranker", 1, T, impressions=1))
    for bad in (None, b"", b"{", b'{"role":1}', b"\xff"):
        p.stats(T, bad)
    assert p.undecodable == 5
    assert view(p).roles(T + STALE_MS)[0]["gone"] is False
    assert view(p).roles(T + STALE_MS + 1)[0]["gone"] is True
    assert "solaris_role_impressions_total" in prometheus(view(p), T)
    late = prometheus(view(p), T + STALE_MS + 1)
    assert "solaris_role_impressions_total" not in late
    assert p.expire(T + 60_000 + 2 * BLOCK_MS) == [("ranker/h/1", T - T % BLOCK_MS)]
    assert view(p).roles(T) == []


def test_a_process_that_fell_silent_is_down_and_one_that_ended_as_it_should_is_not() -> None:
    def ready(p: Processes, at: int) -> list[float]:
        lines = prometheus(view(p), at).splitlines()
        return [float(x.split()[-1]) for x in lines if x.startswith("solaris_role_ready{")]

    def states(p: Processes, at: int) -> list[tuple[int, bool, bool]]:
        return [(r["pid"], r["gone"], r["ended"]) for r in view(p).roles(at)]

    p = Processes(3_600_000)
    p.stats(*stats("ranker", 1, T))
    assert ready(p, T) == [1.0]
    late = T + STALE_MS + 1
    assert ready(p, late) == [0.0], "min(solaris_role_ready) < 1 fires"
    assert states(p, late) == [(1, True, False)]
    assert ready(p, T + 3_000_000) == [0.0], "until it is forgotten"
    # Its successor, of the same instance, has come: nothing is missing any more.
    p.stats(*stats("ranker", 2, late))
    assert ready(p, late) == [1.0]
    assert states(p, late) == [(1, True, True), (2, False, False)]
    # Told to stop: what is not heard of afterwards was meant to end.
    _, value = stats("ranker", 2, 0)
    p.stats(late + 10, msgspec.json.encode({**msgspec.json.decode(value), "stopping": True}))
    assert ready(p, late + 10) == [1.0]
    assert ready(p, late + 10 + STALE_MS + 1) == []
    assert states(p, late + 10 + STALE_MS + 1)[1] == (2, True, True)


def test_nothing_known_is_null_not_zero() -> None:
    f = view().figures(600_000, T)
    assert f["log_loss"]["solaris"] is None
    assert f["calibration"]["ratio"] is None
    assert f["hits_per_fm_call"] is None
    assert set(f["coverage"].values()) == {None}
    assert "nan" not in prometheus(view(), T).lower()
    assert msgspec.json.decode(msgspec.json.encode(f)) == f


def test_the_vm_alone_is_compared_on_the_ads_that_carry_its_scores() -> None:
    v = view()
    nothing = v.figures(600_000, T)["log_loss"]["against_vm"]
    assert nothing == {"ads": 0, "solaris": None, "vm": None, "gain": None}
    for i, vm in (("a", [0.5, 0.5]), ("b", None)):
        answer = RankedAds(i, "u", T, ["x", "y"], [0, 1], [0.8, 0.1], ["none"] * 2, [None] * 2, "v", "f", "live", 1, 2)
        answer.vm_scores = vm
        v.blocks.ranked(0, T, encode(answer), T)
        v.blocks.feedback(0, T, encode(Feedback(i, "u", T, ["x"])), T)
    loss = v.figures(600_000, T)["log_loss"]
    ours, theirs = -(math.log(0.8) + math.log(0.9)) / 2, -math.log(0.5)
    assert loss["solaris"] == pytest.approx(ours)
    assert loss["against_vm"]["ads"] == 2
    assert loss["against_vm"]["solaris"] == pytest.approx(ours)
    assert loss["against_vm"]["vm"] == pytest.approx(theirs)
    assert loss["against_vm"]["gain"] == pytest.approx(1 - ours / theirs)
    (_, row), *_ = v.blocks.changed()
    assert Block.load(msgspec.json.decode(msgspec.json.encode(row))).compared.ads == 2


def test_the_series_covers_the_span_once() -> None:
    v = view()
    series = v.series(3_600_000, T)
    steps = {b["ts"] - a["ts"] for a, b in itertools.pairwise(series)}
    assert steps == {60_000}
    assert series[0]["ts"] <= T - 3_600_000 < series[0]["ts"] + BLOCK_MS
    assert series[-1]["ts"] <= T < series[-1]["ts"] + 60_000
    assert [p["ts"] for p in v.series(60_000, T)][:2] == [T - 60_000, T - 50_000]


def test_metrics_escape_their_labels() -> None:
    p = Processes(3_600_000)
    record = {"ts": 1, "role": 'r"\\\n', "instance": "h", "pid": 1, "counters": {"a-b.c": 3}}
    p.stats(T, msgspec.json.encode(record))
    text = prometheus(view(p), T)
    p.stats(*stats("ranker", 2, T, item_counts_items=4, ads=1))
    of_ranker = prometheus(view(p), T)
    assert "# TYPE solaris_role_item_counts_items gauge" in of_ranker
    assert 'solaris_role_item_counts_items{role="ranker",instance="h",pid="2"} 4' in of_ranker
    assert "# TYPE solaris_role_ads_total counter" in of_ranker
    assert 'solaris_role_a_b_c_total{role="r\\"\\\\\\n",instance="h",pid="1"} 3' in text
    assert all(line.startswith(("#", "solaris_")) for line in text.splitlines())
    assert len([x for x in text.splitlines() if x.startswith("# TYPE solaris_role_live ")]) == 1


def test_labelled_sums() -> None:
    a = Labelled(1, 1, 0.5, 0.25)
    a.add(Labelled(2, 0, 0.25, 0.5))
    assert a == Labelled(3, 1, 0.75, 0.75)


def test_bundles_keep_every_record_in_order_and_end_at_the_last_offset() -> None:
    records = [
        SimpleNamespace(topic="t", partition=3, offset=7 * i, timestamp=T + i, timestamp_type=1, value=b"v%d" % i)
        for i in range(2 * BUNDLE_RECORDS + 1)
    ]
    records[5].value = None
    made = list(bundles(records))
    assert [b.offset for b in made] == [7 * (BUNDLE_RECORDS - 1), 7 * (2 * BUNDLE_RECORDS - 1), 14 * BUNDLE_RECORDS]
    u = Unbundler()
    assert [r for b in made for r in u.records("t", 3, b.value)] == [(r.timestamp, r.value) for r in records]
    assert list(bundles([])) == []


def test_a_record_delivered_again_passes_once() -> None:
    records = [
        SimpleNamespace(topic="t", partition=3, offset=i, timestamp=T + i, timestamp_type=1, value=b"v")
        for i in range(9)
    ]
    u = Unbundler()
    first, again, behind = (next(bundles(r)).value for r in (records[:5], records[2:], records[:3]))
    assert [ts - T for ts, _ in u.records("t", 3, first)] == [0, 1, 2, 3, 4]
    assert [ts - T for ts, _ in u.records("t", 3, again)] == [5, 6, 7, 8]
    assert u.records("t", 3, behind) == []
    assert u.records("t", 3, again) == []
    assert len(u.records("t", 2, again)) == 7


def test_bootstrap_servers() -> None:
    assert broker_urls("a:1, b:2,") == "kafka://a:1;kafka://b:2"


def test_plain_text_and_tuning_properties_need_no_credentials() -> None:
    assert credentials({}) is None
    assert credentials({"security.protocol": "plaintext", "socket.timeout.ms": 5, "client.id": "x"}) is None


def test_sasl_and_tls_are_translated(tmp_path: Path) -> None:
    plain = credentials(
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-256", "sasl.username": "u",
         "sasl.password": "p"}
    )  # fmt: skip
    assert (plain.protocol.value, plain.mechanism.value) == ("SASL_PLAINTEXT", "SCRAM-SHA-256")
    assert (plain.username, plain.password, plain.ssl_context) == ("u", "p", None)
    both = credentials(
        {"security.protocol": "sasl_ssl", "sasl.mechanisms": "PLAIN", "sasl.username": "u", "sasl.password": "p",
         "ssl.endpoint.identification.algorithm": "none"}
    )  # fmt: skip
    assert both.protocol.value == "SASL_SSL"
    assert both.ssl_context.verify_mode == ssl.CERT_REQUIRED
    assert both.ssl_context.check_hostname is False
    assert credentials({"security.protocol": "SSL"}).context.check_hostname is True
    loose = credentials({"security.protocol": "SSL", "enable.ssl.certificate.verification": False})
    assert loose.context.verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize(
    ("properties", "key"),
    [
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}, "kafka.properties.sasl.mechanism"),
        ({"security.protocol": "SASL_SSL"}, "kafka.properties.sasl.mechanism"),
        ({"security.protocol": "SSL", "ssl.keystore.location": "k.p12"}, "kafka.properties.ssl.keystore.location"),
        ({"security.protocol": "SSL", "ssl.ca.location": "/no/such/file"}, "kafka.properties.ssl.*"),
        ({"security.protocol": "QUIC"}, "kafka.properties.security.protocol"),
        ({"sasl.oauthbearer.client.secret": "hush", "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"},
         "kafka.properties.sasl.oauthbearer.client.secret"),
    ],
)  # fmt: skip
def test_what_cannot_be_translated_is_refused_without_showing_it(properties: dict[str, str], key: str) -> None:
    with pytest.raises(SettingsError) as e:
        credentials(properties)
    assert e.value.key == key
    assert "hush" not in str(e.value)
