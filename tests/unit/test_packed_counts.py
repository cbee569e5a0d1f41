"""Packed records of the rolling counts: round trips, golden bytes, and decoders under random and mutated bytes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics import packed_counts
from topics.errors import DecodeError
from topics.events import MAX_TS
from topics.packed_counts import BUCKET_MS, CountChunk, ItemDeltas

HASH = st.integers(1, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
TS = 1_573_700_100_000


@st.composite
def count(draw: st.DrawFn) -> CountChunk:
    items = np.array(draw(st.lists(HASH, max_size=8)), np.uint64)
    return CountChunk(draw(HASH), draw(st.integers(0, MAX_TS)), draw(st.booleans()), items)


@st.composite
def deltas(draw: st.DrawFn) -> ItemDeltas:
    items = np.array(sorted(draw(st.sets(HASH, max_size=8))), np.uint64)
    shown, clicked = (np.array(draw(st.lists(U32, min_size=len(items), max_size=len(items))), np.uint32) for _ in "sc")
    return ItemDeltas(draw(st.integers(0, MAX_TS // BUCKET_MS)) * BUCKET_MS, items, shown, clicked)


RECORD = st.one_of(
    count().map(lambda c: (packed_counts.encode_count(c), packed_counts.decode_count, packed_counts.encode_count)),
    deltas().map(lambda d: (packed_counts.encode_items(d), packed_counts.decode_items, packed_counts.encode_items)),
)
DECODERS = (packed_counts.decode_count, packed_counts.decode_items)


def _count(**over: Any) -> CountChunk:
    values: dict[str, Any] = {"user": 7, "ts_ms": TS, "clicked": True, "items": np.array([5, 4, 5], np.uint64)}
    return CountChunk(**values | over)


def _deltas(**over: Any) -> ItemDeltas:
    values: dict[str, Any] = {
        "bucket_ms": TS,
        "items": np.array([4, 5], np.uint64),
        "shown": np.array([1, 2], np.uint32),
        "clicked": np.array([0, 3], np.uint32),
    }
    return ItemDeltas(**values | over)


def outcome(decode: Any, data: bytes) -> Any:
    try:
        return decode(data)
    except DecodeError as e:
        return e


@given(count())
def test_count_round_trip(c: CountChunk) -> None:
    for form in (bytes, bytearray, memoryview):
        again = packed_counts.decode_count(form(packed_counts.encode_count(c)))
        assert (again.user, again.ts_ms, again.clicked) == (c.user, c.ts_ms, c.clicked)
        assert again.items.tolist() == c.items.tolist()


@given(deltas())
def test_item_deltas_round_trip(d: ItemDeltas) -> None:
    for form in (bytes, bytearray, memoryview):
        again = packed_counts.decode_items(form(packed_counts.encode_items(d)))
        assert again.bucket_ms == d.bucket_ms
        for name in ("items", "shown", "clicked"):
            assert getattr(again, name).tolist() == getattr(d, name).tolist()


@given(
    st.builds(
        lambda head, rest: head + rest,
        st.sampled_from([b"", b"SLRC\x01\0\0\0", b"SLRI\x01\0\0\0"]),
        st.binary(max_size=200),
    )
)
def test_random_bytes_are_a_named_error(data: bytes) -> None:
    for decode in DECODERS:
        out = outcome(decode, data)
        assert not isinstance(out, DecodeError) or (out.reason and len(str(out)) < 300)


@given(RECORD, st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 255), st.integers(0, 3)), max_size=5))
@settings(max_examples=200)
def test_mutated_bytes_decode_or_are_a_named_error(record: Any, edits: list[tuple[int, int, int]]) -> None:
    original, decode, encode = record
    data = bytearray(original)
    for at, byte, how in edits:
        at %= max(len(data), 1)
        if how == 0:
            data[at : at + 1] = bytes([byte])
        elif how == 1:
            del data[at]
        elif how == 2:
            data[at:at] = data[: byte % 40]
        else:
            data[at : at + 4] = b"\xff\xff\xff\xff"
    out = outcome(decode, bytes(data))
    if isinstance(out, DecodeError):
        return
    # What is let through is the same record again, but for the reserved bytes.
    again = bytearray(encode(out))
    again[6:8] = data[6:8]
    reserved = slice(28, 32) if data[3:4] == b"C" else slice(20, 24)
    again[reserved] = data[reserved]
    assert again == data


@given(RECORD)
def test_every_truncation_and_extension_is_named(record: Any) -> None:
    data, decode, _ = record
    for cut in range(len(data)):
        with pytest.raises(DecodeError) as e:
            decode(data[:cut])
        assert e.value.reason in ("truncated", "empty")
    with pytest.raises(DecodeError) as e:
        decode(data + b"\x00")
    assert e.value.reason == "trailing_bytes"


def test_layout_is_the_documented_one() -> None:
    want = struct.pack("<3s5B" + "QqII" + "QQQ", b"SLR", ord("C"), 1, 1, 0, 0, 7, TS, 3, 0, 5, 4, 5)
    assert packed_counts.encode_count(_count()) == want
    want = struct.pack("<3s5B" + "qII" + "QQ" + "II" + "II", b"SLR", ord("I"), 1, 0, 0, 0, TS, 2, 0, 4, 5, 1, 2, 0, 3)
    assert packed_counts.encode_items(_deltas()) == want


@pytest.mark.parametrize(
    ("data", "decode", "at", "put", "reason"),
    [
        (packed_counts.encode_count(_count()), packed_counts.decode_count, 0, b"X", "wrong_magic"),
        (packed_counts.encode_count(_count()), packed_counts.decode_count, 3, b"I", "wrong_kind"),
        (packed_counts.encode_count(_count()), packed_counts.decode_count, 4, b"\x02", "newer_version"),
        (packed_counts.encode_count(_count()), packed_counts.decode_count, 5, b"\x02", "unknown_flags"),
        (packed_counts.encode_count(_count()), packed_counts.decode_count, 8, bytes(8), "empty_user"),
        (packed_counts.encode_count(_count()), packed_counts.decode_count, 16, b"\xff" * 8, "time_out_of_range"),
        (packed_counts.encode_count(_count()), packed_counts.decode_count, 24, b"\xff" * 4, "truncated"),
        (packed_counts.encode_items(_deltas()), packed_counts.decode_items, 3, b"C", "wrong_kind"),
        (packed_counts.encode_items(_deltas()), packed_counts.decode_items, 5, b"\x01", "unknown_flags"),
        (packed_counts.encode_items(_deltas()), packed_counts.decode_items, 8, b"\x01", "time_out_of_range"),
        (packed_counts.encode_items(_deltas()), packed_counts.decode_items, 8, b"\xff" * 8, "time_out_of_range"),
        (packed_counts.encode_items(_deltas()), packed_counts.decode_items, 24, b"\xff" * 8, "not_sorted"),
        (packed_counts.encode_items(_deltas()), packed_counts.decode_items, 24, bytes(8), "empty_id"),
        (packed_counts.encode_items(_deltas()), packed_counts.decode_items, 16, b"\xff" * 4, "truncated"),
    ],
)
def test_records_that_are_not_ours(data: bytes, decode: Any, at: int, put: bytes, reason: str) -> None:
    with pytest.raises(DecodeError) as e:
        decode(data[:at] + put + data[at + len(put) :])
    assert e.value.reason == reason


def test_a_time_within_a_bucket_or_unsorted_items_are_not_written() -> None:
    for bad in (
        _deltas(bucket_ms=TS + 1),
        _deltas(items=np.array([5, 4], np.uint64)),
        _deltas(items=np.array([5, 5], np.uint64)),
        _deltas(shown=np.zeros(3, np.uint32)),
    ):
        with pytest.raises(ValueError):
            packed_counts.encode_items(bad)
