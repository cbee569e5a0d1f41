"""A user's embedding chunks as one value of a peer's state store, and what they say about the ads of an impression.

The value is each chunk's record (`topics.packed`, kind E) with its length (u32) before it, oldest arrival first. The
look-up is plain numpy, as a Quix Streams application would have it, and keeps the contract of `state.api`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from state.answers import empty_lookup
from state.api import I64, U32, U64, Lookup, StoreDims, StoreSettings
from topics.packed import EmbeddingChunk, decode_embedding

_LENGTH = struct.Struct("<I")
_TS = struct.Struct("<q")
_TS_AT = 16


def add(value: bytes, record: bytes, settings: StoreSettings) -> bytes:
    """Adds a chunk and leaves out those that no look-up at or after its event time can see: the store's TTL.

    Raises `DecodeError` for what is no chunk.
    """
    dead = decode_embedding(record).ts_ms - max(settings.ttl_ms, settings.window_ms)
    kept, at = [], 0
    while at < len(value):
        end = at + _LENGTH.size + _LENGTH.unpack_from(value, at)[0]
        if _TS.unpack_from(value, at + _LENGTH.size + _TS_AT)[0] > dead:
            kept.append(value[at:end])
        at = end
    return b"".join((*kept, _LENGTH.pack(len(record)), record))


def chunks(value: bytes) -> list[EmbeddingChunk]:
    """In the order they were added."""
    out, at = [], 0
    while at < len(value):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(value, at)[0]
        out.append(decode_embedding(value[begin:at]))
    return out


@dataclass(slots=True)
class OneUser:
    """`state.api.EmbeddingStore.lookup` of one user at a time, over that user's chunks."""

    value: bytes
    settings: StoreSettings

    def lookup(
        self, users: U64, splits: I64, items: U64, topics: U32, now_ms: I64, model: int, dims: StoreDims
    ) -> Lookup:
        out = empty_lookup(len(users), len(items), dims)
        now = int(now_ms[0])
        seen = [c for c in chunks(self.value) if c.ts_ms <= now and c.model == model and _fits(c, dims)]
        # Newest first; of equal times the later arrival.
        newest_first = [c for _, c in sorted(enumerate(seen), key=lambda k: (k[1].ts_ms, k[0]), reverse=True)]
        fresh = [c for c in newest_first if now < c.ts_ms + self.settings.ttl_ms]
        for c in [c for c in fresh if len(c.state)][:1]:
            out.state[0], out.state_ts_ms[0], out.fingerprint[0] = c.state, c.ts_ms, c.fingerprint
        for c in [c for c in fresh if len(c.profile)][:1]:
            out.profile[0] = c.profile
        paired = [c for c in newest_first if len(c.items)]
        if paired:
            self._pairs(out, paired, items, topics, now)
        return out

    def _pairs(self, out: Lookup, paired: list[EmbeddingChunk], items: U64, topics: U32, now: int) -> None:
        sizes = [len(c.items) for c in paired]
        # `unique` keeps the first of equal items: the newest.
        own, first = np.unique(np.concatenate([c.items for c in paired]), return_index=True)
        ts = np.repeat([c.ts_ms for c in paired], sizes)[first]
        vectors = np.concatenate([_vectors(c) for c in paired])[first]
        fingerprints = np.repeat(np.array([c.fingerprint for c in paired], np.uint64), sizes)[first]
        topic = np.concatenate([c.topics for c in paired])[first]

        at = np.minimum(np.searchsorted(own, items), len(own) - 1)
        hit = (own[at] == items) & (now < ts[at] + self.settings.ttl_ms)
        out.vectors[hit] = vectors[at[hit]]
        out.ts_ms[hit] = ts[at[hit]]
        out.pair_fingerprint[hit] = fingerprints[at[hit]]

        lasting = now < ts + self.settings.window_ms
        if not lasting.any():
            return
        vectors, ts, topic = vectors[lasting], ts[lasting], topic[lasting]
        out.aggregate[0] = vectors.mean(axis=0, dtype=np.float64)
        out.aggregate_count[0], out.aggregate_ts_ms[0] = len(ts), ts.max()
        by_topic = np.argsort(topic, kind="stable")
        names, starts = np.unique(topic[by_topic], return_index=True)
        counts = np.diff(np.append(starts, len(topic)))
        means = np.add.reduceat(vectors[by_topic], starts, axis=0, dtype=np.float64) / counts[:, None]
        newest = np.maximum.reduceat(ts[by_topic], starts)
        at = np.minimum(np.searchsorted(names, topics), len(names) - 1)
        hit = names[at] == topics
        out.topic[hit] = means[at[hit]]
        out.topic_count[hit] = counts[at[hit]]
        out.topic_ts_ms[hit] = newest[at[hit]]


def _vectors(c: EmbeddingChunk) -> npt.NDArray[np.float32]:
    values = c.vectors.astype(np.float32)
    return values if c.scales is None else values * c.scales[:, None]


def _fits(c: EmbeddingChunk, dims: StoreDims) -> bool:
    d, s, p = c.vectors.shape[1], len(c.state), len(c.profile)
    return (d == dims.dim or (d == len(c.items) == 0)) and s in (0, dims.state) and p in (0, dims.profile)
