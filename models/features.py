"""Events to columns: the one feature code of training, backtest and serving.

A request's columns depend on that event and the catalogue only, never on the batch it comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from models import kernels
from models.api import F32, I64, U8, U64, FeatureSpec, PairBatch
from models.catalogue import Catalogue
from topics.errors import DecodeError
from topics.events import Candidates, Columns, Features, HashedCandidates, Impression
from topics.ids import ItemId, hash_id, hash_ids
from topics.packed import PrecomputeRequest

COUNTERS = kernels.COUNTERS


class Encoder:
    """Fills `PairBatch`es for one spec. Not thread-safe (memos); wrong-typed values count in `mistyped`."""

    def __init__(self, spec: FeatureSpec, catalogue: Catalogue) -> None:
        self.spec = spec
        self.spec_hash = spec.hash()
        self.catalogue = catalogue
        self._values = catalogue.values
        self._kinds: dict[object, int] = {}
        self._mistyped_history = 0
        self._columns = [(j, f) for j, f in enumerate(spec.item)]

    @property
    def mistyped(self) -> int:
        """Feature values so far that were not of the kind the spec says, and were taken as missing."""
        return self._values.mistyped + self._mistyped_history

    def candidates(self, events: Sequence[Candidates | HashedCandidates]) -> PairBatch:
        return self._encode(events, [e.items for e in events], [e.item_features for e in events])

    def impressions(self, events: Sequence[Impression]) -> PairBatch:
        return self._encode(events, [e.ads for e in events], [e.ad_features for e in events])

    def from_precompute(self, requests: Sequence[PrecomputeRequest]) -> PairBatch:
        """Columns as the verifier made them. The caller has compared `request.spec` with `spec_hash`; columns that
        still do not fit raise `DecodeError`."""
        c, r = len(self.spec.item), len(self.spec.request)
        for q in requests:
            if q.item_features.shape[0] != c or len(q.request_features) != r:
                raise DecodeError(
                    "wrong_spec",
                    f"{q.item_features.shape[0]} item and {len(q.request_features)} request features, "
                    f"the bundle reads {c} and {r}",
                )
        length = self.spec.history_length
        history = _joined([q.history[-length:] if length else q.history[:0] for q in requests], np.uint64)
        return PairBatch(
            users=np.array([q.user for q in requests], np.uint64),
            ts_ms=np.array([q.ts_ms for q in requests], np.int64),
            splits=_splits([len(q.items) for q in requests]),
            items=_joined([q.items for q in requests], np.uint64),
            item_features=np.concatenate([np.zeros((c, 0), np.float32), *(q.item_features for q in requests)], axis=1),
            request_features=np.array([q.request_features for q in requests], np.float32).reshape(len(requests), r),
            history=history,
            history_ts=_joined([q.history_ts[-length:] if length else q.history_ts[:0] for q in requests], np.int64),
            history_kind=_joined(
                [q.history_kind[-length:] if length else q.history_kind[:0] for q in requests], np.uint8
            ),
            history_splits=_splits([min(len(q.history), length) for q in requests]),
            history_features=self.catalogue.features(history),
        )

    def to_precompute(
        self,
        batch: PairBatch,
        keep: Sequence[npt.NDArray[np.integer[Any]]],
        scores: F32,
        profile: F32,
        event_ids: Sequence[str],
    ) -> list[PrecomputeRequest]:
        """Every request of the batch with the pairs `keep` of each (indices into the batch, most valuable first).
        scores [N], profile [B, p]."""
        every = _joined(list(keep), np.int64)
        items, values, columns = batch.items[every], scores[every], batch.item_features[:, every]
        ends = _splits([len(k) for k in keep]).tolist()
        users, times, past = batch.users.tolist(), batch.ts_ms.tolist(), batch.history_splits.tolist()
        out = []
        for b, event_id in enumerate(event_ids):
            lo, hi, since, until = ends[b], ends[b + 1], past[b], past[b + 1]
            out.append(
                PrecomputeRequest(
                    user=users[b],
                    ts_ms=times[b],
                    spec=self.spec_hash,
                    items=items[lo:hi],
                    scores=values[lo:hi],
                    item_features=columns[:, lo:hi],
                    history=batch.history[since:until],
                    history_ts=batch.history_ts[since:until],
                    history_kind=batch.history_kind[since:until],
                    request_features=batch.request_features[b],
                    profile=profile[b],
                    event_id=event_id,
                )
            )
        return out

    def _encode(
        self,
        events: Sequence[Candidates | HashedCandidates | Impression],
        ids: Sequence[list[ItemId] | U64],
        own: list[Columns | None],
    ) -> PairBatch:
        length = self.spec.history_length
        past: list[ItemId] = []
        past_ts: list[object] = []
        past_kind: list[object] = []
        past_sizes = []
        for event in events:
            features = event.features
            history = cast("list[ItemId]", features.get("history") or ())
            n = min(len(history), length)
            past_sizes.append(n)
            if n:
                past += history[-n:]
                times, kinds = features.get("history_ts"), features.get("history_kind")
                past_ts += times[-n:] if isinstance(times, list) else [-1] * n
                past_kind += kinds[-n:] if isinstance(kinds, list) else [0] * n
        items, history_ids = _hashes(ids), hash_ids(past)
        splits = _splits([len(these) for these in ids])
        columns = self.catalogue.features(items)
        for k, given in enumerate(own):
            if given is not None:
                self._own_columns(columns[:, int(splits[k]) : int(splits[k + 1])], given)
        return PairBatch(
            users=hash_ids([e.user for e in events]),
            ts_ms=np.array([e.ts for e in events], np.int64),
            splits=splits,
            items=items,
            item_features=columns,
            request_features=self._request([e.features for e in events]),
            history=history_ids,
            history_ts=self._times(past_ts),
            history_kind=self._kind_column(past_kind),
            history_splits=_splits(past_sizes),
            history_features=self.catalogue.features(history_ids),
        )

    def _own_columns(self, columns: F32, given: Columns) -> None:
        """An event's own values before the catalogue's; its nulls leave the catalogue's."""
        one = self._values.one
        for j, feature in self._columns:
            values = given.get(feature.name)
            if values is not None:
                row = columns[j]
                for i, value in enumerate(values):
                    if value is not None:
                        row[i] = one(feature, value)

    def _request(self, features: list[Features]) -> F32:
        spec, one = self.spec.request, self._values.one
        if not spec:
            return np.zeros((len(features), 0), np.float32)
        rows = [[one(f, values.get(f.name)) for f in spec] for values in features]
        return np.array(rows, np.float32).reshape(len(features), len(spec))

    def _times(self, values: list[object]) -> I64:
        if set(map(type, values)) <= {int}:
            try:
                return np.maximum(np.array(values, np.int64), -1)
            except OverflowError:
                pass
        return np.array([self._time(v) for v in values], np.int64)

    def _time(self, value: object) -> int:
        if isinstance(value, int | float) and value == value and -1 <= value < 2**63:
            return int(value)
        self._mistyped_history += value is not None
        return -1

    def _kind_column(self, values: list[object]) -> U8:
        """Integers 0..255 as they are, names (and other integers) hashed into 1..255, null 0."""
        memo = self._kinds
        try:
            return np.array([memo[v] for v in values], np.uint8)
        except KeyError:
            if len(memo) > 4096:
                memo.clear()
            for v in values:
                if v not in memo:
                    memo[v] = _kind(v)
            return np.array([memo[v] for v in values], np.uint8)


