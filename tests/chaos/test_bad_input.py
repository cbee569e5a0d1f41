"""Anything at all on the input topics: one dead letter with its reason for each bad record, good neighbours unharmed.

Bad and good records alternate in one produce, so that they share batches and partitions.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pipeline import Roles

from state.api import StoreSettings
from streams.audit import check, read_all
from streams.settings import load
from topics import admin
from topics import kafka as clients
from topics.errors import InvalidEvent
from topics.events import MAX_EVENT_BYTES, MAX_TS, decode_ranked_ads
from topics.ids import hash_id
from topics.kafka import KafkaSettings
from topics.packed import PrecomputeRequest, decode_embedding, encode_precompute
from topics.tail import Record, dead_letter_of

pytestmark = [pytest.mark.broker, pytest.mark.java]
BUNDLE = load(environment={}).model.bundle
TS = 1_767_225_600_000
FAR_FUTURE = int(time.time() * 1000) + 40 * 86_400_000
Sent = tuple[bytes | None, bytes | None]


def event(kind: str, user: str, id: str, **more: Any) -> dict[str, Any]:
    ids = {"impression": {"ads": ["i1", "i2"]}, "candidates": {"items": ["i1", "i2"]}}[kind]
    return {"type": kind, "id": id, "user": user, "ts": TS, **ids, **more}


def sent(e: dict[str, Any], key: str | bytes | None = "") -> Sent:
    chosen = e["user"] if key == "" else key
    return (chosen.encode() if isinstance(chosen, str) else chosen), json.dumps(e).encode()


def bad(kind: str) -> list[tuple[str, Sent]]:
    """(reason, record) of everything that cannot be used."""
    ids = "ads" if kind == "impression" else "items"
    rng = np.random.default_rng(5)
    good = json.dumps(event(kind, "u1", "x")).encode()

    def with_(key: str | bytes | None = "", **more: Any) -> Sent:
        return sent({**event(kind, "u1", "x"), **more}, key)

    def without(name: str) -> Sent:
        return b"u1", json.dumps({k: v for k, v in event(kind, "u1", "x").items() if k != name}).encode()

    return [
        *(("not_json", (b"u1", b"\xff" + rng.bytes(int(n)))) for n in rng.integers(0, 400, 20)),
        *(("not_json", (b"u1", good[:n])) for n in (1, 10, len(good) // 2, len(good) - 1)),
        ("not_json", (b"u1", good + b"}")),
        ("wrong_type", (b"u1", b"[" * 100_000)),
        ("not_json", (b"u1", b'{"strange":' + b"[" * 100_000)),
        ("not_json", (b"u1", good.replace(b'"i1"', b'"\xff\xfe"'))),
        ("not_json", (b"u1", good.replace(str(TS).encode(), b"NaN"))),
        ("empty", (b"u1", None)),
        ("empty", (b"u1", b"")),
        ("too_large", (b"u1", good + b" " * MAX_EVENT_BYTES)),
        ("unknown_type", with_(type="weather")),
        ("unknown_type", with_(type="feedback")),
        ("wrong_type", (b"u1", b"17")),
        ("wrong_type", (b"u1", b"[]")),
        ("wrong_type", without("ts")),
        ("wrong_type", without(ids)),
        ("wrong_type", with_(ts="yesterday")),
        ("wrong_type", with_(ts=1.5)),
        ("wrong_type", with_(user=7, key=b"7")),
        ("wrong_type", with_(**{ids: "i1"})),
        ("wrong_type", with_(**{ids: [["i1"]]})),
        ("wrong_type", with_(features={"a": {"b": 1}})),
        ("wrong_type", with_(features={"history": "i1"})),
        ("missing_key", with_(None)),
        ("missing_key", with_(b"")),
        ("key_mismatch", with_(b"u2")),
        ("key_mismatch", with_(b"\xff\x00\xfe")),
        ("time_out_of_range", with_(ts=-1)),
        ("time_out_of_range", with_(ts=MAX_TS + 1)),
        ("time_out_of_range", with_(ts=TS * 1_000_000)),
        ("far_future", with_(ts=FAR_FUTURE)),
        ("empty_user", with_(user="", key=b"u1")),
        ("empty_id", with_(id="")),
        ("empty_id", with_(**{ids: ["i1", ""]})),
        ("id_too_long", with_(id="x" * 5_000)),
        ("id_too_long", with_(**{ids: ["y" * 5_000]})),
        ("id_out_of_range", with_(**{ids: [2**70]})),
        ("too_many_items", with_(**{ids: [f"n{i}" for i in range(10_001)]})),
        ("too_many_items", with_(features={"history": [f"n{i}" for i in range(10_001)]})),
        ("not_aligned", with_(features={"history": ["i1"], "history_ts": [1, 2]})),
        ("not_finite", (b"u1", good.replace(b'"user"', b'"features":{"price":1e300},"user"'))),
        ("not_finite", with_(features={"price": [1.0, 3.5e38]})),
        ("not_json", (b"u1", good.replace(b'"user"', b'"features":{"price":NaN},"user"'))),
        ("not_json", (b"u1", good.replace(b'"user"', b'"features":{"price":-Infinity},"user"'))),
        ("too_many_features", with_(features={f"f{i}": 1 for i in range(300)})),
    ]  # fmt: skip


def odd_but_good(kind: str) -> list[Sent]:
    """What must be served although it looks strange."""
    users = [
        "u-plain",
        "Пользователь",
        "用户-42",
        "مستخدم",
        "👩‍🚀",
        "e\u0301",
        "\u0000nul",
        "a b\tc\n",
        "x" * 1_024,
        "..",
        "0",
    ]
    out = [sent(event(kind, user, f"g{i}")) for i, user in enumerate(users)]
    ids = "ads" if kind == "impression" else "items"
    lists = [["never seen before", 7, "7", 2**63, -5], ["i1"] * 50, [], ["ключ", "商品", "🎁"]]
    out += [sent(event(kind, "u1", f"l{i}", **{ids: these})) for i, these in enumerate(lists)]
    out += [sent(event(kind, "u1", "same id")) for _ in range(3)]
    out += [sent(event(kind, "u1", f"t{ts}", ts=ts)) for ts in (0, 1, TS - 400 * 86_400_000, TS + 1)]
    features = [
        {"history": ["i1", "unknown", 9], "history_ts": [1, -1, TS], "history_kind": [0, "click", None]},
        {"a": None, "b": True, "c": "text", "d": [], "price": -1e30, "history": []},
        {"history": [f"h{i}" for i in range(10_000)]},
    ]
    out += [sent(event(kind, "u1", f"f{i}", features=f)) for i, f in enumerate(features)]
    return out


def mixed(bads: list[tuple[str, Sent]], goods: list[Sent]) -> list[Sent]:
    out: list[Sent] = []
    for i in range(max(len(bads), len(goods))):
        out += [bads[i][1]] if i < len(bads) else []
        out += [goods[i]] if i < len(goods) else []
    return out


def produce(kafka: KafkaSettings, topic: str, records: list[Sent]) -> None:
    out = clients.producer(kafka, linger_ms=50)
    for key, value in records:
        out.produce(kafka.topic(topic), value, key)
        out.poll(0)
    assert out.flush(120) == 0


def settled_dead_letters(kafka: KafkaSettings, at_least: int, timeout_s: float = 240.0) -> list[Record]:
    """All, once there are so many or time is over, and then a moment: one too many is an error too."""
    deadline = time.monotonic() + timeout_s
    while len(read_all(kafka, "dlq")) < at_least and time.monotonic() < deadline:
        time.sleep(0.3)
    time.sleep(1.5)
    return read_all(kafka, "dlq")


def is_chunk(r: Record) -> bool:
    try:
        decode_embedding(r.value)
    except InvalidEvent:
        return False
    return True


def packed_bad(spec_free: bytes) -> list[Sent]:
    """Requests between our own roles that are none: random bytes, cut ones, another bundle's, a foreign key."""
    rng = np.random.default_rng(6)
    return [
        *((b"u1", rng.bytes(int(n))) for n in rng.integers(0, 300, 15)),
        *((b"u1", spec_free[:n]) for n in (4, len(spec_free) // 2, len(spec_free) - 1)),
        (b"u1", spec_free + b"\x00"), (b"u1", spec_free), (None, spec_free), (b"u1", None),
    ]  # fmt: skip


def request(user: str) -> bytes:
    return encode_precompute(
        PrecomputeRequest(
            hash_id(user), TS, 1234, np.array([5, 9], np.uint64), np.zeros(2, np.float32),
            np.zeros((1, 2), np.float32), np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.uint8),
            np.zeros(1, np.float32), np.zeros(0, np.float32), "r1",
        )
    )  # fmt: skip


def test_each_bad_record_is_one_dead_letter_and_no_neighbour_suffers(kafka: KafkaSettings, tmp_path: Path) -> None:
    admin.create(kafka)
    with Roles(kafka, tmp_path / "roles", BUNDLE) as roles:
        roles.start_all()
        roles.wait_ready()
        pids = {n: p.pid for n, p in roles.processes.items()}
        # Neither the catalogue nor the changelog may stop a role.
        produce(kafka, "items", [(b"i1", b"\xff" * 50), (b"i2", None), (b"i3", b"[" * 50_000)])
        produce(kafka, "embeddings", [(b"u1", os.urandom(n)) for n in (0, 1, 17, 200, 3_000)])
        for kind, topic in (("candidates", "candidates"), ("impression", "impressions")):
            produce(kafka, topic, mixed(bad(kind), odd_but_good(kind)))
        produce(kafka, "precompute", packed_bad(request("u1")))
        wanted = {
            "candidates": Counter(reason for reason, _ in bad("candidates")),
            "impressions": Counter(reason for reason, _ in bad("impression")),
        }
        packed = len(packed_bad(request("u1")))
        found = settled_dead_letters(kafka, sum(map(Counter.total, wanted.values())) + packed)
        letters = [dead_letter_of(r) for r in found]
        for topic, reasons in wanted.items():
            of_topic = Counter(x.reason for x in letters if x.source_topic == kafka.topic(topic))
            assert of_topic == reasons, topic
        roles.wait_ranked(len(odd_but_good("impression")))
        # Events that come later are served as if nothing had been.
        later = [sent(event("impression", f"late{i}", f"late{i}")) for i in range(20)]
        produce(kafka, "impressions", later)
        roles.wait_ranked(len(odd_but_good("impression")) + len(later))
        memory_mb = {n: psutil.Process(pid).memory_info().rss >> 20 for n, pid in pids.items()}
        assert {n: p.pid for n, p in roles.processes.items() if p.poll() is None} == pids, roles.logs()
        roles.stop()
    assert sum(x.source_topic == kafka.topic("precompute") for x in letters) == packed
    assert len({(x.source_topic, x.source_partition, x.source_offset) for x in letters}) == len(letters), "one for each"
    assert all(x.detail and len(x.detail) < 600 for x in letters)
    whole = Counter(v for _, (_, v) in bad("impression") if v is not None and len(v) < MAX_EVENT_BYTES)
    back = Counter(x.value for x in letters if x.source_topic == kafka.topic("impressions") and x.value in whole)
    assert back == whole, "the bytes are kept as received"
    changelog = [r for r in read_all(kafka, "embeddings") if is_chunk(r)]
    shown, answers = read_all(kafka, "impressions"), read_all(kafka, "ranked-ads")
    result = check(shown, answers, found, changelog, kafka.topic("impressions"), StoreSettings().ttl_ms)
    assert (result.lost, result.duplicated, result.invented, result.wrong_ads) == (0, 0, 0, 0), result
    same = [a for r in read_all(kafka, "ranked-ads") if (a := decode_ranked_ads(r.value or b"")).id == "same id"]
    assert len(same) == 3, "ids that repeat are each answered"
    assert max(memory_mb.values()) < 1_500, memory_mb
