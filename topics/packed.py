"""Packed records between our own roles: little-endian columns that decode as numpy views, without copying.

Both kinds begin with the same 8 bytes: magic ``SLR`` (3 bytes), kind (u8: ``P`` or ``E``), format version (u8),
flags (u8), two reserved zero bytes. Columns follow the header, widest first, so every column is aligned when the
buffer is. A record ends with its last column: missing or extra bytes are an error. So is a number that is not finite
or a time that no event may have: decoders are the one gate to the stores and the models.

``P`` precompute request, verifier -> embedder (version 1), one per user event:

    ======  ========================  ====================================================================
    offset  type                      field
    ======  ========================  ====================================================================
    0       8 bytes                   magic, kind, version, flags (0), reserved
    8       u64                       user hash
    16      i64                       event time, ms
    24      u64                       feature spec hash (`models.api.FeatureSpec.hash`): how the columns were made
    32      u32                       n items
    36      u32                       h history entries
    40      u16                       request features r
    42      u16                       item features c
    44      u16                       profile length p (VM user vector)
    46      u16                       event id bytes k
    48      u64[n]                    item hashes, most valuable first
            u64[h]                    history item hashes, oldest first, the triggering event last
            i64[h]                    history times, ms, or -1 where unknown
            f32[n]                    verifier scores
            f32[c][n]                 item feature columns
            f32[r]                    request features
            f32[p]                    profile vector
            u8[h]                     history kinds
            u8[k]                     event id, UTF-8
    ======  ========================  ====================================================================

``E`` embedding chunk, embedder -> stores (version 1), one per user and batch. flags bit 0: int8 vectors:

    ======  ========================  ====================================================================
    offset  type                      field
    ======  ========================  ====================================================================
    0       8 bytes                   magic, kind, version, flags, reserved
    8       u64                       user hash
    16      i64                       event time of the history used, ms
    24      u64                       FM version hash
    32      u64                       history fingerprint (state-moved test of the skip policy)
    40      u32                       n pairs
    44      u16                       dim d
    46      u16                       user state length s
    48      u16                       profile length p
    50      u16                       event id bytes k
    52      u32                       reserved (0)
    56      u64[n]                    item hashes, strictly ascending
            u32[n]                    topic ids
            f32[n]                    scales, only with int8
            f16[n][d] or i8[n][d]     vectors
            f16[s]                    user state
            f16[p]                    profile vector
            u8[k]                     event id, UTF-8
    ======  ========================  ====================================================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from topics.errors import DecodeError
from topics.events import MAX_TS, MIN_TS
from topics.packed_format import (
    MAGIC,
    VERSION,
    Bytes,
    check_head,
    check_size,
    check_time,
    column_bytes,
    joined,
    packed_head,
)

KIND_PRECOMPUTE = ord("P")
KIND_EMBEDDING = ord("E")
FLAG_INT8 = 1

_P = struct.Struct("<3sBBBHQqQIIHHHH")
_E = struct.Struct("<3sBBBHQqQQIHHHHI")
assert _P.size == 48
assert _E.size == 56

_ONE = np.uint64(1)
_EXPONENT_16 = np.uint16(0x7C00)
_EXPONENT_32 = np.uint32(0x7F800000)

F32 = npt.NDArray[np.float32]
F16 = npt.NDArray[np.float16]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]


@dataclass(slots=True)
class PrecomputeRequest:
    user: int
    """user hash"""
    ts_ms: int
    spec: int
    items: U64
    """uint64[n], most valuable first"""
    scores: F32
    """float32[n]"""
    item_features: F32
    """float32[c, n]"""
    history: U64
    """uint64[h], oldest first"""
    history_ts: I64
    """int64[h], ms, -1 unknown"""
    history_kind: U8
    """uint8[h]"""
    request_features: F32
    """float32[r]"""
    profile: F32
    """float32[p]"""
    event_id: str


@dataclass(slots=True)
class EmbeddingChunk:
    user: int
    """user hash"""
    ts_ms: int
    model: int
    """FM version hash"""
    fingerprint: int
    items: U64
    """uint64[n], strictly ascending"""
    topics: U32
    """uint32[n]"""
    vectors: npt.NDArray[Any]
    """float16[n, d], or int8[n, d] with `scales`"""
    scales: F32 | None
    """float32[n] with int8, else None"""
    state: F16
    """float16[s]"""
    profile: F16
    """float16[p]"""
    event_id: str


def encode_precompute(r: PrecomputeRequest) -> bytes:
    """Raises ValueError when columns do not line up or do not fit the format."""
    n, h = len(r.items), len(r.history)
    c = r.item_features.shape[0] if r.item_features.ndim == 2 else -1
    event_id = r.event_id.encode()
    if r.item_features.shape != (c, n) or len(r.scores) != n or len(r.history_ts) != h or len(r.history_kind) != h:
        raise ValueError("precompute columns do not line up")
    head = packed_head(
        _P, MAGIC, KIND_PRECOMPUTE, VERSION, 0, 0,
        r.user, r.ts_ms, r.spec, n, h, len(r.request_features), c, len(r.profile), len(event_id),
    )  # fmt: skip
    return joined(
        (
            head,
            column_bytes(r.items, "<u8"),
            column_bytes(r.history, "<u8"),
            column_bytes(r.history_ts, "<i8"),
            column_bytes(r.scores, "<f4"),
            column_bytes(r.item_features, "<f4"),
            column_bytes(r.request_features, "<f4"),
            column_bytes(r.profile, "<f4"),
            column_bytes(r.history_kind, "u1"),
            event_id,
        )
    )


def decode_precompute(data: Bytes | None) -> PrecomputeRequest:
    """Views into `data`; nothing is copied but the event id. Raises `DecodeError`."""
    data = check_head(data, KIND_PRECOMPUTE, _P.size, flags_known=0)
    _, _, _, _, _, user, ts, spec, n, h, r, c, p, k = _P.unpack_from(data, 0)
    want = _P.size + 8 * n + 16 * h + 4 * n + 4 * c * n + 4 * r + 4 * p + h + k
    check_size(data, want)
    check_time(ts)
    o = _P.size
    items = np.frombuffer(data, "<u8", n, o)
    o += 8 * n
    history = np.frombuffer(data, "<u8", h, o)
    o += 8 * h
    history_ts = np.frombuffer(data, "<i8", h, o)
    o += 8 * h
    # -1 becomes 0 and anything below it a huge unsigned number: one bound says both.
    if h and int(np.maximum.reduce(history_ts.view("<u8") + _ONE)) > MAX_TS + 1:
        raise DecodeError("time_out_of_range", f"history times beyond -1 (unknown) or {MIN_TS}..{MAX_TS}")
    _check_f32("scores or features", data, n + c * n + r + p, o)
    scores = np.frombuffer(data, "<f4", n, o)
    o += 4 * n
    item_features = np.frombuffer(data, "<f4", c * n, o).reshape(c, n)
    o += 4 * c * n
    request_features = np.frombuffer(data, "<f4", r, o)
    o += 4 * r
    profile = np.frombuffer(data, "<f4", p, o)
    o += 4 * p
    history_kind = np.frombuffer(data, "u1", h, o)
    o += h
    return PrecomputeRequest(
        user, ts, spec, items, scores, item_features, history, history_ts, history_kind,
        request_features, profile, _event_id(data, o),
    )  # fmt: skip


def request_pairs(data: Bytes | None) -> int:
    """The number of pairs a precompute request says it has, from its header; 0 for what is none."""
    if data is None or len(data) < _P.size or bytes(data[:4]) != MAGIC + bytes([KIND_PRECOMPUTE]):
        return 0
    return int(_P.unpack_from(data, 0)[8])


def encode_embedding(e: EmbeddingChunk) -> bytes:
    """Raises ValueError when columns do not line up, are not sorted, or have the wrong dtype."""
    n = len(e.items)
    int8 = e.vectors.dtype == np.int8
    if e.vectors.ndim != 2 or e.vectors.shape[0] != n or len(e.topics) != n:
        raise ValueError("embedding columns do not line up")
    if int8 != (e.scales is not None) or (e.scales is not None and len(e.scales) != n):
        raise ValueError("int8 vectors need one scale each, float16 vectors none")
    if not int8 and e.vectors.dtype != np.float16:
        raise ValueError(f"vectors are {e.vectors.dtype}; expected float16 or int8")
    if n > 1 and not bool((e.items[1:] > e.items[:-1]).all()):
        raise ValueError("item hashes are not strictly ascending")
    event_id = e.event_id.encode()
    head = packed_head(
        _E, MAGIC, KIND_EMBEDDING, VERSION, FLAG_INT8 if int8 else 0, 0,
        e.user, e.ts_ms, e.model, e.fingerprint, n, e.vectors.shape[1], len(e.state), len(e.profile),
        len(event_id), 0,
    )  # fmt: skip
    return joined(
        (
            head,
            column_bytes(e.items, "<u8"),
            column_bytes(e.topics, "<u4"),
            b"" if e.scales is None else column_bytes(e.scales, "<f4"),
            column_bytes(e.vectors, "i1" if int8 else "<f2"),
            column_bytes(e.state, "<f2"),
            column_bytes(e.profile, "<f2"),
            event_id,
        )
    )


def decode_embedding(data: Bytes | None) -> EmbeddingChunk:
    """Views into `data`; nothing is copied but the event id. Raises `DecodeError`."""
    data = check_head(data, KIND_EMBEDDING, _E.size, flags_known=FLAG_INT8)
    _, _, _, flags, _, user, ts, model, fingerprint, n, d, s, p, k, _ = _E.unpack_from(data, 0)
    int8 = bool(flags & FLAG_INT8)
    want = _E.size + 12 * n + (4 * n + n * d if int8 else 2 * n * d) + 2 * s + 2 * p + k
    check_size(data, want)
    check_time(ts)
    o = _E.size
    items = np.frombuffer(data, "<u8", n, o)
    o += 8 * n
    topics = np.frombuffer(data, "<u4", n, o)
    o += 4 * n
    scales = None
    vectors: npt.NDArray[Any]
    if int8:
        scales = np.frombuffer(data, "<f4", n, o)
        _check_f32("scales", data, n, o)
        o += 4 * n
        vectors = np.frombuffer(data, "i1", n * d, o).reshape(n, d)
        o += n * d
    else:
        vectors = np.frombuffer(data, "<f2", n * d, o).reshape(n, d)
        _check_f16("vectors, state or profile", data, n * d + s + p, o)  # the three lie together
        o += 2 * n * d
    if n > 1 and not bool((items[1:] > items[:-1]).all()):
        raise DecodeError("not_sorted", "item hashes are not strictly ascending")
    if int8:
        _check_f16("state or profile", data, s + p, o)
    state = np.frombuffer(data, "<f2", s, o)
    o += 2 * s
    profile = np.frombuffer(data, "<f2", p, o)
    o += 2 * p
    return EmbeddingChunk(
        user, ts, model, fingerprint, items, topics, vectors, scales, state, profile, _event_id(data, o)
    )


def _check_f32(what: str, data: Bytes, count: int, offset: int) -> None:
    # By the bits: all exponent bits set means infinity or NaN. numpy's own test takes two calls and is slow on float16.
    if count and int(np.maximum.reduce(np.frombuffer(data, "<u4", count, offset) & _EXPONENT_32)) == _EXPONENT_32:
        raise DecodeError("not_finite", f"{what} have a value that is not finite")


def _check_f16(what: str, data: Bytes, count: int, offset: int) -> None:
    if count and int(np.maximum.reduce(np.frombuffer(data, "<u2", count, offset) & _EXPONENT_16)) == _EXPONENT_16:
        raise DecodeError("not_finite", f"{what} have a value that is not finite")


def _event_id(data: Bytes, offset: int) -> str:
    try:
        return bytes(data[offset:]).decode()
    except UnicodeDecodeError as e:
        raise DecodeError("not_utf8", f"event id: {e}") from None