def _hashes(ids: Sequence[list[ItemId] | U64]) -> U64:
    """Of all lists, one after the other."""
    hashed = [these for these in ids if isinstance(these, np.ndarray)]
    if not hashed:
        return hash_ids([i for these in ids for i in these])
    if len(hashed) < len(ids):
        hashed = [these if isinstance(these, np.ndarray) else hash_ids(these) for these in ids]
    return np.concatenate(hashed)


def _kind(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int | float) and value == value and 0 <= value <= 255:
        return int(value)
    return 1 + hash_id(str(value)) % 255


def history_counters(batch: PairBatch, topic_column: int) -> F32:
    """[N, len(COUNTERS)] hand counters of each pair from its request's own history: no state, no model.

    `topic_column` is `Catalogue.topic_column` (-1: no topics, those columns are 0).
    """
    if topic_column >= 0:
        topics, past = batch.item_features[topic_column], batch.history_features[topic_column]
    else:
        topics, past = np.zeros(batch.pairs, np.float32), np.zeros(len(batch.history), np.float32)
    counted: F32 = kernels.counters(
        batch.splits, batch.items, topics, batch.ts_ms, batch.history_splits, batch.history, past, batch.history_ts
    )
    return counted


def fingerprint(history: U64, length: int | None = None) -> int:
    """xxh3 of the newest `length` entries (all when None), in 1 .. 2**64 - 1: has the user's history moved?"""
    if length is not None:
        history = history[len(history) - min(length, len(history)) :]
    return xxh3_64_intdigest(np.ascontiguousarray(history, "<u8").data) or 1


