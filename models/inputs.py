"""What a graph may be fed with: the named *sources* of a bundle's inputs, computed from a `PairBatch`.

This table is the contract for bringing one's own model. B requests, N pairs, M items, L = `spec.history_length`,
c item and r request features. Histories are rows of L, **newest first**, padded at the end.

===================  =======  ============  ==========================================================================
source               dtype    shape         meaning
===================  =======  ============  ==========================================================================
user_bucket          int64    [B]           1 + user hash % buckets
request_features     float32  [B, r]        columns of `spec.request`
clock                float32  [B, 2]        sine and cosine of the time of day (UTC)
history_mask         float32  [B, L]        1 where there is an event
history_bucket       int64    [B, L]        1 + item hash % buckets; 0 padding
history_code         float32  [B, L, 64]    fixed unit vector of the item (`kernels.hash_codes`); 0 padding
history_features     float32  [B, L, c]     columns of `spec.item`; 0 padding or unknown
history_age          float32  [B, L]        log1p of minutes between event and request; 0 unknown or padding
history_kind         int64    [B, L]        kind of event 0..255; 0 padding
row                  int64    [N]           request of the pair
item_bucket          int64    [N] or [M]    1 + item hash % buckets
item_code            float32  [N, 64] ...   fixed unit vector of the item
item_features        float32  [N, c] ...    columns of `spec.item`
counters             float32  [N, 8]        hand counters from the request's history (`kernels.COUNTERS`)
rolling              float32  [N, 13]       rolling counts of item, user and pair (`models.rolling`), for `vm` and
                                            `vm_plus`; zeros where there are none to ask
base_logit           float32  [N]           the `vm` graph's logit (for `vm_plus`)
slots                float32  [N, W]        `slot_columns`, for `vm_plus`
===================  =======  ============  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from models import kernels
from models.api import F32, I64, SLOTS, FeatureSpec, PairBatch, Slots
from models.features import history_counters, rows
from models.rolling import ROLLING

Array = npt.NDArray[Any]

PER_REQUEST = frozenset(
    {
        "user_bucket", "request_features", "clock", "history_mask", "history_bucket", "history_code",
        "history_features", "history_age", "history_kind",
    }
)  # fmt: skip
PER_ITEM = frozenset({"item_bucket", "item_code", "item_features"})
PER_PAIR = PER_ITEM | {"row", "counters"}
COUNTED = frozenset({"rolling"})
"""per pair, of the counts that `score` is given"""
PLUS = frozenset({"base_logit", "slots"})
BUCKETED = frozenset({"user_bucket", "history_bucket", "item_bucket"})
INT64 = BUCKETED | {"history_kind", "row"}

ALLOWED = {
    "fm_pair": PER_REQUEST | PER_PAIR,
    "fm_user": PER_REQUEST,
    "fm_item": PER_ITEM,
    "vm": PER_REQUEST | PER_PAIR | COUNTED,
    "vm_plus": PER_REQUEST | PER_PAIR | COUNTED | PLUS,
}
"""Sources that make sense for each graph."""
PAIR_SOURCES = PER_PAIR | COUNTED | PLUS

EXTRA = {"direct": 2, "topic": 3, "state": 2, "aggregate": 3, "similar": 3}
"""Columns of a slot beside its vector: flag, log1p of the age in seconds, and count (log1p) or similarity."""


def source_shape(source: str, spec: FeatureSpec, slot_width: int) -> tuple[int, ...]:
    """Dimensions after the first."""
    length, c = spec.history_length, len(spec.item)
    shapes: dict[str, tuple[int, ...]] = {
        "request_features": (len(spec.request),),
        "clock": (2,),
        "history_mask": (length,),
        "history_bucket": (length,),
        "history_code": (length, 64),
        "history_features": (length, c),
        "history_age": (length,),
        "history_kind": (length,),
        "item_code": (64,),
        "item_features": (c,),
        "counters": (len(kernels.COUNTERS),),
        "rolling": (len(ROLLING),),
        "slots": (slot_width,),
    }
    return shapes.get(source, ())


def slot_width(names: Sequence[str], dim: int, dots: int) -> int:
    """W: columns of `slot_columns`."""
    return sum((dots if s == "state" else dim) + EXTRA[s] for s in SLOTS if s in names)


def slot_spans(names: Sequence[str], dim: int, dots: int) -> dict[str, tuple[int, int]]:
    """Where each slot's columns lie in `slot_columns`; its flag is at ``end - EXTRA[name]``, its age behind it."""
    spans, at = {}, 0
    for s in SLOTS:
        if s in names:
            end = at + (dots if s == "state" else dim) + EXTRA[s]
            spans[s] = (at, end)
            at = end
    return spans


