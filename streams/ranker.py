"""The ranker's core: impressions in, ranked ads out. No Kafka, no wall clock, no threads.

Per ad every slot of the bundle is filled from one look-up of the user's partition, as of the impression's event time;
the VM takes the slots as input; ads are ordered by pCTR x bid (bid 1 when the impression has none), ties in the order
received. The best slot filled names the ad's source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from models import kernels
from models.api import SLOTS, SOURCES, PairBatch, Runtime
from models.catalogue import Catalogue
from models.features import Encoder
from models.slots import SimilarUsers, fill_slots
from state.api import EmbeddingStore, Lookup, StoreDims
from state.counts import Counts, CountSource
from state.neighbours import Similar
from topics.events import Impression, RankedAds
from topics.ids import sampled

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

_T = TypeVar("_T", bound=np.generic)
_Columns = TypeVar("_Columns", Lookup, Counts)
_SOURCE_NAMES = np.array(SOURCES, object)


@dataclass(slots=True)
class Ranking:
    """Column form of a batch's result; pairs in request order, `order` puts each request's pairs best first."""

    batch: PairBatch
    logit: F32
    """[N]"""
    base: F32
    """[N] logit of the VM alone"""
    score: F32
    """[N] pCTR"""
    source: npt.NDArray[np.int8]
    """[N] index into `SOURCES`"""
    age_ms: I64
    """[N] age of that slot, -1 for none"""
    ages_ms: I64
    """[5, N] by slot, -1 empty"""
    order: I64
    """[N]"""


class SimilarSource(Protocol):
    """`state.neighbours.Neighbours`, or a clustering table behind the same call."""

    def similar(self, profiles: F32, now_ms: I64, users: npt.NDArray[np.uint64] | None = None) -> Similar: ...


class ItemVectors:
    """`fm_item` run once per item and kept, until its record changes or `capacity` is reached."""

    def __init__(self, runtime: Runtime, catalogue: Catalogue, capacity: int = 1 << 20) -> None:
        self._runtime, self._catalogue, self._capacity = runtime, catalogue, capacity
        self._version = catalogue.version
        self._reset()

    def _reset(self) -> None:
        self._keys = np.zeros(1024, np.uint64)
        self._rows = np.zeros(1024, np.int32)
        self._size = 0
        self._ids = np.zeros(256, np.uint64)
        self._vectors = np.zeros((256, self._runtime.info.item_dim), np.float32)
        self._topics = np.zeros(256, np.uint32)

    def get(self, items: npt.NDArray[np.uint64]) -> tuple[F32, npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
        """items [N] -> vectors [M, V] of all items kept (and room for more), each one's row in them [N], topic ids
        [N]."""
        if self._catalogue.version != self._version:
            self._renew()
        at = self._find(items)
        missing = at < 0
        if missing.any():
            new = np.unique(items[missing])
            if self._size + len(new) > self._capacity:
                self._reset()
                new = np.unique(items)
            self._add(new)
            at = self._find(items)
        return self._vectors, at, self._topics[at]

    def _renew(self) -> None:
        """Computes those items anew that have changed in the catalogue."""
        changed = self._catalogue.changed_since(self._version)
        self._version = self._catalogue.version
        if changed is None:
            self._reset()
            return
        at = self._find(changed)
        if (at >= 0).any():
            ids, at = changed[at >= 0], at[at >= 0]
            self._vectors[at], self._topics[at] = self._runtime.item_vectors(ids, self._catalogue.features(ids))

    def _find(self, items: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        rows: npt.NDArray[np.int32] = kernels.table_find(self._keys, self._rows, np.ascontiguousarray(items))
        return rows

    def _add(self, new: npt.NDArray[np.uint64]) -> None:
        vectors, topics = self._runtime.item_vectors(new, self._catalogue.features(new))
        first, size = self._size, self._size + len(new)
        if size > len(self._ids):  # twice the room: a new item must not copy all that there are
            room = max(size, 2 * len(self._ids))
            self._ids, self._vectors, self._topics = (
                _longer(self._ids, room), _longer(self._vectors, room), _longer(self._topics, room)
            )  # fmt: skip
        self._ids[first:size], self._vectors[first:size], self._topics[first:size] = new, vectors, topics
        self._size = size
        if 2 * size > len(self._keys):
            length = 1 << (4 * size - 1).bit_length()
            self._keys, self._rows = np.zeros(length, np.uint64), np.zeros(length, np.int32)
            first = 0
        kernels.table_insert(self._keys, self._rows, self._ids[first:size], np.arange(first, size, dtype=np.int32))


@dataclass(slots=True)
class Ranker:
    runtime: Runtime
    encoder: Encoder
    explain: bool = False
    vm_scores_share: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    _items: ItemVectors = field(init=False)

    def __post_init__(self) -> None:
        self._items = ItemVectors(self.runtime, self.encoder.catalogue)

    def swap(self, runtime: Runtime) -> None:
        """Goes on with another model of the same feature spec; item vectors are computed anew."""
        self.runtime = runtime
        self._items = ItemVectors(runtime, self.encoder.catalogue)

    @property
    def dims(self) -> StoreDims:
        info = self.runtime.info
        return StoreDims(info.dim, info.state_dim, info.profile_dim)

    def rank(
        self,
        events: Sequence[Impression],
        partitions: Sequence[int],
        stores: Mapping[int, EmbeddingStore],
        neighbours: Mapping[int, SimilarSource] | None = None,
        counts: Mapping[int, CountSource] | None = None,
    ) -> Ranking:
        """`partitions` [B] names each impression's partition, `stores` has one store for each of them; `neighbours`
        finds similar users for those who have no aggregate of their own. `counts` are asked where the bundle's VM sees
        rolling counts; those of a partition that is not in it are unknown."""
        batch = self.encoder.impressions(events)
        vectors, item_rows, topics = self._items.get(batch.items)
        found = self._lookup(batch, topics, partitions, stores)
        similar = self._similar(batch, found, partitions, neighbours) if neighbours else None
        slots = fill_slots(found, batch, vectors, item_rows, self.runtime, batch.ts_ms, similar)
        counted = self._counts(batch, partitions, counts or {}) if self.runtime.info.rolling else None
        base, logit = self.runtime.score_both(batch, slots, counted)
        score = _sigmoid(logit)
        order = kernels.order_by_value(batch.splits, score * _bids(events, batch.pairs))
        self._count(batch, slots.source)
        return Ranking(batch, logit, base, score, slots.source, slots.age_ms, slots.ages_ms, order)

    def answers(
        self,
        events: Sequence[Impression],
        ranking: Ranking,
        received_ms: Sequence[int],
        ranked_ms: int,
        restoring: Sequence[bool],
    ) -> list[RankedAds]:
        """One `RankedAds` per impression, in order."""
        info = self.runtime.info
        r = ranking
        order = r.order
        starts = np.repeat(r.batch.splits[:-1], np.diff(r.batch.splits))
        positions = (order - starts).tolist()
        scores = np.round(r.score[order].astype(np.float64), 7).tolist()
        sources = _SOURCE_NAMES[r.source[order]].tolist()
        best = r.age_ms[order]
        ages: list[int | None] = best.tolist()
        for i in np.flatnonzero(best < 0).tolist():
            ages[i] = None
        splits = r.batch.splits.tolist()
        out = []
        for b, event in enumerate(events):
            lo, hi = splits[b], splits[b + 1]
            at = positions[lo:hi]
            ads = event.ads
            explained = None
            if self.explain:
                of_ad = r.ages_ms[:, order[lo:hi]]
                explained = {
                    name: [None if age < 0 else age for age in of_ad[k].tolist()] for k, name in enumerate(SLOTS)
                }
            vm_scores = None
            if self.vm_scores_share and sampled(event.id, self.vm_scores_share):
                vm_scores = np.round(_sigmoid(r.base[order[lo:hi]]).astype(np.float64), 7).tolist()
            answer = RankedAds(
                id=event.id, user=event.user, ts=event.ts, ads=[ads[i] for i in at], positions=at,
                scores=scores[lo:hi], sources=sources[lo:hi],
                ages_ms=ages[lo:hi],
                vm=info.vm, fm=info.fm, state="restoring" if restoring[b] else "live",
                received_ms=received_ms[b], ranked_ms=ranked_ms, slots=explained,
                vm_scores=vm_scores,
            )  # fmt: skip
            out.append(answer)
        return out

    def _lookup(
        self,
        batch: PairBatch,
        topics: npt.NDArray[np.uint32],
        partitions: Sequence[int],
        stores: Mapping[int, EmbeddingStore],
    ) -> Lookup:
        fm, dims = self.runtime.info.fm_hash, self.dims
        pieces = []
        for p, requests, pairs, splits in _runs(partitions, batch.splits):
            pieces.append(
                stores[p].lookup(
                    batch.users[requests], splits, batch.items[pairs], topics[pairs], batch.ts_ms[requests], fm, dims
                )
            )
        return _joined(Lookup, pieces)

    def _counts(self, batch: PairBatch, partitions: Sequence[int], counts: Mapping[int, CountSource]) -> Counts:
        found = self._count_lookup(batch, partitions, counts)
        known = int(found.known.sum())
        self.counters["counts_known"] += known
        self.counters["counts_unknown"] += batch.requests - known
        return found

    def _count_lookup(self, batch: PairBatch, partitions: Sequence[int], counts: Mapping[int, CountSource]) -> Counts:
        pieces = []
        for p, requests, pairs, splits in _runs(partitions, batch.splits):
            if p in counts:
                pieces.append(
                    counts[p].lookup(batch.users[requests], splits, batch.items[pairs], batch.ts_ms[requests])
                )
            else:
                pieces.append(Counts.unknown(len(splits) - 1, int(splits[-1])))
        return _joined(Counts, pieces)

    def _similar(
        self, batch: PairBatch, found: Lookup, partitions: Sequence[int], neighbours: Mapping[int, SimilarSource]
    ) -> SimilarUsers | None:
        """Similar users of the requests whose user has no aggregate; asked for the others too it would only cost."""
        lonely = np.flatnonzero(found.aggregate_ts_ms < 0)
        if "similar" not in self.runtime.info.slots or not len(lonely):
            return None
        info, n = self.runtime.info, batch.requests
        out = SimilarUsers(np.zeros((n, info.dim), np.float32), np.full(n, -1, np.int64), np.zeros(n, np.float32))
        profiles = self.runtime.score(batch).profile
        parts = np.asarray(partitions)[lonely]
        for p in np.unique(parts):
            if int(p) in neighbours:
                mine = lonely[parts == p]
                got = neighbours[int(p)].similar(profiles[mine], batch.ts_ms[mine], batch.users[mine])
                out.vector[mine], out.ts_ms[mine], out.score[mine] = got.aggregate, got.ts_ms, got.similarity
        self.counters["similar_asked"] += len(lonely)
        return out

    def _count(self, batch: PairBatch, source: npt.NDArray[np.int8]) -> None:
        c = self.counters
        c["impressions"] += batch.requests
        c["ads"] += batch.pairs
        for k, n in enumerate(np.bincount(source, minlength=len(SOURCES)).tolist()):
            c[f"source_{SOURCES[k]}"] += n


def _sigmoid(logit: F32) -> F32:
    return (1.0 / (1.0 + np.exp(-logit.astype(np.float64)))).astype(np.float32)


def _longer(values: npt.NDArray[_T], room: int) -> npt.NDArray[_T]:
    out = np.zeros((room, *values.shape[1:]), values.dtype)
    out[: len(values)] = values
    return out


def _bids(events: Sequence[Impression], n: int) -> F32:
    if all(e.bids is None for e in events):
        return np.ones(n, np.float32)
    bids: list[float] = []
    for e in events:
        bids.extend(e.bids if e.bids is not None else [1.0] * len(e.ads))
    return np.array(bids, np.float32)


def _runs(partitions: Sequence[int], splits: I64) -> Iterator[tuple[int, slice, slice, I64]]:
    """(partition, its requests, their pairs, splits of these alone) of each run of requests of one partition. There
    are as few as there can be when the requests come sorted by partition."""
    at = np.flatnonzero(np.diff(np.asarray(partitions))) + 1
    bounds = [0, *at.tolist(), len(partitions)]
    for lo, hi in pairwise(bounds):
        own = splits[lo : hi + 1]
        yield partitions[lo], slice(lo, hi), slice(int(own[0]), int(own[-1])), own - own[0]


def _joined(kind: type[_Columns], pieces: list[_Columns]) -> _Columns:
    """Their arrays one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    names = kind.__dataclass_fields__
    return kind(**{name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in names})
