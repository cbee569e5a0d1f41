"""`ReferenceStore`: the store's contract in plain Python. Slow, in memory, and meant to be obviously right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from state.answers import empty_lookup
from state.api import I64, U32, U64, ApplyResult, ChangelogRecord, Lookup, StoreDims, StoreSettings
from state.chunk import decode_chunk
from topics.errors import DecodeError, StoreError
from topics.packed import EmbeddingChunk


class ReferenceStore:
    def __init__(self, settings: StoreSettings = StoreSettings()) -> None:
        self.settings = settings
        self.position: int | None = None
        self.clock_ms = -1
        self.chunks: dict[int, dict[tuple[int, int], EmbeddingChunk]] = {}
        """by user, then by event time and changelog offset"""

    @property
    def _floor(self) -> int:
        return self.clock_ms - self.settings.grace_ms if self.clock_ms >= 0 else -(1 << 62)

    def _dead(self, ts_ms: int) -> bool:
        return ts_ms + max(self.settings.ttl_ms, self.settings.window_ms) <= self._floor

    def apply(self, records: Sequence[ChangelogRecord], next_offset: int | None = None) -> ApplyResult:
        result = ApplyResult(0, 0, 0, [])
        for r in records:
            try:
                chunk = decode_chunk(r.value)
            except DecodeError as e:
                result.rejected.append((r.offset, e.reason))
                continue
            if self._dead(chunk.ts_ms):
                result.expired += 1
                continue
            self.chunks.setdefault(chunk.user, {})[chunk.ts_ms, r.offset] = chunk
            result.applied += 1
            result.pairs += len(chunk.items)
        if next_offset is None and records:
            next_offset = records[-1].offset + 1
        if next_offset is not None:
            self.position = next_offset if self.position is None else max(self.position, next_offset)
        return result

    def lookup(
        self, users: U64, splits: I64, items: U64, topics: U32, now_ms: I64, model: int, dims: StoreDims
    ) -> Lookup:
        ttl, window = self.settings.ttl_ms, self.settings.window_ms
        out = empty_lookup(len(users), len(items), dims)
        for b, user in enumerate(users.tolist()):
            now = int(now_ms[b])
            at = max(now, self._floor)
            newest_first = [
                chunk
                for (ts, _), chunk in sorted(self.chunks.get(user, {}).items(), key=lambda c: c[0], reverse=True)
                if ts <= now and chunk.model == model and _fits(chunk, dims)
            ]
            fresh = [chunk for chunk in newest_first if at < chunk.ts_ms + ttl]
            for chunk in [c for c in fresh if len(c.state)][:1]:
                out.state[b], out.state_ts_ms[b], out.fingerprint[b] = chunk.state, chunk.ts_ms, chunk.fingerprint
            for chunk in [c for c in fresh if len(c.profile)][:1]:
                out.profile[b] = chunk.profile
            pairs: dict[int, tuple[EmbeddingChunk, int]] = {}
            for chunk in newest_first:
                for i, item in enumerate(chunk.items.tolist()):
                    pairs.setdefault(item, (chunk, i))
            lasting = [(c, i) for c, i in pairs.values() if at < c.ts_ms + window]
            if lasting:
                out.aggregate[b] = _mean(lasting)
                out.aggregate_count[b] = len(lasting)
                out.aggregate_ts_ms[b] = max(c.ts_ms for c, _ in lasting)
            for j in range(int(splits[b]), int(splits[b + 1])):
                same = [(c, i) for c, i in lasting if c.topics[i] == topics[j]]
                if same:
                    out.topic[j] = _mean(same)
                    out.topic_count[j] = len(same)
                    out.topic_ts_ms[j] = max(c.ts_ms for c, _ in same)
                found = pairs.get(int(items[j]))
                if found is not None and at < found[0].ts_ms + ttl:
                    out.vectors[j] = _vector(*found)
                    out.ts_ms[j] = found[0].ts_ms
                    out.pair_fingerprint[j] = found[0].fingerprint
        return out

    def expire(self, clock_ms: int) -> int:
        """Segments are RocksDB's affair: always 0 here."""
        self.clock_ms = max(self.clock_ms, clock_ms)
        for user, chunks in self.chunks.items():
            self.chunks[user] = {k: c for k, c in chunks.items() if not self._dead(c.ts_ms)}
        return 0

    def stats(self) -> dict[str, int]:
        position = -1 if self.position is None else self.position
        return {"position": position, "clock_ms": self.clock_ms, "chunks": sum(map(len, self.chunks.values()))}

    def checkpoint(self, path: Path) -> None:
        raise StoreError("the reference store lives in memory only: checkpoint a RocksStore")

    def close(self) -> None:
        pass


def _fits(c: EmbeddingChunk, dims: StoreDims) -> bool:
    """Whether the chunk's lengths are the model's; a chunk may leave out its pairs, its state or its profile."""
    d, s, p = c.vectors.shape[1], len(c.state), len(c.profile)
    return (d == dims.dim or (d == len(c.items) == 0)) and s in (0, dims.state) and p in (0, dims.profile)


def _vector(c: EmbeddingChunk, i: int) -> npt.NDArray[np.float32]:
    v = c.vectors[i].astype(np.float32)
    return v if c.scales is None else v * c.scales[i]


def _mean(pairs: list[tuple[EmbeddingChunk, int]]) -> npt.NDArray[np.float64]:
    return np.mean([_vector(c, i).astype(np.float64) for c, i in pairs], axis=0)
