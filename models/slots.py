"""From what the store knows to what the VM is given: one function for serving, backtest and training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models import kernels
from models.api import F32, I32, I64, SLOTS, FilledSlots, ModelInfo, PairBatch, Runtime, Slots
from models.inputs import EXTRA, slot_spans, slot_width
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


def fill_slots(
    lookup: Lookup,
    batch: PairBatch,
    item_vectors: F32,
    rows: I32,
    runtime: Runtime,
    now_ms: I64,
    similar: SimilarUsers | None = None,
) -> FilledSlots:
    """What `build_slots` and `models.inputs.slot_columns` give, to the bit, in one pass: the ranker's way.

    item_vectors [M, V] with the row of each pair in `rows` [N].
    """
    info, n, d = runtime.info, batch.pairs, runtime.info.dim
    spans = slot_spans(info.slots, d, info.dots)
    begins = np.array([spans.get(name, (-1, -1))[0] for name in SLOTS], np.int64)
    if not info.state_dim:
        begins[SLOTS.index("state")] = -1
    if similar is None:
        begins[SLOTS.index("similar")] = -1
        similar = _nobody(info)
    dots = np.zeros((0, info.dots), np.float32)
    if begins[SLOTS.index("state")] >= 0 and (lookup.state_ts_ms >= 0).any():
        dots = runtime.dots(lookup.state, item_vectors, batch.splits, rows)
    columns = np.zeros((n, slot_width(info.slots, d, info.dots)), np.float32)
    ages, source, age = np.empty((len(SLOTS), n), np.int64), np.empty(n, np.int8), np.empty(n, np.int64)
    kernels.fill_slots(
        batch.splits, now_ms, d, begins, lookup.vectors, lookup.ts_ms, lookup.topic, lookup.topic_ts_ms, dots,
        lookup.state_ts_ms, lookup.aggregate, lookup.aggregate_ts_ms, similar.vector, similar.ts_ms,
        columns, ages, source, age,
    )  # fmt: skip
    per_pair = np.repeat(np.arange(batch.requests), np.diff(batch.splits))
    # Counts and similarity by slot: per pair, or per request.
    beside = {
        "topic": (lookup.topic_count, None),
        "aggregate": (lookup.aggregate_count, per_pair),
        "similar": (similar.score, per_pair),
    }
    for k, name in enumerate(SLOTS):
        if begins[k] < 0 or not n:
            continue
        at = spans[name][1] - EXTRA[name] + 1
        per_request = name in ("state", "aggregate", "similar")
        if per_request:  # logarithms once per request
            first = np.minimum(batch.splits[:-1], n - 1)
            columns[:, at] = _log_age(ages[k][first])[per_pair]
        else:
            columns[:, at] = _log_age(ages[k])
        if name in beside:
            values, spread = beside[name]
            values = values.astype(np.float32)
            if name != "similar":
                values = np.log1p(values)
            columns[:, at + 1] = np.where(ages[k] >= 0, values if spread is None else values[spread], 0)
    return FilledSlots(columns, ages, source, age)


def _nobody(info: ModelInfo) -> SimilarUsers:
    return SimilarUsers(np.zeros((0, info.dim), np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32))


def _log_age(age_ms: I64) -> F32:
    return np.log1p(np.maximum(age_ms, 0).astype(np.float32) / np.float32(1000))


def _age(now: I64, ts_ms: I64) -> I64:
    return np.where(ts_ms >= 0, np.maximum(now - ts_ms, 0), -1)


def _kept(values: npt.NDArray[np.float32], age: I64) -> F32:
    """Zeros where the slot is empty, so that an empty slot says nothing."""
    return np.where(age[:, None] >= 0, values, 0).astype(np.float32, copy=False)
