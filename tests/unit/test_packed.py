"""Packed records: round trips, golden bytes, and decoders under random and mutated bytes."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from topics import packed, packed_format
from topics.errors import DecodeError
from topics.events import MAX_TS
from topics.packed import EmbeddingChunk, PrecomputeRequest

U64 = st.integers(0, 2**64 - 1)
ID = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TS = st.integers(0, MAX_TS)


def column(dtype: Any, shape: Any, **bounds: Any) -> st.SearchStrategy[Any]:
    kind = np.dtype(dtype)
    if kind.kind == "f":
        bounds = {"allow_nan": False, "allow_infinity": False}
    return hnp.arrays(kind, shape, elements=hnp.from_dtype(kind, **bounds))


@st.composite
def precompute(draw: st.DrawFn) -> PrecomputeRequest:
    n, h, c, r, p = (draw(st.integers(0, k)) for k in (6, 6, 3, 4, 4))
    return PrecomputeRequest(
        user=draw(U64),
        ts_ms=draw(TS),
        spec=draw(U64),
        items=draw(column("<u8", n)),
        scores=draw(column("<f4", n)),
        item_features=draw(column("<f4", (c, n))),
        history=draw(column("<u8", h)),
        history_ts=draw(column("<i8", h, min_value=-1, max_value=MAX_TS)),
        history_kind=draw(column("u1", h)),
        request_features=draw(column("<f4", r)),
        profile=draw(column("<f4", p)),
        event_id=draw(ID),
    )


@st.composite
def chunk(draw: st.DrawFn) -> EmbeddingChunk:
    items = np.array(sorted(draw(st.sets(U64, max_size=6))), np.uint64)
    n, d = len(items), draw(st.integers(0, 5))
    int8 = draw(st.booleans())
    return EmbeddingChunk(
        user=draw(U64),
        ts_ms=draw(TS),
        model=draw(U64),
        fingerprint=draw(U64),
        items=items,
        topics=draw(column("<u4", n)),
        vectors=draw(column("i1" if int8 else "<f2", (n, d))),
        scales=draw(column("<f4", n)) if int8 else None,
        state=draw(column("<f2", draw(st.integers(0, 5)))),
        profile=draw(column("<f2", draw(st.integers(0, 5)))),
        event_id=draw(ID),
    )


def same(a: Any, b: Any) -> None:
    for name in a.__slots__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, name
            assert x.shape == y.shape, name
            assert x.tobytes() == y.tobytes(), name
        else:
            assert x == y, name


def outcome(decode: Any, data: bytes) -> Any:
    try:
        return decode(data)
    except DecodeError as e:
        return e


RECORD = st.one_of(
    precompute().map(lambda r: (packed.encode_precompute(r), packed.decode_precompute, packed.encode_precompute)),
    chunk().map(lambda e: (packed.encode_embedding(e), packed.decode_embedding, packed.encode_embedding)),
)
DECODERS = (packed.decode_precompute, packed.decode_embedding)


@given(precompute())
def test_precompute_round_trip(r: PrecomputeRequest) -> None:
    data = packed.encode_precompute(r)
    for form in (bytes, bytearray, memoryview):
        same(r, packed.decode_precompute(form(data)))


@given(chunk())
def test_embedding_round_trip(e: EmbeddingChunk) -> None:
    data = packed.encode_embedding(e)
    for form in (bytes, bytearray, memoryview):
        same(e, packed.decode_embedding(form(data)))


@given(chunk())
def test_decoding_copies_no_column(e: EmbeddingChunk) -> None:
    data = packed.encode_embedding(e)
    out = packed.decode_embedding(data)
    whole = np.frombuffer(data, np.uint8)
    for name in ("items", "topics", "vectors", "state", "profile"):
        array = getattr(out, name)
        assert array.size == 0 or np.shares_memory(array, whole), name


@given(
    st.builds(
        lambda head, rest: head + rest,
        st.sampled_from([b"", b"SLRP\x01\0\0\0", b"SLRE\x01\0\0\0"]),
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
    if data[3:4] == b"E":
        again[52:56] = data[52:56]
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


def _request(**over: Any) -> PrecomputeRequest:
    values: dict[str, Any] = {
        "user": 1,
        "ts_ms": 1_573_700_000_000,
        "spec": 3,
        "items": np.array([5, 4], np.uint64),
        "scores": np.array([0.5, 0.25], np.float32),
        "item_features": np.array([[1, 2]], np.float32),
        "history": np.array([9], np.uint64),
        "history_ts": np.array([-1], np.int64),
        "history_kind": np.array([7], np.uint8),
        "request_features": np.array([3], np.float32),
        "profile": np.array([4], np.float32),
        "event_id": "c1",
    }
    return PrecomputeRequest(**values | over)


def _chunk(**over: Any) -> EmbeddingChunk:
    values: dict[str, Any] = {
        "user": 1,
        "ts_ms": 1_573_700_000_000,
        "model": 3,
        "fingerprint": 4,
        "items": np.array([4, 5], np.uint64),
        "topics": np.array([1, 2], np.uint32),
        "vectors": np.array([[1], [2]], np.float16),
        "scales": None,
        "state": np.array([3], np.float16),
        "profile": np.array([4], np.float16),
        "event_id": "c1",
    }
    return EmbeddingChunk(**values | over)


def test_layout_is_the_documented_one() -> None:
    want = struct.pack(
        "<3s5B" + "QqQ" + "II" + "HHHH" + "QQ" + "Q" + "q" + "ff" + "ff" + "f" + "f" + "B" + "2s",
        b"SLR", ord("P"), 1, 0, 0, 0, 1, 1_573_700_000_000, 3, 2, 1, 1, 1, 1, 2,
        5, 4, 9, -1, 0.5, 0.25, 1, 2, 3, 4, 7, b"c1",
    )  # fmt: skip
    assert packed.encode_precompute(_request()) == want
    want = struct.pack(
        "<3s5B" + "QqQQ" + "I" + "HHHH" + "I" + "QQ" + "II" + "ee" + "e" + "e" + "2s",
        b"SLR", ord("E"), 1, 0, 0, 0, 1, 1_573_700_000_000, 3, 4, 2, 1, 1, 1, 2, 0, 4, 5, 1, 2, 1, 2, 3, 4, b"c1",
    )  # fmt: skip
    assert packed.encode_embedding(_chunk()) == want


@pytest.mark.parametrize(
    ("at", "byte", "reason"),
    [
        (0, b"X", "wrong_magic"),
        (3, b"Z", "wrong_kind"),
        (4, b"\x02", "newer_version"),
        (4, b"\x00", "newer_version"),
        (5, b"\x80", "unknown_flags"),
        (16, b"\xff" * 8, "time_out_of_range"),
        (16, b"\xff" * 7 + b"\x7f", "time_out_of_range"),
    ],
)
def test_heads_that_are_not_ours(at: int, byte: bytes, reason: str) -> None:
    for data, decode in (
        (packed.encode_precompute(_request()), packed.decode_precompute),
        (packed.encode_embedding(_chunk()), packed.decode_embedding),
    ):
        bad = data[:at] + byte + data[at + len(byte) :]
        with pytest.raises(DecodeError) as e:
            decode(bad)
        assert e.value.reason == reason


@pytest.mark.parametrize("data", [None, b"", bytearray()])
def test_no_value(data: Any) -> None:
    for decode in DECODERS:
        with pytest.raises(DecodeError) as e:
            decode(data)
        assert e.value.reason == "empty"


def test_too_large_is_named_before_anything_is_read() -> None:
    for decode in DECODERS:
        with pytest.raises(DecodeError) as e:
            decode(bytes(packed_format.MAX_RECORD_BYTES + 1))
        assert e.value.reason == "too_large"


def test_announced_sizes_allocate_nothing() -> None:
    head = bytearray(packed.encode_precompute(_request())[:48])
    head[32:48] = b"\xff" * 16
    other = bytearray(packed.encode_embedding(_chunk())[:56])
    other[40:52] = b"\xff" * 12
    tracemalloc.start()
    try:
        for data, decode in ((bytes(head), packed.decode_precompute), (bytes(other), packed.decode_embedding)):
            with pytest.raises(DecodeError) as e:
                decode(data)
            assert e.value.reason == "truncated"
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(bad: float) -> None:
    f32, f16 = (np.array([bad], t) for t in (np.float32, np.float16))
    two = np.array([0, bad], np.float32)
    for r in (
        _request(scores=two),
        _request(item_features=two[None, :]),
        _request(request_features=f32),
        _request(profile=f32),
    ):
        with pytest.raises(DecodeError) as e:
            packed.decode_precompute(packed.encode_precompute(r))
        assert e.value.reason == "not_finite"
    i8 = np.zeros((2, 1), np.int8)
    for c in (
        _chunk(vectors=two.astype(np.float16)[:, None]),
        _chunk(vectors=i8, scales=two),
        _chunk(state=f16),
        _chunk(profile=f16),
    ):
        with pytest.raises(DecodeError) as e:
            packed.decode_embedding(packed.encode_embedding(c))
        assert e.value.reason == "not_finite"


def test_large_numbers_are_finite() -> None:
    r = _request(scores=np.array([3e38, -3e38], np.float32))
    same(r, packed.decode_precompute(packed.encode_precompute(r)))
    c = _chunk(state=np.array([65504, -65504], np.float16))
    same(c, packed.decode_embedding(packed.encode_embedding(c)))


@pytest.mark.parametrize("ts", [-2, MAX_TS + 1, 2**63 - 1, -(2**63)])
def test_history_times_out_of_range(ts: int) -> None:
    with pytest.raises(DecodeError) as e:
        packed.decode_precompute(packed.encode_precompute(_request(history_ts=np.array([ts], np.int64))))
    assert e.value.reason == "time_out_of_range"


def test_event_id_that_is_not_utf8() -> None:
    for data, decode in (
        (packed.encode_precompute(_request()), packed.decode_precompute),
        (packed.encode_embedding(_chunk()), packed.decode_embedding),
    ):
        for end in (b"\xff\xff", b"\xed\xa0"):
            with pytest.raises(DecodeError) as e:
                decode(data[:-2] + end)
            assert e.value.reason == "not_utf8"


def test_items_of_a_chunk_must_ascend() -> None:
    with pytest.raises(ValueError, match="ascending"):
        packed.encode_embedding(_chunk(items=np.array([5, 5], np.uint64)))
    data = bytearray(packed.encode_embedding(_chunk()))
    data[56:64] = b"\xff" * 8
    with pytest.raises(DecodeError) as e:
        packed.decode_embedding(bytes(data))
    assert e.value.reason == "not_sorted"


@pytest.mark.parametrize(
    "over",
    [
        {"scores": np.zeros(3, np.float32)},
        {"item_features": np.zeros((1, 3), np.float32)},
        {"item_features": np.zeros(2, np.float32)},
        {"history_ts": np.zeros(2, np.int64)},
        {"history_kind": np.zeros(2, np.uint8)},
        {"event_id": "x" * 70_000},
        {"event_id": "\ud800"},
        {"user": -1},
        {"user": 2**64},
        {"request_features": np.zeros(70_000, np.float32)},
        {"items": np.zeros(1 << 20, np.uint64), "scores": np.zeros(1 << 20), "item_features": np.zeros((0, 1 << 20))},
    ],
)
def test_requests_that_cannot_be_written(over: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        packed.encode_precompute(_request(**over))


@pytest.mark.parametrize(
    "over",
    [
        {"topics": np.zeros(3, np.uint32)},
        {"vectors": np.zeros((3, 1), np.float16)},
        {"vectors": np.zeros(2, np.float16)},
        {"vectors": np.zeros((2, 1), np.float32)},
        {"vectors": np.zeros((2, 1), np.int8)},
        {"scales": np.zeros(2, np.float32)},
        {"vectors": np.zeros((2, 1), np.int8), "scales": np.zeros(3, np.float32)},
        {"event_id": "x" * 70_000},
        {"model": -1},
        {"state": np.zeros(70_000, np.float16)},
    ],
)
def test_chunks_that_cannot_be_written(over: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        packed.encode_embedding(_chunk(**over))
