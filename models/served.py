"""Slots as serving would fill them, for training and evaluation.

The candidates events of a log go through the FM into a state store, as embedder and changelog would do; then every
impression looks up what was visible at its time. A look-up is a pure function of event time (`state.api`), so the
order of writing does not matter and a delay from event to servable vector is a look-up that much earlier.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from models.api import F32, I64, PairBatch, Runtime, Slots
from models.features import fingerprints, requests, select
from models.slots import build_slots
from state.api import ChangelogRecord, EmbeddingStore, StoreDims, StoreSettings
from topics.packed import EmbeddingChunk, encode_embedding

REQUESTS = 512
F16_MAX = 65_504.0


class ServedStore:
    """A store in a temporary folder, filled from candidates events."""

    def __init__(self, runtime: Runtime, settings: StoreSettings = StoreSettings(cache_bytes=256 << 20)) -> None:
        from state.store import RocksStore

        info = runtime.info
        self.runtime = runtime
        self.dims = StoreDims(info.dim, info.state_dim, info.profile_dim)
        self._folder = tempfile.TemporaryDirectory(prefix="solaris-served-")
        self.store: EmbeddingStore = RocksStore(Path(self._folder.name) / "store", settings)
        self._offset = 0
        self.pairs = 0
        self.states = 0

    def add(self, candidates: PairBatch, progress: Callable[[int], None] | None = None) -> None:
        """Embeds all pairs and states of the candidates events [B] and writes them."""
        info = self.runtime.info
        for start in range(0, candidates.requests, REQUESTS):
            part = requests(candidates, start, min(start + REQUESTS, candidates.requests))
            part = select(part, _first_of_each(part))
            prints = fingerprints(part)
            states = _f16(self.runtime.user_state(part))
            vectors = _f16(self.runtime.embed(part))
            _, topics = self.runtime.item_vectors(part.items, part.item_features)
            records = []
            for b in range(part.requests):
                at = np.arange(part.splits[b], part.splits[b + 1])
                at = at[np.argsort(part.items[at], kind="stable")]
                chunk = EmbeddingChunk(
                    user=int(part.users[b]), ts_ms=int(part.ts_ms[b]), model=info.fm_hash,
                    fingerprint=int(prints[b]), items=part.items[at], topics=topics[at], vectors=vectors[at],
                    scales=None, state=states[b], profile=np.zeros(0, np.float16), event_id="",
                )  # fmt: skip
                records.append(ChangelogRecord(self._offset, encode_embedding(chunk)))
                self._offset += 1
            self.store.apply(records)
            self.pairs += part.pairs
            self.states += part.requests
            if progress is not None:
                progress(part.requests)

    def slots(self, impressions: PairBatch, delay_ms: I64) -> Slots:
        """[N] slots of the impressions when vectors become servable `delay_ms` [B] after their event."""
        vectors, topics = self.runtime.item_vectors(impressions.items, impressions.item_features)
        found = self.store.lookup(
            impressions.users, impressions.splits, impressions.items, topics, impressions.ts_ms - delay_ms,
            self.runtime.info.fm_hash, self.dims,
        )  # fmt: skip
        return build_slots(found, impressions, vectors, self.runtime, impressions.ts_ms)

    def close(self) -> None:
        self.store.close()
        self._folder.cleanup()


def fresh_slots(runtime: Runtime, impressions: PairBatch) -> Slots:
    """Slots with an embedding and a state computed at the impression itself: the ceiling, not what serving sees."""
    info = runtime.info
    slots = Slots.empty(impressions.pairs, info.dim, info.dots)
    if "direct" in info.slots:
        slots.direct = _f16(runtime.embed(impressions)).astype(np.float32)
        slots.direct_age_ms[:] = 0
    if "state" in info.slots and info.state_dim:
        vectors, _ = runtime.item_vectors(impressions.items, impressions.item_features)
        state = _f16(runtime.user_state(impressions)).astype(np.float32)
        slots.state = runtime.dots(state, vectors, impressions.splits)
        slots.state_age_ms[:] = 0
    return slots


def _first_of_each(batch: PairBatch) -> np.ndarray:
    """[N] the first of equal items of a request: a chunk has each item once."""
    row = np.repeat(np.arange(batch.requests), np.diff(batch.splits))
    order = np.lexsort((np.arange(batch.pairs), batch.items, row))
    again = (batch.items[order][1:] == batch.items[order][:-1]) & (row[order][1:] == row[order][:-1])
    keep = np.ones(batch.pairs, bool)
    keep[order[1:][again]] = False
    return keep


def _f16(values: F32) -> np.ndarray:
    return np.clip(values, -F16_MAX, F16_MAX).astype(np.float16)