def slot_columns(slots: Slots, names: Sequence[str]) -> F32:
    """[N, W] the slots named, in the order of `SLOTS`, each: vector, flag, log1p(age in s)[, log1p(count) | score].

    An empty slot is all zeros.
    """
    parts: list[F32] = []
    for name in SLOTS:
        if name not in names:
            continue
        age: I64 = getattr(slots, name + "_age_ms")
        filled = age >= 0
        parts.append(getattr(slots, name))
        parts.append(filled.astype(np.float32)[:, None])
        parts.append(np.log1p(np.where(filled, age, 0).astype(np.float32) / np.float32(1000))[:, None])
        if name in ("topic", "aggregate"):
            parts.append(np.log1p(getattr(slots, name + "_count"))[:, None])
        elif name == "similar":
            parts.append(slots.similar_score[:, None])
    if not parts:
        return np.zeros((len(slots.direct), 0), np.float32)
    return np.concatenate(parts, axis=1, dtype=np.float32)


def any_slot(slots: Slots, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """[N] whether at least one of the slots named is filled."""
    found = np.zeros(len(slots.direct), bool)
    for name in names:
        found |= getattr(slots, name + "_age_ms") >= 0
    return found


class BatchInputs:
    """The sources of one batch, each computed when first asked for."""

    def __init__(self, batch: PairBatch, spec: FeatureSpec, topic_column: int) -> None:
        self._batch, self._spec, self._topic_column = batch, spec, topic_column
        self._index: I64 | None = None
        self._made: dict[tuple[str, int], Array] = {}

    def put(self, source: str, values: Array) -> None:
        """Sources that are not of the batch: `rolling`, `base_logit`, `slots`."""
        self._made[source, 0] = values

    def get(self, source: str, buckets: int = 0) -> Array:
        key = (source, buckets)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = np.ascontiguousarray(self._make(source, buckets))
        return made

    def _make(self, source: str, buckets: int) -> Array:
        batch = self._batch
        if source.startswith("history_"):
            return self._history(source, buckets)
        if source == "user_bucket":
            return (1 + batch.users % np.uint64(buckets)).astype(np.int64)
        if source == "request_features":
            return batch.request_features
        if source == "clock":
            day = (batch.ts_ms % 86_400_000).astype(np.float32) * np.float32(2 * np.pi / 86_400_000)
            return np.stack([np.sin(day), np.cos(day)], axis=1)
        if source == "row":
            return rows(batch)
        if source == "counters":
            return history_counters(batch, self._topic_column)
        if source == "rolling":  # nobody put any: unknown
            return np.zeros((batch.pairs, len(ROLLING)), np.float32)
        return item_source(source, buckets, batch.items, batch.item_features)

    def _history(self, source: str, buckets: int) -> Array:
        batch, length = self._batch, self._spec.history_length
        index = self._index
        if index is None:
            starts, ends = batch.history_splits[:-1, None], batch.history_splits[1:, None]
            index = ends - 1 - np.arange(length)
            index[index < starts] = -1  # the pad row that is appended below
            self._index = index
        if source == "history_mask":
            return (index >= 0).astype(np.float32)
        if source == "history_bucket":
            return _padded(1 + batch.history % np.uint64(buckets))[index].astype(np.int64)
        if source == "history_code":
            return kernels.hash_codes(_padded(batch.history)[index].reshape(-1)).reshape(*index.shape, 64)
        if source == "history_features":
            c = len(self._spec.item)
            columns = np.concatenate([batch.history_features, np.zeros((c, 1), np.float32)], axis=1)
            return columns.T[index]
        if source == "history_age":
            then = _padded(batch.history_ts)[index]
            known = (index >= 0) & (then >= 0)
            age = np.where(known, np.maximum(batch.ts_ms[:, None] - then, 0), 0)
            return np.log1p(age.astype(np.float32) / np.float32(60_000))
        if source == "history_kind":
            return _padded(batch.history_kind)[index].astype(np.int64)
        raise KeyError(source)


def item_source(source: str, buckets: int, items: npt.NDArray[np.uint64], features: F32) -> Array:
    """One of `PER_ITEM` for items [M] with features [c, M]."""
    if source == "item_bucket":
        return (1 + items % np.uint64(buckets)).astype(np.int64)
    if source == "item_code":
        codes: F32 = kernels.hash_codes(items)
        return codes
    if source == "item_features":
        return features.T
    raise KeyError(source)


def _padded(values: Array) -> Array:
    return np.concatenate([values, np.zeros(1, values.dtype)])
