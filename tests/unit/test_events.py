"""Event types: round trips, every rule by its reason code, and decoders under random and mutated bytes."""

from __future__ import annotations

import contextlib
import json
import math
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics import events
from topics.errors import DecodeError, EventRejected, InvalidEvent
from topics.events import Candidates, Feedback, Impression, Item, RankedAds, check, check_key, decode_event, encode

JSON_TEXT = st.recursive(
    st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)
JSON = JSON_TEXT.map(lambda v: json.dumps(v).encode())
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ID = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
ITEM = ID | st.integers(-(2**63), 2**64 - 1)
TS = st.integers(events.MIN_TS, events.MAX_TS)
NUMBER = st.floats(allow_nan=False, allow_infinity=False, width=32)
SCALAR = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | NUMBER | TEXT
FEATURES = st.dictionaries(TEXT.map(lambda n: "f" + n), SCALAR | st.lists(SCALAR, max_size=5), max_size=5)


@st.composite
def with_history(draw: st.DrawFn) -> dict[str, Any]:
    features = draw(FEATURES)
    history = draw(st.lists(ITEM, max_size=5))
    n = len(history)
    features["history"] = history
    if draw(st.booleans()):
        features["history_ts"] = draw(st.lists(st.none() | st.integers(-1, events.MAX_TS), min_size=n, max_size=n))
    if draw(st.booleans()):
        features["history_kind"] = draw(st.lists(st.none() | TEXT | st.integers(0, 255), min_size=n, max_size=n))
    return features


@st.composite
def pairs(draw: st.DrawFn, kind: type) -> Any:
    ids = draw(st.lists(ITEM, max_size=8))
    n = len(ids)
    numbers = draw(st.none() | st.lists(NUMBER, min_size=n, max_size=n))
    columns = draw(st.none() | st.dictionaries(TEXT, st.lists(SCALAR, min_size=n, max_size=n), max_size=3))
    return kind(draw(ID), draw(ID), draw(TS), ids, numbers, draw(FEATURES | with_history()), columns)


EVENT = st.one_of(
    pairs(Candidates),
    pairs(Impression),
    st.builds(Feedback, ID, ID, TS, st.lists(ITEM, max_size=5), st.none() | st.lists(ITEM, max_size=5)),
    st.builds(Item, ITEM, TS, FEATURES),
)
DECODERS = [
    events.decode_event,
    events.decode_candidates,
    events.decode_impression,
    events.decode_feedback,
    events.decode_item,
    events.decode_ranked_ads,
]
ONE = {
    Candidates: events.decode_candidates,
    Impression: events.decode_impression,
    Feedback: events.decode_feedback,
    Item: events.decode_item,
}


@given(EVENT)
def test_round_trip(event: Any) -> None:
    data = encode(event)
    for decode in (decode_event, ONE[type(event)]):
        again = decode(data)
        assert type(again) is type(event)
        assert encode(again) == data
    assert decode_event(data.decode()) == decode_event(memoryview(data))
    assert json.loads(data)["type"] == type(event).__name__.lower()
    check_key(str(event.id if isinstance(event, Item) else event.user).encode(), event)


@given(st.lists(ITEM, min_size=1, max_size=5), st.data())
def test_ranked_ads_round_trip(ads: list[Any], data: st.DataObject) -> None:
    n = len(ads)
    scores = data.draw(st.lists(NUMBER, min_size=n, max_size=n))
    ages = data.draw(st.lists(st.none() | st.integers(0, 10**9), min_size=n, max_size=n))
    ranked = RankedAds("i", "u", 1, ads, list(range(n)), scores, ["none"] * n, ages, "vm", "fm", "live", 2, 3)
    assert events.decode_ranked_ads(encode(ranked)) == ranked


@given(st.binary(max_size=200) | JSON)
def test_random_bytes_are_a_named_error(data: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(InvalidEvent) as e:
            decode(data)
        assert e.value.reason
        assert len(str(e.value)) < 700


@given(EVENT, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 2)), max_size=6))
@settings(max_examples=200)
def test_mutated_bytes_decode_or_are_a_named_error(event: Any, edits: list[tuple[int, int, int]]) -> None:
    data = bytearray(encode(event))
    for at, byte, how in edits:
        at %= max(len(data), 1)
        if how == 0:
            data[at : at + 1] = bytes([byte])
        elif how == 1:
            del data[at]
        else:
            data[at:at] = data[: byte % 20]
    for decode in DECODERS:
        try:
            out: Any = decode(bytes(data))
        except InvalidEvent:
            continue
        encode(out)  # what is let through can be written again


def _candidates(**over: Any) -> dict[str, Any]:
    return {"type": "candidates", "id": "c", "user": "u", "ts": 1, "items": ["a", "b"]} | over


