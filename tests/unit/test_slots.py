"""The ranker's one-pass slots and order against the plain ones that training uses: equal to the bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import kernels
from models.api import SLOTS, SOURCES
from models.features import select
from models.inputs import any_slot, slot_columns
from models.probe import probe_batch
from models.runtime import OnnxRuntime, open_runtime
from models.slots import SimilarUsers, build_slots, fill_slots
from state.api import Lookup
from streams.settings import load


@pytest.fixture(scope="module")
def runtime() -> OnnxRuntime:
    return open_runtime(load(environment={}).model.bundle)


def found(rng: np.random.Generator, runtime: OnnxRuntime, n: int, b: int, now: np.ndarray, rows: np.ndarray) -> Lookup:
    """A look-up that knows some things and not others; what it does not know has zeros, as the store's answers do."""
    d, s, p = runtime.info.dim, runtime.info.state_dim, runtime.info.profile_dim

    def times(of: np.ndarray) -> np.ndarray:
        return np.where(rng.random(len(of)) < 0.4, -1, of - rng.integers(-5, 20_000_000, len(of)))

    def known(ts: np.ndarray, *shape: int) -> np.ndarray:
        return np.where((ts >= 0)[:, None], rng.normal(size=shape), 0).astype(np.float32)

    ts, topic_ts, state_ts, aggregate_ts = times(now[rows]), times(now[rows]), times(now), times(now)
    return Lookup(
        known(ts, n, d), ts, known(topic_ts, n, d), rng.integers(1, 60, n).astype(np.int32), topic_ts,
        known(aggregate_ts, b, d), rng.integers(1, 600, b).astype(np.int32), aggregate_ts, known(state_ts, b, s),
        state_ts, np.zeros(b, np.uint64), np.zeros((b, p), np.float32), np.zeros(n, np.uint64),
    )  # fmt: skip


@pytest.mark.parametrize("names", [SLOTS, ("direct",), ("topic", "state"), ("state", "aggregate", "similar"), ()])
@pytest.mark.parametrize("with_similar", [True, False])
def test_one_pass_gives_what_training_was_given(
    runtime: OnnxRuntime, names: tuple[str, ...], with_similar: bool
) -> None:
    rng = np.random.default_rng(len(names))
    b, n = 12, 300
    batch = probe_batch(runtime.info.spec, b, n, seed=2)
    batch.ts_ms = 1_760_000_000_000 + rng.integers(0, 10**7, b)
    info = replace(runtime.info, slots=names)
    one = SimpleNamespace(info=info, dots=runtime.dots)
    per_pair = np.repeat(np.arange(b), np.diff(batch.splits))
    lookup = found(rng, runtime, n, b, batch.ts_ms, per_pair)
    similar = None
    if with_similar:
        ts = np.where(rng.random(b) < 0.5, -1, batch.ts_ms - 5000)
        similar = SimilarUsers(rng.normal(size=(b, info.dim)).astype(np.float32), ts, rng.random(b).astype(np.float32))
    table = rng.normal(size=(50, info.item_dim)).astype(np.float32)
    rows = rng.integers(0, 50, n).astype(np.int32)

    plain = build_slots(lookup, batch, table[rows], one, batch.ts_ms, similar)
    quick = fill_slots(lookup, batch, table, rows, one, batch.ts_ms, similar)

    np.testing.assert_array_equal(quick.columns, slot_columns(plain, names))
    np.testing.assert_array_equal(quick.ages_ms, plain.ages())
    filled = plain.ages() >= 0
    first = np.where(filled.any(axis=0), filled.argmax(axis=0), len(SLOTS))
    np.testing.assert_array_equal(quick.source, first)
    np.testing.assert_array_equal(quick.source < len(SLOTS), any_slot(plain, names))
    ages = np.vstack([plain.ages(), np.full(n, -1)])
    np.testing.assert_array_equal(quick.age_ms, ages[first, np.arange(n)])
    assert len(SOURCES) == len(SLOTS) + 1
    if names == runtime.info.slots:
        assert (runtime.score_plus(batch, quick) == runtime.score_plus(batch, plain)).all()


def test_nothing_to_fill(runtime: OnnxRuntime) -> None:
    batch = select(probe_batch(runtime.info.spec, 1, 3, seed=0), np.zeros(3, bool))
    lookup = found(np.random.default_rng(0), runtime, 0, 1, batch.ts_ms, np.zeros(0, np.int64))
    table = np.zeros((1, runtime.info.item_dim), np.float32)
    quick = fill_slots(lookup, batch, table, np.zeros(0, np.int32), runtime, batch.ts_ms)
    assert len(quick.columns) == len(quick.source) == 0


values = st.sampled_from([0.0, -0.0, 1.0, 0.5, -2.0, float("nan"), float("inf"), float("-inf")]) | st.floats(width=32)


@given(st.lists(st.lists(values, max_size=200), max_size=6))
def test_order_is_the_plain_one(requests: list[list[float]]) -> None:
    splits = np.concatenate([[0], np.cumsum([len(r) for r in requests])]).astype(np.int64)
    flat = np.array([v for r in requests for v in r], np.float32)
    got = kernels.order_by_value(splits, flat)
    np.testing.assert_array_equal(got, kernels.order_by_value_reference(splits, flat))
