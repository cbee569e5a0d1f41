"""Losses and rankings against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import metrics


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30))
def test_auc_counts_pairs(rows: list[tuple[int, bool]]) -> None:
    score = np.array([s for s, _ in rows], np.float32)
    label = np.array([y for _, y in rows], np.float32)
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, y in zip(score, label, strict=True)
        if y
        for b, z in zip(score, label, strict=True)
        if not z
    ]
    got = metrics.auc(score, label)
    if pairs:
        assert got == pytest.approx(np.mean(pairs))
        whole = metrics.per_request(score, label, np.array([0, len(rows)]))
        assert whole["auc"] == pytest.approx(got)
    else:
        assert np.isnan(got)


def test_log_loss_is_the_textbook_one() -> None:
    logit = np.array([0.3, -2.0, 800.0, -800.0], np.float32)
    label = np.array([1, 0, 1, 0], np.float32)
    p = 1 / (1 + np.exp(-logit[:2].astype(float)))
    expected = [-np.log(p[0]), -np.log(1 - p[1]), 0, 0]
    np.testing.assert_allclose(metrics.losses(logit, label), expected, rtol=1e-6)


def test_relative_log_loss_of_the_best_constant_is_one() -> None:
    label = np.array([1, 0, 0, 0, 0], np.float32)
    constant = np.full(5, np.log(0.2 / 0.8), np.float32)
    got = metrics.summary(constant, label, np.array([0, 5]))
    assert got["relative_log_loss"] == pytest.approx(1, abs=1e-5)
    assert got["calibration"] == pytest.approx(1, abs=1e-4)


def test_reciprocal_rank_is_of_the_best_clicked() -> None:
    score = np.array([0.9, 0.5, 0.1, 0.2, 0.7], np.float32)
    label = np.array([0, 1, 0, 0, 0], np.float32)
    got = metrics.per_request(score, label, np.array([0, 3, 5]))
    assert got == {"auc": 0.5, "mrr": 0.5, "requests": 1}