LONG = "x" * (events.MAX_ID_CHARS + 1)


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        ({"type": "nonsense"}, "unknown_type"),
        ({"type": "y" * 100_000}, "unknown_type"),
        ({"type": None}, "unknown_type"),
        ({"user": 5}, "wrong_type"),
        ({"user": None}, "wrong_type"),
        ({"user": ""}, "empty_user"),
        ({"user": LONG}, "id_too_long"),
        ({"id": ""}, "empty_id"),
        ({"id": LONG}, "id_too_long"),
        ({"ts": -1}, "time_out_of_range"),
        ({"ts": events.MAX_TS + 1}, "time_out_of_range"),
        ({"ts": 10**30}, "time_out_of_range"),
        ({"ts": 1.0}, "wrong_type"),
        ({"ts": True}, "wrong_type"),
        ({"ts": "1"}, "wrong_type"),
        ({"items": "ab"}, "wrong_type"),
        ({"items": ["a", ""]}, "empty_id"),
        ({"items": [1, ""]}, "empty_id"),
        ({"items": ["a", LONG]}, "id_too_long"),
        ({"items": ["a", 1.5]}, "wrong_type"),
        ({"items": ["a", True]}, "wrong_type"),
        ({"items": ["a", None]}, "wrong_type"),
        ({"items": ["a", ["b"]]}, "wrong_type"),
        ({"items": ["a", 2**64]}, "id_out_of_range"),
        ({"items": ["a", -(2**63) - 1]}, "id_out_of_range"),
        ({"items": ["a"] * (events.MAX_ITEMS + 1)}, "too_many_items"),
        ({"scores": [1.0]}, "not_aligned"),
        ({"scores": [1.0, 1e39]}, "not_finite"),
        ({"scores": [1.0, 10**300]}, "not_finite"),
        ({"scores": [1.0, "2"]}, "wrong_type"),
        ({"scores": [1.0, None]}, "wrong_type"),
        ({"features": {"a": 1e39}}, "not_finite"),
        ({"features": {"a": 10**60}}, "not_finite"),
        ({"features": {"a": [1, "x", -1e39]}}, "not_finite"),
        ({"features": {"a": {}}}, "wrong_type"),
        ({"features": {"a": [[1]]}}, "wrong_type"),
        ({"features": [1]}, "wrong_type"),
        ({"features": {str(i): 1 for i in range(events.MAX_FEATURES + 1)}}, "too_many_features"),
        ({"features": {"a": [0] * (events.MAX_HISTORY + 1)}}, "too_many_items"),
        ({"features": {"history": "a"}}, "wrong_type"),
        ({"features": {"history": 1.0}}, "wrong_type"),
        ({"features": {"history": [1.5]}}, "wrong_type"),
        ({"features": {"history": [None]}}, "wrong_type"),
        ({"features": {"history": [""]}}, "empty_id"),
        ({"features": {"history": [LONG]}}, "id_too_long"),
        ({"features": {"history": [2**64]}}, "id_out_of_range"),
        ({"features": {"history": ["a"], "history_ts": [1, 2]}}, "not_aligned"),
        ({"features": {"history_ts": [1]}}, "not_aligned"),
        ({"features": {"history": ["a"], "history_ts": 1}}, "wrong_type"),
        ({"features": {"history": ["a"], "history_ts": ["x"]}}, "wrong_type"),
        ({"features": {"history": ["a"], "history_ts": [True]}}, "wrong_type"),
        ({"features": {"history": ["a"], "history_ts": [-2]}}, "time_out_of_range"),
        ({"features": {"history": ["a"], "history_ts": [10**20]}}, "time_out_of_range"),
        ({"features": {"history": ["a"], "history_kind": [1, 2]}}, "not_aligned"),
        ({"features": {"history": ["a"], "history_kind": 1}}, "wrong_type"),
        ({"item_features": {"p": [1]}}, "not_aligned"),
        ({"item_features": {"p": [1, 1e39]}}, "not_finite"),
        ({"item_features": {"p": ["x", 1e39]}}, "not_finite"),
        ({"item_features": {"p": 1}}, "wrong_type"),
        ({"item_features": {str(i): [1, 2] for i in range(events.MAX_FEATURES + 1)}}, "too_many_features"),
    ],
)
def test_each_rule_has_its_reason(over: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidEvent) as e:
        decode_event(json.dumps(_candidates(**over)))
    assert e.value.reason == reason
    assert len(str(e.value)) < 700


