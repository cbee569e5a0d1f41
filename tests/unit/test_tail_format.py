"""Records as lines and as JSON: readable, bounded, and never a way to drive the reader's terminal."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics import dlq, events, packed, packed_counts, tail
from topics.contracts import CONTRACTS
from topics.errors import SettingsError
from topics.events import Candidates, Feedback, Impression, RankedAds, Rejected
from topics.tail import Record

NAMES = [c.name for c in CONTRACTS] + ["somebody.elses"]
FIELDS = st.sampled_from(["id", "ads", "ts", "scores", "items", "clicked"])
JSON = st.recursive(st.none() | st.integers() | st.text(max_size=9), lambda x: st.lists(x) | st.dictionaries(FIELDS, x))
NOW = 1_573_700_000_000


def record(topic: str, value: bytes | None, key: bytes | None = b"u1", headers: dlq.Headers | None = None) -> Record:
    return Record(topic, 2, 15, NOW - 1_500, key, value, tuple(headers or ()))


@given(st.sampled_from(NAMES), st.none() | st.binary(max_size=200), st.none() | st.binary(max_size=20))
def test_anything_can_be_shown(topic: str, value: bytes | None, key: bytes | None) -> None:
    r = record(topic, value, key, [("h", b"\xff")])
    line = tail.to_text(r, NOW)
    assert line.isprintable()
    assert len(line) < 1_000
    json.dumps(tail.to_json(r), allow_nan=False)


@given(st.sampled_from(NAMES), JSON)
def test_any_json_can_be_shown(topic: str, value: object) -> None:
    r = record(topic, json.dumps(value).encode())
    assert tail.to_text(r, NOW).isprintable()
    json.dumps(tail.to_json(r))


def test_lines_of_each_topic() -> None:
    ranked = RankedAds(
        "i1", "u1", NOW, ["N7", 9], [1, 0], [0.25, 0.125], ["direct", "none"], [120_000, None],
        "vm1", "fm1", "live", 1, 2,
    )  # fmt: skip
    assert tail.to_text(record("ranked-ads", events.encode(ranked)), NOW) == (
        "u1           2019-11-14 02:53:20.000Z    1.5 s ago  2@15  "
        "i1: N7 0.2500 direct 2 min | 9 0.1250 none  [live, vm vm1, fm fm1]"
    )
    many = [f"N{i}" for i in range(8)]
    line = tail.to_text(record("candidates", events.encode(Candidates("c", "u1", NOW, many))), NOW)
    assert line.endswith("c: 8 items, N0 N1 N2 N3 N4 and 3 more")
    assert "1 ads, N1" in tail.to_text(record("impressions", events.encode(Impression("i", "u", 5, ["N1"]))), NOW)
    assert "0 clicked" in tail.to_text(record("feedback", events.encode(Feedback("i", "u", 5, []))), NOW)
    key, value, headers = dlq.dead_letter("t.x", 1, 7, b"u1", b"\x00", Rejected("not_json", "bad\x1b[2J"), "ranker")
    line = tail.to_text(record("dlq", value, key, headers), NOW)
    assert line.endswith(r"not_json from t.x/1@7 by ranker: bad\x1b[2J")
    assert "(no value)" in tail.to_text(record("items", None), NOW)


def test_packed_values_are_decoded() -> None:
    request = packed.PrecomputeRequest(
        1, NOW, 2, np.array([3], np.uint64), np.array([0.3], np.float32), np.array([[0.1]], np.float32),
        np.array([4], np.uint64), np.array([-1]), np.array([1], np.uint8), np.array([0.7], np.float32),
        np.array([], np.float32), "c1",
    )  # fmt: skip
    r = record("precompute", packed.encode_precompute(request))
    shown = tail.to_json(r)["value"]
    assert shown["scores"] == [0.3]
    assert shown["item_features"] == [[0.1]]
    assert shown["items"] == ["0000000000000003"]
    assert shown["history_ts"] == [-1]
    assert "c1: 1 pairs, history of 1" in tail.to_text(r, NOW)
    chunk = packed.EmbeddingChunk(
        1, NOW, 2, 3, np.array([3], np.uint64), np.array([0], np.uint32), np.array([[2, -4]], np.int8),
        np.array([0.5], np.float32), np.array([1], np.float16), np.array([], np.float16), "c1",
    )  # fmt: skip
    assert tail.to_json(record("embeddings", packed.encode_embedding(chunk)))["value"]["vectors"] == [[1, -2]]


def test_records_of_the_counts() -> None:
    items = np.array([3, 9], np.uint64)
    r = record("counts", packed_counts.encode_count(packed_counts.CountChunk(1, NOW, True, items)))
    assert tail.to_json(r)["value"] == {
        "user": "0000000000000001", "ts": NOW, "what": "clicked", "items": [f"{3:016x}", f"{9:016x}"]
    }  # fmt: skip
    assert "02:53:20.000Z" in tail.to_text(r, NOW)
    assert "2 clicked, items 00000000" in tail.to_text(r, NOW)
    bucket = NOW - NOW % packed_counts.BUCKET_MS
    deltas = packed_counts.ItemDeltas(bucket, items, np.array([2, 1], np.uint32), np.array([0, 1], np.uint32))
    r = record("item-counts", packed_counts.encode_items(deltas), key=None)
    assert tail.to_json(r)["value"]["shown"] == [2, 1]
    assert "2 items, shown 3, clicked 1: 00000000 +2/+0 00000000 +1/+1" in tail.to_text(r, NOW)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1573700000000", NOW),
        ("2019-11-14T02:53:20Z", NOW),
        ("2019-11-14 02:53:20", NOW),
        ("2019-11-14T03:53:20+01:00", NOW),
        ("-90s", NOW - 90_000),
        ("-1.5h", NOW - 5_400_000),
        ("-2d", NOW - 172_800_000),
    ],
)
def test_times(text: str, ms: int) -> None:
    assert tail.parse_time(text, NOW) == ms


@pytest.mark.parametrize("text", ["", "yesterday", "-", "-m", "-5", "-5y", "2019-13-01", "-infs", "-nans"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(SettingsError, match="--from"):
        tail.parse_time(text, NOW)


@pytest.mark.parametrize(
    ("ms", "text"),
    [(-5, "0 ms"), (999, "999 ms"), (1_500, "1.5 s"), (119_000, "119.0 s"), (120_000, "2 min"), (7_200_000, "2 h"),
     (2 * 86_400_000, "2 d")],
)  # fmt: skip
def test_ages(ms: int, text: str) -> None:
    assert tail.age_text(ms) == text


@pytest.mark.parametrize("ms", [10**30, -(10**30), 2**63])
def test_absurd_times_are_shown_as_numbers(ms: int) -> None:
    assert tail.time_text(ms) == f"{ms} ms"


def test_hexdump() -> None:
    assert tail.hexdump(b"\x00ab", 16) == "00000000  00 61 62                                         .ab"
    assert tail.hexdump(bytes(40), 32).splitlines()[-1] == "... 8 more bytes (--raw writes them all)"
    assert tail.hexdump(b"", 16) == ""
