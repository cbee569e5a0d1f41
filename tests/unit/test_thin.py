"""What is taken from a thinned request, and what is left of it."""

from __future__ import annotations

import numpy as np

from models.inputs import EXTRA, slot_spans
from models.thin import thinned

SLOTS = ("direct", "topic", "state", "aggregate")
SPANS = slot_spans(SLOTS, 4, 3)
WIDTH = max(z for _, z in SPANS.values())
REQUESTS, ADS = 2000, 10
SPLITS = np.arange(REQUESTS + 1, dtype=np.int64) * ADS


def kept(columns: np.ndarray) -> dict[str, np.ndarray]:
    """[requests, ads] which slots are still there; each must be whole or gone."""
    out = {}
    for slot, (a, z) in SPANS.items():
        there = columns[:, a:z] != 0
        assert (there.all(1) == there.any(1)).all(), slot
        out[slot] = there.all(1).reshape(REQUESTS, ADS)
    return out


def full() -> np.ndarray:
    return np.random.default_rng(0).uniform(1, 2, (REQUESTS * ADS, WIDTH)).astype(np.float32)


def test_a_share_of_the_requests_loses_slots_and_the_others_none() -> None:
    columns = full()
    before = columns.copy()
    there = kept(thinned(columns, SPLITS, SPANS, 0.4, np.random.default_rng(1)))
    np.testing.assert_array_equal(columns, before)  # a copy
    whole = np.logical_and.reduce([t.all(1) for t in there.values()])
    assert 0.58 < whole.mean() < 0.65  # 0.6, and the few thinned requests that lost nothing
    poor = ~whole
    for slot in ("aggregate", "state"):
        assert (there[slot].all(1) == there[slot].any(1)).all()  # of the request, not of a pair
        assert 0.4 < there[slot][poor].mean() < 0.6
    for slot in ("direct", "topic"):
        assert 0.4 < there[slot][poor].mean() < 0.6
        shares = there[slot][poor].mean(1)
        assert shares.min() < 0.2  # from hardly any coverage
        assert shares.max() > 0.8  # to nearly all


def test_what_is_left_is_as_it_was() -> None:
    columns = full()
    out = thinned(columns, SPLITS, SPANS, 1.0, np.random.default_rng(2))
    np.testing.assert_array_equal(out[out != 0], columns[out != 0])
    flag = SPANS["direct"][1] - EXTRA["direct"]
    assert ((out[:, flag] == 0) == (out[:, SPANS["direct"][0]] == 0)).all()


def test_no_share_takes_nothing() -> None:
    columns = full()
    np.testing.assert_array_equal(thinned(columns, SPLITS, SPANS, 0.0, np.random.default_rng(3)), columns)


def test_slots_that_a_bundle_lacks_are_no_trouble() -> None:
    spans = slot_spans(("direct", "state"), 4, 3)
    columns = np.ones((20, max(z for _, z in spans.values())), np.float32)
    out = thinned(columns, np.array([0, 20]), spans, 1.0, np.random.default_rng(4))
    assert (out == 0).any()
