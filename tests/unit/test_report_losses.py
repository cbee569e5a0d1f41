"""Losses of several models on the same pairs: intervals over users, the transfer ratio and when there is none."""

from __future__ import annotations

import json

import numpy as np
import pytest

from models import metrics
from models.api import SOURCES
from streams.losses import Judged, _Auc, compare, transfer
from streams.measures import coverage, coverage_spans, histogram, plain, quantiles
from streams.report import coverage_over_time
from topics.events import RankedAds

F32 = np.float32


def made(users: int = 60, ads: int = 10, fm_strength: float = 1.0, seed: int = 0) -> Judged:
    """Requests, two a user, whose clicks follow `truth`; the FM knows it as far as `fm_strength`."""
    rng = np.random.default_rng(seed)
    requests = users * 2
    n = requests * ads
    truth = rng.normal(-1.5, 1.5, n)
    label = (rng.random(n) < 1 / (1 + np.exp(-truth))).astype(F32)
    vm = np.full(n, np.log(label.mean() / (1 - label.mean())), F32)
    logits = {
        m: (vm + share * (truth - vm)).astype(F32)
        for m, share in (("vm", 0), ("solaris", 0.4 * fm_strength), ("fm", fm_strength))
    }
    owners = np.repeat(rng.permutation(2**63 + np.arange(users, dtype=np.uint64)), 2)
    return Judged(label, logits, np.arange(0, n + 1, ads), owners, rng.integers(0, len(SOURCES), n))


def test_figures_are_those_of_the_pairs() -> None:
    pairs = made()
    out = compare(pairs)
    ll = {m: metrics.log_loss(x, pairs.label) for m, x in pairs.logits.items()}
    assert out["log_loss"] == {m: round(x, 6) for m, x in ll.items()}
    assert out["transfer_ratio"] == pytest.approx((ll["vm"] - ll["solaris"]) / (ll["vm"] - ll["fm"]), abs=1e-4)
    assert out["gain_over_vm"]["fm"]["gain"] == pytest.approx(1 - ll["fm"] / ll["vm"], abs=1e-5)
    assert out["requests_with_feedback"] == 120
    assert out["users_with_feedback"] == 60
    low, high = out["transfer_ratio_interval"]
    assert low < out["transfer_ratio"] < high
    part = out["by_source"]["topic"]
    mine = pairs.source == SOURCES.index("topic")
    assert part["ads"] == mine.sum()
    assert part["log_loss"]["fm"] == pytest.approx(
        metrics.log_loss(pairs.logits["fm"][mine], pairs.label[mine]), abs=1e-6
    )
    assert compare(pairs) == out
    assert (
        out["transfer_ratio"]
        == transfer(
            pairs.logits["vm"], pairs.logits["solaris"], pairs.logits["fm"], pairs.label, np.repeat(pairs.users, 10)
        )["transfer_ratio"]
    )


def test_intervals_are_over_users_not_pairs() -> None:
    """The same pairs told twice are no more evidence: the interval stays; twice the users narrow it."""
    once, many = made(users=60), made(users=240)
    doubled = Judged(
        label=np.tile(once.label, 2),
        logits={m: np.tile(x, 2) for m, x in once.logits.items()},
        splits=np.concatenate([once.splits, once.splits[-1] + once.splits[1:]]),
        users=np.tile(once.users, 2),
        source=np.tile(once.source, 2),
    )

    def width(pairs: Judged) -> float:
        low, high = compare(pairs)["metrics"]["fm"]["intervals"]["log_loss"]
        return high - low

    assert width(doubled) == pytest.approx(width(once), rel=1e-3)
    assert width(many) < 0.75 * width(once)


def test_weighted_auc_is_the_auc_of_repeated_pairs() -> None:
    rng = np.random.default_rng(3)
    score = rng.integers(0, 8, 300).astype(F32)  # with ties
    label = (rng.random(300) < 0.3).astype(F32)
    user = rng.integers(0, 20, 300)
    weights = rng.integers(0, 4, 20)
    times = weights[user]
    want = metrics.auc(np.repeat(score, times), np.repeat(label, times))
    assert _Auc(score, label, user).weighted(weights.astype(float)) == pytest.approx(want)


