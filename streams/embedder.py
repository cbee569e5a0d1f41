"""The embedder's core: precompute requests in, embedding chunks out. No Kafka, no wall clock, no threads.

Two lanes, so that a backlog of pairs never delays a user's state:

- `states`: one cheap user-tower pass per request -> a chunk with the state and the profile, no pairs;
- `pairs`: the heavy pass over the accepted pairs that are not fresh -> a chunk with vectors, no state.

A pair is *fresh*, and not computed again (counted as saved), when the store or an earlier request of this batch has it
at this model version, visible and live at the request's event time and, under the policy ``on_change``, computed from
the same history (equal fingerprints). Under ``ttl`` being live is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from models.api import PairBatch, Runtime
from models.features import Encoder, fingerprints, select
from state.api import EmbeddingStore, StoreDims
from topics.packed import EmbeddingChunk, PrecomputeRequest

Refresh = Literal["on_change", "ttl"]
I64 = npt.NDArray[np.int64]
_NO_U64 = np.zeros(0, np.uint64)
_NO_U32 = np.zeros(0, np.uint32)
_NO_F16 = np.zeros(0, np.float16)
F16_MAX = 65_504.0


@dataclass(slots=True)
class Embedder:
    runtime: Runtime
    encoder: Encoder
    refresh: Refresh = "on_change"
    ttl_ms: int = 6 * 3_600_000
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def dims(self) -> StoreDims:
        info = self.runtime.info
        return StoreDims(info.dim, info.state_dim, info.profile_dim)

    def states(self, requests: Sequence[PrecomputeRequest]) -> list[EmbeddingChunk | None]:
        """A state chunk per request, aligned; None where the FM gave a state that is not finite (counted)."""
        if not requests:
            return []
        info = self.runtime.info
        batch = self.encoder.from_precompute(requests)
        batch = select(batch, np.zeros(batch.pairs, bool))
        prints = fingerprints(batch)
        states = _to_f16(self.runtime.user_state(batch))
        finite = _finite_rows(states)
        self.counters["states"] += int(finite.sum())
        self.counters["states_not_finite"] += int((~finite).sum())
        out: list[EmbeddingChunk | None] = []
        no_vectors = np.zeros((0, info.dim), np.float16)
        for b, r in enumerate(requests):
            if not finite[b]:
                out.append(None)
                continue
            profile = _to_f16(r.profile) if len(r.profile) == info.profile_dim else _NO_F16
            chunk = EmbeddingChunk(
                user=r.user, ts_ms=r.ts_ms, model=info.fm_hash, fingerprint=int(prints[b]), items=_NO_U64,
                topics=_NO_U32, vectors=no_vectors, scales=None, state=states[b],
                profile=profile if np.isfinite(profile).all() else _NO_F16, event_id=r.event_id,
            )  # fmt: skip
            out.append(chunk)
        return out

    def pairs(
        self,
        requests: Sequence[PrecomputeRequest],
        partitions: Sequence[int],
        stores: Mapping[int, EmbeddingStore],
    ) -> tuple[list[EmbeddingChunk | None], list[int]]:
        """-> (a pair chunk per request, aligned, None where nothing was left to embed; the number of pairs per request
        whose vector was not finite and is left out)."""
        bad = [0] * len(requests)
        if not requests:
            return [], bad
        batch = self.encoder.from_precompute(requests)
        prints = fingerprints(batch)
        wanted = self._not_fresh(batch, prints, partitions, stores)
        self.counters["requests"] += len(requests)
        self.counters["pairs_accepted"] += batch.pairs
        self.counters["pairs_saved"] += batch.pairs - int(wanted.sum())
        todo = select(batch, wanted)
        vectors = _to_f16(self.runtime.embed(todo)) if todo.pairs else np.zeros((0, self.dims.dim), np.float16)
        topics = self._topics(todo)
        finite = _finite_rows(vectors)
        self.counters["pairs_embedded"] += int(finite.sum())
        self.counters["pairs_not_finite"] += int((~finite).sum())
        out: list[EmbeddingChunk | None] = []
        for b, r in enumerate(requests):
            at = np.arange(todo.splits[b], todo.splits[b + 1])
            bad[b] = int((~finite[at]).sum())
            at = at[finite[at]]
            if not len(at):
                out.append(None)
                continue
            at = at[np.argsort(todo.items[at], kind="stable")]
            chunk = EmbeddingChunk(
                user=r.user, ts_ms=r.ts_ms, model=self.runtime.info.fm_hash, fingerprint=int(prints[b]),
                items=todo.items[at], topics=topics[at], vectors=vectors[at], scales=None,
                state=_NO_F16, profile=_NO_F16, event_id=r.event_id,
            )  # fmt: skip
            out.append(chunk)
        return out, bad

    def _topics(self, batch: PairBatch) -> npt.NDArray[np.uint32]:
        if not batch.pairs:
            return _NO_U32
        items, inverse = np.unique(batch.items, return_inverse=True)
        return self.runtime.item_vectors(items, self.encoder.catalogue.features(items))[1][inverse]

    def _not_fresh(
        self,
        batch: PairBatch,
        prints: npt.NDArray[np.uint64],
        partitions: Sequence[int],
        stores: Mapping[int, EmbeddingStore],
    ) -> npt.NDArray[np.bool_]:
        """[N] pairs to compute: neither in the store nor earlier in this batch."""
        rows = np.repeat(np.arange(batch.requests), np.diff(batch.splits))
        known_ts = np.full(batch.pairs, -1, np.int64)
        known_print = np.zeros(batch.pairs, np.uint64)
        parts = np.asarray(partitions)
        for p in np.unique(parts):
            mine = np.flatnonzero(parts == p)
            sizes = np.diff(batch.splits)[mine]
            at = np.flatnonzero(parts[rows] == p)
            found = stores[int(p)].lookup(
                batch.users[mine], np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), batch.items[at],
                np.zeros(len(at), np.uint32), batch.ts_ms[mine], self.runtime.info.fm_hash, self.dims,
            )  # fmt: skip
            known_ts[at], known_print[at] = found.ts_ms, found.pair_fingerprint
        want = known_ts < 0
        if self.refresh == "on_change":
            want |= known_print != prints[rows]
        self._within_batch(batch, prints, rows, known_ts, known_print, want)
        return want

    def _within_batch(
        self,
        batch: PairBatch,
        prints: npt.NDArray[np.uint64],
        rows: npt.NDArray[np.int64],
        known_ts: I64,
        known_print: npt.NDArray[np.uint64],
        want: npt.NDArray[np.bool_],
    ) -> None:
        """Decides pairs that occur more than once in the batch as if their requests had come one by one."""
        users = batch.users[rows]
        order = np.lexsort((batch.items, users))
        same = (users[order][1:] == users[order][:-1]) & (batch.items[order][1:] == batch.items[order][:-1])
        if not same.any():
            return
        repeated = np.zeros(batch.pairs, bool)
        repeated[order[1:][same]] = True
        repeated[order[:-1][same]] = True
        computed: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i in np.flatnonzero(repeated):
            ts, mark = int(batch.ts_ms[rows[i]]), int(prints[rows[i]])
            earlier = computed.setdefault((int(users[i]), int(batch.items[i])), [])
            newest = max(
                (
                    c
                    for c in (*earlier, (int(known_ts[i]), int(known_print[i])))
                    if 0 <= c[0] <= ts < c[0] + self.ttl_ms
                ),
                key=lambda c: c[0],
                default=None,
            )
            want[i] = newest is None or (self.refresh == "on_change" and newest[1] != mark)
            if want[i]:
                earlier.insert(0, (ts, mark))  # of equal times the later one is the newest, and max takes the first


def _to_f16(a: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """float16, large values clipped to its range instead of becoming infinite; NaN and infinity stay for the check."""
    finite = np.isfinite(a)
    return np.where(finite, np.clip(a, -F16_MAX, F16_MAX), a).astype(np.float16)


def _finite_rows(a: npt.NDArray[np.float16]) -> npt.NDArray[np.bool_]:
    return np.asarray(np.isfinite(a).all(axis=1))
