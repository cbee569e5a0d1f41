"""The state slot's numbers against plain numpy in 64 bits."""

from __future__ import annotations

import numpy as np
import pytest

from models.dots import state_dots


def plain(state: np.ndarray, vectors: np.ndarray, heads: int, head_dim: int, towers: int, tower_dim: int) -> np.ndarray:
    """One request whose pairs are all the vectors."""
    state, vectors = state.astype(np.float64), vectors.astype(np.float64)
    split = heads * head_dim
    x = vectors[:, :head_dim] @ state[0, :split].reshape(heads, head_dim).T if heads else np.zeros((len(vectors), 0))
    own = vectors[:, head_dim if heads else 0 :].reshape(len(vectors), towers, tower_dim)
    y = np.einsum("ntd,td->nt", own, state[0, split:].reshape(towers, -1)) if towers else np.zeros((len(vectors), 0))
    return np.concatenate([np.sign(x) * np.log1p(np.abs(x)), y], axis=1)


@pytest.mark.parametrize(("heads", "head_dim", "towers", "tower_dim"), [(6, 64, 4, 32), (1, 3, 2, 5), (0, 0, 3, 4)])
@pytest.mark.parametrize("pairs", [0, 1, 15, 16, 33])
def test_dots_of_any_shape(heads: int, head_dim: int, towers: int, tower_dim: int, pairs: int) -> None:
    rng = np.random.default_rng(pairs)
    state = rng.normal(size=(1, heads * head_dim + towers * tower_dim)).astype(np.float32)
    vectors = rng.normal(size=(7, (head_dim if heads else 0) + towers * tower_dim)).astype(np.float32)
    rows = rng.integers(0, 7, pairs).astype(np.int32)
    got = state_dots(state, vectors, rows, np.array([0, pairs]), heads, head_dim, towers, tower_dim)
    assert got.dtype == np.float32
    np.testing.assert_allclose(
        got, plain(state, vectors[rows], heads, head_dim, towers, tower_dim), rtol=1e-4, atol=1e-5
    )


def test_each_request_has_its_own_state_and_the_batch_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    state = rng.normal(size=(3, 4 * 8 + 2 * 4)).astype(np.float32)
    vectors = rng.normal(size=(50, 8 + 2 * 4)).astype(np.float32)
    rows = rng.integers(0, 50, 90).astype(np.int32)
    splits = np.array([0, 31, 31, 90])
    whole = state_dots(state, vectors, rows, splits, 4, 8, 2, 4)
    for b, (lo, hi) in enumerate(((0, 31), (31, 31), (31, 90))):
        alone = state_dots(state[b : b + 1], vectors, rows[lo:hi], np.array([0, hi - lo]), 4, 8, 2, 4)
        assert np.array_equal(whole[lo:hi], alone)


def test_logarithm_is_good_to_three_units_in_the_last_place() -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate([10.0 ** rng.uniform(-37, 38, 20_000), np.linspace(0, 3, 20_001)])
    x = (x * rng.choice([-1, 1], len(x))).astype(np.float32)
    got = state_dots(
        np.ones((1, 1), np.float32), x[:, None], np.arange(len(x), dtype=np.int32), np.array([0, len(x)]), 1, 1, 0, 0
    )
    exact = np.sign(x) * np.log1p(np.abs(x.astype(np.float64)))
    assert (np.abs(got[:, 0] - exact) <= 3 * np.spacing(np.abs(exact).astype(np.float32))).all()


def test_what_is_not_finite_stays_so() -> None:
    x = np.array([[np.nan], [np.inf], [-np.inf], [0.0]], np.float32)
    got = state_dots(np.ones((1, 1), np.float32), x, np.arange(4, dtype=np.int32), np.array([0, 4]), 1, 1, 0, 0)
    assert np.isnan(got[0, 0])
    assert got[1:, 0].tolist() == [np.inf, -np.inf, 0.0]
