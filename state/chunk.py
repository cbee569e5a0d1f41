"""Keys and values of chunks.

A key is 24 bytes, big-endian so that a user's chunks lie together in time order: user hash (u64), event time in ms
(u64), changelog offset (u64). The value is the changelog record as it came (`topics.packed`, kind ``E``), so that
writing a record twice writes the same bytes to the same place.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from state import kernels
from state.api import I64, U64, ChangelogRecord
from state.cache import PADS
from topics.errors import DecodeError
from topics.events import MAX_TS, MIN_TS
from topics.packed import EmbeddingChunk, decode_embedding

KEY = struct.Struct(">QQQ")
USER = struct.Struct(">Q")


def decode_chunk(value: bytes | None) -> EmbeddingChunk:
    """A record that may enter a store. Raises `DecodeError`: beside the format, the user must be set, the time in
    range and every number finite, since one NaN would spoil a user's mean for a day."""
    chunk = decode_embedding(value)
    if chunk.user == 0:
        raise DecodeError("empty_user", "user hash 0")
    if not MIN_TS <= chunk.ts_ms <= MAX_TS:
        raise DecodeError("time_out_of_range", f"ts = {chunk.ts_ms} ms; expected {MIN_TS}..{MAX_TS}")
    for name, column in (
        ("vectors", chunk.vectors if chunk.scales is None else chunk.scales),
        ("state", chunk.state),
        ("profile", chunk.profile),
    ):
        if not np.isfinite(column).all():
            raise DecodeError("not_finite", f"{name} have a number that is not finite")
    return chunk


@dataclass(slots=True)
class Batch:
    """Good records of a changelog batch in columns; `records` are their positions in it."""

    records: I64
    users: U64
    ts_ms: I64
    offsets: I64
    pairs: I64
    starts: I64
    """byte offset of each record in `words`"""
    words: U64
    """all records, each padded to 8 bytes"""
    keys: bytes
    """24 bytes each"""
    rejected: list[tuple[int, str]]

    def take(self, mask: np.ndarray) -> Batch:
        keys = np.frombuffer(self.keys, np.uint8).reshape(-1, KEY.size)[mask].tobytes()
        return Batch(
            self.records[mask], self.users[mask], self.ts_ms[mask], self.offsets[mask], self.pairs[mask],
            self.starts[mask], self.words, keys, self.rejected,
        )  # fmt: skip


def parse_batch(records: Sequence[ChangelogRecord]) -> Batch:
    """Checks and columns of a batch of embedding chunks."""
    return parse_with(records, kernels.scan, _facts)


def _facts(value: bytes | None) -> tuple[int, int, int]:
    chunk = decode_chunk(value)
    return chunk.user, chunk.ts_ms, len(chunk.items)


def parse_with(
    records: Sequence[ChangelogRecord],
    scan: Callable[..., None],
    facts: Callable[[bytes | None], tuple[int, int, int]],
) -> Batch:
    """One compiled pass, `scan` (arguments as `kernels.scan`), and a closer look at the records that it is not sure of:
    `facts` gives (user, event time, pairs) or raises `DecodeError`."""
    n = len(records)
    parts: list[bytes] = []
    sizes = np.empty(n, np.int64)
    for i, r in enumerate(records):
        value = r.value or b""
        size = len(value)
        sizes[i] = size
        parts.append(value)
        parts.append(PADS[-size & 7])
    data = b"".join(parts)
    words: U64 = np.frombuffer(data or b"\0" * 8, np.uint64)
    starts = np.zeros(n, np.int64)
    np.cumsum((sizes[:-1] + 7) & ~7, out=starts[1:])
    users = np.zeros(n, np.uint64)
    ts, pairs = np.zeros((2, n), np.int64)
    fine = np.zeros(n, np.bool_)
    scan(words, starts, sizes, MAX_TS, users, ts, pairs, fine)
    offsets = np.array([r.offset for r in records], np.int64)
    rejected: list[tuple[int, str]] = []
    for i in np.flatnonzero(~fine).tolist():
        try:
            users[i], ts[i], pairs[i] = facts(records[i].value)
            fine[i] = True
        except DecodeError as e:
            rejected.append((records[i].offset, e.reason))
    keys = np.empty((n, 3), ">u8")
    keys[:, 0], keys[:, 1], keys[:, 2] = users, ts, offsets
    batch = Batch(np.arange(n), users, ts, offsets, pairs, starts, words, keys.tobytes(), rejected)
    return batch if fine.all() else batch.take(fine)