@pytest.mark.parametrize(
    "over",
    [
        {"items": []},
        {"items": [0, -5, 2**64 - 1, "7"]},
        {"items": ["x" * events.MAX_ID_CHARS] * 3},
        {"items": ["a"] * events.MAX_ITEMS},
        {"scores": [1, -3.4e38]},
        {"features": {"history": None, "history_ts": None}},
        {"features": {"history": ["a", 1], "history_ts": [None, -1], "history_kind": [None, "click"]}},
        {"features": {"a": None, "b": True, "c": "é\u0000🙂", "d": [1, "x", None, False]}},
        {"features": {"a": []}},
        {"item_features": {"p": [None, "x"], "q": [1, 2.5]}},
        {"a_field_of_tomorrow": {"deep": [1]}},
    ],
)
def test_what_the_rules_allow(over: dict[str, Any]) -> None:
    assert isinstance(decode_event(json.dumps(_candidates(**over))), Candidates)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (None, "empty"),
        (b"null", "wrong_type"),
        (b"[]", "wrong_type"),
        (b"{", "not_json"),
        (b"\x00" * 20, "not_json"),
        (b"\xef\xbb\xbf{}", "not_json"),
        (b'{"type":"candidates","id":"\xff"}', "not_json"),
        (b'{"type":"candidates","id":"c","user":"u","ts":1,"items":["\\ud800"]}', "not_json"),
        ('{"type":"candidates","id":"\ud800"}', "not_json"),
        (b'{"type":"candidates","id":"c","user":"u","ts":1,"items":[NaN]}', "not_json"),
        (b'{"type":"candidates","id":"c","user":"u","ts":1,"items":[],"x":' + b"[" * 100_000, "not_json"),
        (b'{"type":"candidates","id":"c","user":"u","ts":1,"items":[1' + b"0" * 5_000 + b"]}", "wrong_type"),
        (b'{"type":"candidates","id":"c","user":"u","ts":1,"items":["a"],"scores":[1e999]}', "wrong_type"),
        (b" " * (events.MAX_EVENT_BYTES + 1), "too_large"),
    ],
)
def test_bytes_that_are_no_event(data: Any, reason: str) -> None:
    with pytest.raises(DecodeError) as e:
        decode_event(data)
    assert e.value.reason == reason


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_events_built_in_python_keep_the_same_rules(bad: float) -> None:
    n = 5
    for event in (
        Candidates("c", "u", 1, ["a"] * n, [0.0] * (n - 1) + [bad]),
        Candidates("c", "u", 1, ["a"] * n, [bad] * n),
        Impression("c", "u", 1, ["a"], features={"x": bad}),
        Impression("c", "u", 1, ["a"], features={"x": [None, bad]}),
        Impression("c", "u", 1, ["a"], ad_features={"x": [bad]}),
        Item("a", 1, features={"x": [bad, -bad]}),
    ):
        with pytest.raises(EventRejected) as e:
            check(event)
        assert e.value.reason == "not_finite"


def test_a_repeated_key_takes_its_last_value() -> None:
    event = decode_event(b'{"type":"item","id":"a","ts":1,"ts":2}')
    assert event.ts == 2


def test_a_type_of_another_topic_is_unknown_there() -> None:
    with pytest.raises(DecodeError) as e:
        events.decode_candidates(encode(Impression("i", "u", 1, ["a"])))
    assert e.value.reason == "unknown_type"


@pytest.mark.parametrize(("key", "reason"), [(None, "missing_key"), (b"", "missing_key"), (b"v", "key_mismatch")])
def test_key_must_be_the_user(key: bytes | None, reason: str) -> None:
    with pytest.raises(EventRejected) as e:
        check_key(key, Feedback("f", "u", 1, []))
    assert e.value.reason == reason
    check_key(b"7", Item(7, 1))
    check_key("ключ".encode(), Feedback("f", "ключ", 1, []))


@pytest.mark.parametrize(
    "data",
    [
        b'{"type":"candidates","id":"c","user":"u","ts":1,"items":[' + b'"a",' * 300_000 + b'"a"]}',
        b'{"type":"item","id":"c","ts":1,"features":{"a":[' + b"1," * 500_000 + b"1]}}",
        b'{"type":"item","id":"c","ts":1,"features":{' + b'"":1,' * 200_000 + b'"a":1}}',
        b"[" * events.MAX_EVENT_BYTES,
        b'{"a":' * 800_000,
    ],
)
def test_memory_is_bounded_by_the_size_of_the_record(data: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(InvalidEvent):  # a repeated key is none
            decode_event(data)
        assert tracemalloc.get_traced_memory()[1] < 30 * len(data)
    finally:
        tracemalloc.stop()


def test_clip_says_how_long_it_was() -> None:
    assert events.clip("a" * 600) == "a" * 500 + "... (600 characters)"
    assert events.clip("abc", 3) == "abc"


def test_decoders_agree_with_plain_json() -> None:
    event = Candidates("c", "u", 5, ["a", 7], [0.5, 1.0], {"history": ["a"]}, {"p": [1, None]})
    assert json.loads(encode(event)) == msgspec.to_builtins(event)
