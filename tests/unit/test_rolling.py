"""Rolling counts as columns: by the formulas of the docstring, zeros where unknown, the same in every batch."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from models.rolling import PRIOR_SHOWN, ROLLING, pick, rolling_features
from state.counts import PER_REQUEST, Counts

MINUTE = 60_000


def made_up(b: int, seed: int = 0) -> tuple[Counts, np.ndarray, np.ndarray]:
    """(counts, splits, now_ms) with small, large and no counts."""
    rng = np.random.default_rng(seed)
    splits = np.cumsum([0, *rng.integers(0, 60, b)]).astype(np.int64)
    n, now = int(splits[-1]), rng.integers(10**12, 2 * 10**12, b)
    counts = Counts.unknown(b, n)
    counts.known[:] = rng.random(b) < 0.8
    for f in fields(Counts):
        values = getattr(counts, f.name)
        if values.dtype == np.uint32:
            values[:] = rng.integers(0, 2 ** rng.integers(1, 32, len(values)))
    per_pair = np.repeat(now, np.diff(splits))
    counts.pair_ts_ms[:] = np.where(rng.random(n) < 0.5, per_pair - rng.integers(0, 24 * 60 * MINUTE, n), -1)
    return counts, splits, now


def test_every_column_is_what_it_says() -> None:
    counts, splits, now = made_up(40)
    columns = rolling_features(counts, splits, now).astype(np.float64)
    got = {name: columns[:, k] for k, name in enumerate(ROLLING)}
    row = np.repeat(np.arange(40), np.diff(splits))
    known = counts.known[row]
    assert 0 < known.mean() < 1
    want = {f.name: (getattr(counts, f.name)[row] if f.name in PER_REQUEST else getattr(counts, f.name))
            for f in fields(Counts)}  # fmt: skip
    expected = {name: np.log1p(want[name].astype(np.float64)) for name in ROLLING if name in want}
    expected["known"] = known.astype(np.float64)
    for of, by in (("item", "_hour"), ("item", "_day"), ("user", "")):
        shown, clicked = want[f"{of}_shown{by}"].astype(np.float64), want[f"{of}_clicked{by}"].astype(np.float64)
        expected[f"{of}_rate{by}"] = np.log((clicked + 1) / (shown + PRIOR_SHOWN)) - np.log(1 / PRIOR_SHOWN)
    minutes = (now[row] - counts.pair_ts_ms) / MINUTE
    expected["pair_age"] = np.where(counts.pair_ts_ms >= 0, np.log1p(np.where(counts.pair_ts_ms >= 0, minutes, 0)), 0)
    assert expected.keys() == set(ROLLING)
    for name in ROLLING:
        np.testing.assert_allclose(got[name], np.where(known, expected[name], 0), rtol=1e-5, atol=4e-6, err_msg=name)


def test_nothing_counted_is_zero_but_known() -> None:
    counts = Counts.unknown(2, 3)
    counts.known[1] = True
    got = rolling_features(counts, np.array([0, 1, 3]), np.array([5, 5]))
    assert got.tolist() == [[0.0] * len(ROLLING)] + 2 * [[1.0] + [0.0] * (len(ROLLING) - 1)]
    assert not rolling_features(Counts.unknown(1, 1), np.array([0, 1]), np.array([5])).any()
    assert rolling_features(Counts.unknown(0, 0), np.array([0]), np.zeros(0, np.int64)).shape == (0, len(ROLLING))


@pytest.mark.parametrize("seed", range(3))
def test_a_request_alone_has_the_same_bits(seed: int) -> None:
    counts, splits, now = made_up(30, seed)
    whole = rolling_features(counts, splits, now)
    order = np.random.default_rng(seed).permutation(30)
    for b in order.tolist():
        pairs = np.arange(splits[b], splits[b + 1])
        alone = pick(counts, np.array([b]), pairs)
        got = rolling_features(alone, np.array([0, len(pairs)]), now[[b]])
        assert got.tobytes() == whole[splits[b] : splits[b + 1]].tobytes()


def test_an_impression_after_the_request_is_of_no_age() -> None:
    """Counts come as of the time asked; one that is ahead of it all the same gives no negative age."""
    counts = Counts.unknown(1, 1)
    counts.known[:], counts.pair_ts_ms[:] = True, 10
    assert rolling_features(counts, np.array([0, 1]), np.array([5]))[0, ROLLING.index("pair_age")] == 0
