"""The compiled reading of id lists says what the decoder and `hash_id` say, or leaves the list to them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models.api import Feature, FeatureSpec
from models.catalogue import Catalogue
from models.features import Encoder
from streams.decoding import hashed_candidates
from topics import events
from topics.errors import InvalidEvent
from topics.events import MAX_ITEMS, Candidates, HashedCandidates, encode
from topics.id_lists import MAX_BYTES, hash_list
from topics.ids import hash_id

PLAIN = st.text(st.characters(codec="ascii", exclude_characters='"\\', min_codepoint=32, max_codepoint=126), min_size=1)
USUAL = st.lists(PLAIN | st.integers(-(10**18) + 1, 10**18 - 1), max_size=40)
ANY = st.one_of(st.text(max_size=300), st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.none())


def hashes(text: bytes) -> list[int] | None:
    found = hash_list(text)
    return None if found is None else found.tolist()


@pytest.mark.parametrize("n", range(1, MAX_BYTES + 1))
def test_every_length_hashes_as_the_library_does(n: int) -> None:
    ids = [chr(33 + (n * 7 + k) % 60 + (k > 5)).replace('"', "x").replace("\\", "y") * n for k in range(4)]
    ids.append("".join("abcdefghij-0123456789:_KLMNOP"[(n + k * k) % 29] for k in range(n)))
    assert hashes(json.dumps(ids).encode()) == [hash_id(i) for i in ids]


@given(USUAL, st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", ":")]))
def test_usual_lists_are_decided(ids: list[Any], separators: tuple[str, str]) -> None:
    text = json.dumps(ids, separators=separators).encode()
    if all(len(str(i)) <= MAX_BYTES for i in ids):
        assert hashes(b" " + text + b" ") == [hash_id(i) for i in ids]


@given(st.lists(ANY, max_size=8), st.booleans())
def test_other_lists_are_decided_alike_or_not_at_all(ids: list[Any], ascii_only: bool) -> None:
    text = json.dumps(ids, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    found = hashes(text)
    assert found is None or found == [hash_id(i) for i in ids]


@pytest.mark.parametrize(
    "text",
    [
        b"", b" ", b"[", b"]", b"{}", b'"a"', b"[1", b'["a', b'["a"', b'["a",', b'["a",]', b"[,1]", b"[1 2]", b"[1]]",
        b'[""]', b"[01]", b"[-0]", b"[-]", b"[1.0]", b"[1e3]", b"[true]", b"[null]", b"[[1]]", b'["a\\n"]', b'["\x01"]',
        b'["\xc3\xa9"]', b'["a" "b"]', b'["a"x]', b"[1234567890123456789]", b'["%s"]' % (b"x" * (MAX_BYTES + 1)),
        b"[" + b"1," * MAX_ITEMS + b"1]",
    ],
)  # fmt: skip
def test_what_is_wrong_or_unusual_is_left_to_the_decoder(text: bytes) -> None:
    assert hash_list(text) is None


def test_the_longest_list_is_decided() -> None:
    assert hashes(b"[" + b"7," * (MAX_ITEMS - 1) + b"7]") == [hash_id(7)] * MAX_ITEMS


@given(USUAL, st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=2), st.integers(0, 2)), max_size=4))
@example(["a"], [(1, b"\\", 0)])
def test_a_damaged_list_is_decided_as_the_decoder_reads_it(ids: list[Any], edits: list[tuple[int, bytes, int]]) -> None:
    text = json.dumps(ids).encode()
    for at, put, cut in edits:
        text = text[:at] + put + text[at + cut :]
    found = hashes(text)
    if found is not None:
        assert found == [hash_id(i) for i in msgspec.json.decode(text, type=list[str | int])]


NUMBERS = st.floats(width=32) | st.integers(-5, 5)
VALUES = st.lists(NUMBERS | st.text(max_size=2), max_size=3)
FEATURES = st.dictionaries(st.sampled_from(["history", "history_ts", "n", "word"]), VALUES, max_size=3)
COLUMNS = st.dictionaries(st.sampled_from(["price", "brand"]), st.lists(NUMBERS, max_size=5), max_size=2)
EVENTS = st.builds(
    Candidates,
    id=st.text(max_size=3),
    user=st.text(max_size=3) | st.just("u" * 1_025),
    ts=st.integers(-2, 10) | st.just(2**50),
    items=st.lists(st.text(max_size=4) | st.sampled_from(["a", "n7", 7, "x" * 1_025, 2**64]), max_size=5),
    scores=st.none() | st.lists(st.floats(), max_size=5),
    features=FEATURES,
    item_features=st.none() | COLUMNS,
)  # fmt: skip
SPEC = FeatureSpec(
    request=(Feature("n", "number"),), item=(Feature("price", "number"), Feature("brand", "category")), history_length=3
)


def outcome(decode: Any, data: bytes) -> Any:
    try:
        return decode(data)
    except InvalidEvent as e:
        return e.reason, e.detail


@given(st.lists(EVENTS, min_size=1, max_size=4), st.binary(max_size=2), st.integers(0, 60))
def test_events_have_the_same_columns_or_the_same_reason(found: list[Candidates], put: bytes, at: int) -> None:
    quick, slow = [], []
    for n, event in enumerate(found):
        try:
            data: bytes = encode(event)
        except UnicodeEncodeError:
            continue
        if n == 0:
            data = data[:at] + put + data[at:]
        one, other = outcome(hashed_candidates, data), outcome(events.decode_candidates, data)
        if isinstance(other, Candidates):
            quick.append(one)
            slow.append(other)
            assert (one.id, one.user, one.ts, one.scores) == (other.id, other.user, other.ts, other.scores)
        else:
            assert isinstance(one, tuple)
            assert (put and n == 0) or one == other
    a, b = (Encoder(SPEC, Catalogue(SPEC)).candidates(these) for these in (quick, slow))
    for name in ("users", "ts_ms", "splits", "items", "item_features", "request_features", "history", "history_ts"):
        assert np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True), name


def test_usual_events_are_read_without_strings() -> None:
    event = hashed_candidates(encode(Candidates("c", "u", 1, ["a", 7], item_features={"price": [1.0, 2.0]})))
    assert isinstance(event, HashedCandidates)
    assert event.items.tolist() == [hash_id("a"), hash_id(7)]
    assert isinstance(hashed_candidates(encode(Candidates("c", "u", 1, ["é"]))), Candidates)