def fingerprints(batch: PairBatch) -> U64:
    """[B] `fingerprint` of each request's history."""
    data, cut = np.ascontiguousarray(batch.history, "<u8").data, batch.history_splits.tolist()
    return np.array([xxh3_64_intdigest(data[a:z]) or 1 for a, z in pairwise(cut)], np.uint64)


def rows(batch: PairBatch) -> I64:
    """[N] index of each pair's request."""
    return np.repeat(np.arange(batch.requests, dtype=np.int64), np.diff(batch.splits))


def select(batch: PairBatch, keep: npt.NDArray[np.bool_]) -> PairBatch:
    """The same requests with the pairs where `keep` [N] is true, in order; a request may be left without any."""
    ends = np.concatenate([[0], np.cumsum(keep)])
    return PairBatch(
        batch.users, batch.ts_ms, ends[batch.splits].astype(np.int64), batch.items[keep],
        batch.item_features[:, keep], batch.request_features, batch.history, batch.history_ts, batch.history_kind,
        batch.history_splits, batch.history_features,
    )  # fmt: skip


def requests(batch: PairBatch, start: int, stop: int) -> PairBatch:
    """Requests `start:stop` with all their pairs, as views."""
    i, j = int(batch.splits[start]), int(batch.splits[stop])
    g, h = int(batch.history_splits[start]), int(batch.history_splits[stop])
    return PairBatch(
        batch.users[start:stop], batch.ts_ms[start:stop], batch.splits[start : stop + 1] - i, batch.items[i:j],
        batch.item_features[:, i:j], batch.request_features[start:stop], batch.history[g:h],
        batch.history_ts[g:h], batch.history_kind[g:h], batch.history_splits[start : stop + 1] - g,
        batch.history_features[:, g:h],
    )  # fmt: skip


def concat(batches: Sequence[PairBatch]) -> PairBatch:
    """All requests of the batches (same spec, at least one batch), in order."""
    return PairBatch(
        np.concatenate([b.users for b in batches]),
        np.concatenate([b.ts_ms for b in batches]),
        _splits(np.concatenate([np.diff(b.splits) for b in batches])),
        np.concatenate([b.items for b in batches]),
        np.concatenate([b.item_features for b in batches], axis=1),
        np.concatenate([b.request_features for b in batches]),
        np.concatenate([b.history for b in batches]),
        np.concatenate([b.history_ts for b in batches]),
        np.concatenate([b.history_kind for b in batches]),
        _splits(np.concatenate([np.diff(b.history_splits) for b in batches])),
        np.concatenate([b.history_features for b in batches], axis=1),
    )


def _splits(sizes: Sequence[int] | npt.NDArray[Any]) -> I64:
    out = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


def _joined(parts: list[Any], dtype: Any) -> Any:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def take(batch: PairBatch, index: npt.NDArray[np.integer[Any]]) -> PairBatch:
    """The requests `index` (any order, repeats allowed) with all their pairs, copied."""
    pairs, splits = _ranges(batch.splits, index)
    past, history_splits = _ranges(batch.history_splits, index)
    return PairBatch(
        batch.users[index], batch.ts_ms[index], splits, batch.items[pairs], batch.item_features[:, pairs],
        batch.request_features[index], batch.history[past], batch.history_ts[past], batch.history_kind[past],
        history_splits, batch.history_features[:, past],
    )  # fmt: skip


def pairs_of(batch: PairBatch, index: npt.NDArray[np.integer[Any]]) -> I64:
    """Pair indices of the requests `index`, in the order of `take`."""
    return _ranges(batch.splits, index)[0]


def _ranges(splits: I64, index: npt.NDArray[np.integer[Any]]) -> tuple[I64, I64]:
    starts, sizes = splits[index], splits[index + 1] - splits[index]
    ends = _splits(sizes)
    return np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - ends[:-1], sizes), ends