def no_ratio(pairs: Judged) -> bool:
    out = compare(pairs)
    logits = [pairs.logits[m] for m in ("vm", "solaris", "fm")]
    sizes = np.diff(pairs.splits)
    alone = transfer(*logits, pairs.label, np.repeat(pairs.users, sizes))
    assert alone["transfer_ratio"] == out["transfer_ratio"]
    assert (out["transfer_ratio"] is None) == (out["transfer_ratio_interval"] is None)
    return out["transfer_ratio"] is None and "no ratio" in out["transfer_note"]


@pytest.mark.parametrize("strength", [0.0, 0.02, -0.5])
def test_no_ratio_where_the_fm_has_no_gain(strength: float) -> None:
    assert no_ratio(made(fm_strength=strength))


def test_no_ratio_where_the_gain_is_not_certain() -> None:
    """One user for whom the FM is much better, one for whom it is a little worse: a gain, but whose?"""
    label = np.tile(np.array([1, 0, 0, 0], F32), 2)
    vm = np.full(8, -1.0, F32)
    fm = np.array([3, -3, -3, -3, -1.1, -1, -1, -1], F32)
    pairs = Judged(label, {"vm": vm, "solaris": vm, "fm": fm}, np.array([0, 4, 8]), np.array([1, 2]), np.zeros(8, int))
    assert compare(pairs)["fm_gain"] > 0.3
    assert no_ratio(pairs)
    assert not no_ratio(made())


def test_without_an_fm_and_without_feedback() -> None:
    pairs = made()
    two = {m: pairs.logits[m] for m in ("vm", "solaris")}
    without = compare(Judged(pairs.label, two, pairs.splits, pairs.users, pairs.source))
    assert without["transfer_ratio"] is None
    assert without["log_loss"]["fm"] is None
    assert "not run" in without["transfer_note"]
    none = {m: x[:0] for m, x in pairs.logits.items()}
    nothing = Judged(pairs.label[:0], none, np.zeros(1, np.int64), pairs.users[:0], pairs.source[:0])
    assert compare(nothing)["transfer_note"].startswith("no feedback")


def test_one_class_gives_json_without_nan() -> None:
    pairs = made()
    pairs.label[:] = 0
    text = json.dumps(compare(pairs), allow_nan=False)
    assert json.loads(text)["auc"]["fm"] is None


def test_quantiles_histogram_and_plain() -> None:
    assert quantiles([]) == {"p50": None, "p90": None, "p99": None, "max": None}
    assert quantiles([1.0, 2.0, 3.0])["p50"] == 2.0
    found = histogram([0, 1, 1.5, 10, 11], bins=(1, 10))
    assert found == {"up_to_ms": [1.0, 10.0], "count": [2, 2, 1]}
    assert plain({"a": [float("nan"), 1.0], "b": float("inf")}) == {"a": [None, 1.0], "b": None}


def test_coverage_over_time_counts_every_ad_in_its_span() -> None:
    ts = np.array([0, 5, 10, 99], np.int64)
    source = np.array([0, 5, 5, 1])
    spans = coverage_spans(ts, source, spans=10)
    assert [(s["ts"], s["ads"]) for s in spans] == [(0, 2), (10, 1), (90, 1)]
    assert spans[0]["direct"] == spans[0]["none"] == 0.5
    assert spans[2]["topic"] == 1.0
    assert coverage(source)["none"] == 0.5
    assert coverage_spans(ts[:0], source[:0]) == []
    assert coverage_over_time([]) == []
    answers = [
        RankedAds(id=str(t), user="u", ts=int(t), ads=["a"], positions=[0], scores=[0.1], sources=[SOURCES[s]],
                  ages_ms=[None], vm="v", fm="f", state="live", received_ms=0, ranked_ms=0)
        for t, s in zip(ts, source, strict=True)
    ]  # fmt: skip
    assert coverage_over_time(answers, 10) == spans
