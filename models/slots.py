"""From what the store knows to what the VM is given: one function for serving, backtest and training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.api import F32, I64, PairBatch, Runtime, Slots
from state.api import Lookup


@dataclass(slots=True)
class SimilarUsers:
    """What the neighbours of each request's user add up to; a `ts_ms` of -1 says: no neighbour."""

    vector: F32
    """[B, D] weighted mean of the neighbours' aggregates"""
    ts_ms: I64
    """[B] newest event time in it"""
    score: F32
    """[B] similarity of the neighbours used"""


def build_slots(
    lookup: Lookup,
    batch: PairBatch,
    item_vectors: F32,
    runtime: Runtime,
    now_ms: I64,
    similar: SimilarUsers | None = None,
) -> Slots:
    """The slots of each pair, as of `now_ms` [B] (the request's event time).

    item_vectors [N, V] from `Runtime.item_vectors`. Slots that the bundle was not trained with stay empty. Ages are
    never negative: the store shows nothing that is younger than the request.
    """
    info, n = runtime.info, batch.pairs
    slots = Slots.empty(n, info.dim, info.dots)
    per_pair = np.repeat(np.arange(batch.requests), np.diff(batch.splits))
    now = now_ms[per_pair]
    if "direct" in info.slots:
        slots.direct_age_ms = _age(now, lookup.ts_ms)
        slots.direct = _kept(lookup.vectors, slots.direct_age_ms)
    if "topic" in info.slots:
        slots.topic_age_ms = _age(now, lookup.topic_ts_ms)
        slots.topic = _kept(lookup.topic, slots.topic_age_ms)
        slots.topic_count = np.where(slots.topic_age_ms >= 0, lookup.topic_count, 0).astype(np.float32)
    if "state" in info.slots and info.state_dim:
        slots.state_age_ms = _age(now, lookup.state_ts_ms[per_pair])
        if (slots.state_age_ms >= 0).any():
            slots.state = _kept(runtime.dots(lookup.state, item_vectors, batch.splits), slots.state_age_ms)
    if "aggregate" in info.slots:
        slots.aggregate_age_ms = _age(now, lookup.aggregate_ts_ms[per_pair])
        slots.aggregate = _kept(lookup.aggregate[per_pair], slots.aggregate_age_ms)
        slots.aggregate_count = np.where(slots.aggregate_age_ms >= 0, lookup.aggregate_count[per_pair], 0).astype(
            np.float32
        )
    if similar is not None and "similar" in info.slots:
        slots.similar_age_ms = _age(now, similar.ts_ms[per_pair])
        slots.similar = _kept(similar.vector[per_pair], slots.similar_age_ms)
        slots.similar_score = np.where(slots.similar_age_ms >= 0, similar.score[per_pair], 0).astype(np.float32)
    return slots


def _age(now: I64, ts_ms: I64) -> I64:
    return np.where(ts_ms >= 0, np.maximum(now - ts_ms, 0), -1)


def _kept(values: npt.NDArray[np.float32], age: I64) -> F32:
    """Zeros where the slot is empty, so that an empty slot says nothing."""
    return np.where(age[:, None] >= 0, values, 0).astype(np.float32, copy=False)
