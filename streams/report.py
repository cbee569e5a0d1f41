"""The report of a run, from what its topics hold: losses, coverage, freshness, latency, FM calls. Pure.

Latencies and freshness are wall-clock times from the broker's timestamp of the causing record (LogAppendTime) to the
moment a read_committed consumer on the same host had the result in hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from models import metrics
from models.api import SOURCES, Runtime
from models.catalogue import Catalogue
from models.features import Encoder
from streams.audit import check
from topics.errors import ContractError, InvalidEvent
from topics.events import (
    Impression,
    RankedAds,
    decode_candidates,
    decode_feedback,
    decode_impression,
    decode_item,
    decode_ranked_ads,
)
from topics.packed import decode_embedding, decode_precompute
from topics.tail import Record

F32 = npt.NDArray[np.float32]
BOOTSTRAPS = 200
MIN_FM_GAIN = 0.01
BINS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000)


@dataclass(slots=True)
class RunRecords:
    """All committed records of one run, by contract name, and when a live consumer got the results."""

    topics: dict[str, list[Record]]
    ranked_at_ms: dict[str, float] = field(default_factory=dict)
    """impression id -> wall clock at which its answer was read"""
    chunk_at_ms: list[tuple[str, bool, float]] = field(default_factory=list)
    """(candidates event id, has a user state, wall clock at which the chunk was read)"""
    seconds: float = 0.0
    """wall time of the replay, until the last answer"""


@dataclass(slots=True)
class _Pairs:
    users: list[int] = field(default_factory=list)
    splits: list[int] = field(default_factory=lambda: [0])
    label: list[F32] = field(default_factory=list)
    solaris: list[F32] = field(default_factory=list)
    vm: list[F32] = field(default_factory=list)
    fm: list[F32] = field(default_factory=list)


def build(
    run: RunRecords, runtime: Runtime, ttl_ms: int, impressions_topic: str, fm_pairs: int = 1_000_000
) -> dict[str, Any]:
    """The report. Losses of VM and FM are recomputed here from the impressions as they stand in the topic, with the FM
    on the first `fm_pairs` pairs at most."""
    topics = run.topics
    found = check(
        topics["impressions"], topics["ranked-ads"], topics["dlq"], topics["embeddings"], impressions_topic, ttl_ms
    )
    answers = {(a.user, a.id): a for a in (decode_ranked_ads(r.value or b"") for r in topics["ranked-ads"])}
    seen = _seen(topics["candidates"])
    accepted = sum(len(decode_precompute(r.value).items) for r in topics["precompute"])
    chunks = [decode_embedding(r.value) for r in topics["embeddings"]]
    embedded = sum(len(c.items) for c in chunks)
    states = sum(bool(len(c.state)) for c in chunks)
    sources: Counter[str] = Counter()
    ages: list[int] = []
    for a in answers.values():
        sources.update(a.sources)
        ages += [age for s, age in zip(a.sources, a.ages_ms, strict=True) if s == "direct" and age is not None]
    ads = sum(sources.values())
    report: dict[str, Any] = {
        "requests": found.impressions,
        "ads": ads,
        "pairs": {"seen": seen, "accepted": accepted, "embedded": embedded, "saved": accepted - embedded},
        "states": states,
        "hits_per_fm_call": _ratio(sources["direct"], embedded),
        "fm_calls_per_impression": _ratio(embedded, found.impressions),
        "fm_calls_avoided": {
            "ranked_pairs": ads,
            "at_request_time": ads,
            "note": "pairs an FM in the critical path would have to score while the user waits; here it scores none",
        },
        "coverage": {s: _ratio(sources[s], ads) for s in SOURCES},
        "age_ms": quantiles(ages),
        "lost": found.lost,
        "duplicated": found.duplicated,
        "audit": found.as_dict(),
        "dead_letters": len(topics["dlq"]),
        "models": {"vm": runtime.info.vm, "fm": runtime.info.fm, "device": runtime.device},
        "seconds": round(run.seconds, 2),
        "throughput": {
            "impressions_per_s": _ratio(found.ranked, run.seconds),
            "pairs_per_s": _ratio(embedded, run.seconds),
        },
    }
    report.update(_latencies(run))
    report["coverage_over_time"] = coverage_over_time(list(answers.values()))
    report.update(_losses(topics, answers, runtime, fm_pairs))
    return report


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    if not len(values):
        return {"p50": None, "p90": None, "p99": None, "max": None}
    a = np.asarray(values, np.float64)
    p50, p90, p99 = np.quantile(a, [0.5, 0.9, 0.99])
    return {"p50": round(p50, 1), "p90": round(p90, 1), "p99": round(p99, 1), "max": round(float(a.max()), 1)}


def histogram(values: Sequence[float], bins: Sequence[float] = BINS_MS) -> dict[str, list[float]]:
    """Counts of values up to each bin's upper edge; the last count is what lies above all."""
    edges = np.asarray(bins, np.float64)
    counts = np.bincount(np.searchsorted(edges, np.asarray(values, np.float64)), minlength=len(edges) + 1)
    return {"up_to_ms": list(map(float, bins)), "count": counts.tolist()}


def coverage_over_time(answers: Sequence[RankedAds], buckets: int = 24) -> list[dict[str, Any]]:
    """Shares of ads by source in equal spans of event time."""
    if not answers:
        return []
    times = np.array([a.ts for a in answers])
    first, last = int(times.min()), int(times.max()) + 1
    width = max(1, -(-(last - first) // buckets))
    counts = [Counter[str]() for _ in range(buckets)]
    for a in answers:
        counts[(a.ts - first) // width].update(a.sources)
    out = []
    for k, c in enumerate(counts):
        n = sum(c.values())
        if n:
            out.append({"ts": first + k * width, "ads": n, **{s: round(c[s] / n, 4) for s in SOURCES}})
    return out


def transfer(vm: F32, solaris: F32, fm: F32, label: F32, users: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Transfer ratio (LL_vm - LL_solaris) / (LL_vm - LL_fm) with a 95 % interval from a bootstrap over users [N].

    None where it would say nothing: the FM's own gain is under 1 % or its interval spans zero.
    """
    losses = np.stack([metrics.losses(x, label) for x in (vm, solaris, fm)])
    _, inverse = np.unique(users, return_inverse=True)
    n = inverse.max() + 1
    by_user = np.stack([np.bincount(inverse, weights=row, minlength=n) for row in losses])
    rng = np.random.default_rng(0)
    draws = by_user @ rng.multinomial(n, np.full(n, 1 / n), size=BOOTSTRAPS).T
    gains = draws[0] - draws[2]
    ll_vm, ll_solaris, ll_fm = losses.mean(axis=1)
    gain = (ll_vm - ll_fm) / ll_vm
    low, high = np.quantile(gains / draws[0], [0.025, 0.975])
    out: dict[str, Any] = {"fm_gain": round(float(gain), 5), "fm_gain_interval": [round(low, 5), round(high, 5)]}
    if gain < MIN_FM_GAIN or low <= 0:
        return {"transfer_ratio": None, "transfer_ratio_interval": None, **out,
                "transfer_note": "the FM's own gain over the VM is under 1 % or not certain: no ratio"}  # fmt: skip
    ratios = (draws[0] - draws[1]) / gains
    interval = np.quantile(ratios, [0.025, 0.975])
    ratio = (ll_vm - ll_solaris) / (ll_vm - ll_fm)
    return {
        "transfer_ratio": round(float(ratio), 4),
        "transfer_ratio_interval": [round(float(x), 4) for x in interval],
        **out,
    }


def _seen(records: Sequence[Record]) -> int:
    n = 0
    for r in records:
        try:
            n += len(decode_candidates(r.value or b"").items)
        except InvalidEvent:
            continue  # it is in the DLQ
    return n


def _latencies(run: RunRecords) -> dict[str, Any]:
    asked = {}
    for r in run.topics["impressions"]:
        try:
            asked[decode_impression(r.value or b"").id] = r.timestamp_ms
        except InvalidEvent:
            continue
    rank = [max(0.0, at - asked[i]) for i, at in run.ranked_at_ms.items() if i in asked]
    caused = {}
    for r in run.topics["candidates"]:
        try:
            caused[decode_candidates(r.value or b"").id] = r.timestamp_ms
        except InvalidEvent:
            continue
    state = [max(0.0, at - caused[i]) for i, has_state, at in run.chunk_at_ms if has_state and i in caused]
    pairs = [max(0.0, at - caused[i]) for i, has_state, at in run.chunk_at_ms if not has_state and i in caused]
    return {
        "rank_latency_ms": quantiles(rank),
        "freshness_ms": quantiles(state),
        "pair_freshness_ms": quantiles(pairs),
        "histograms": {"rank_latency": histogram(rank), "freshness": histogram(state), "pairs": histogram(pairs)},
    }


def _losses(
    topics: dict[str, list[Record]], answers: dict[tuple[str, str], RankedAds], runtime: Runtime, fm_pairs: int
) -> dict[str, Any]:
    nothing = {"log_loss": {"vm": None, "solaris": None, "fm": None}, "auc": {"vm": None, "solaris": None, "fm": None},
               "transfer_ratio": None, "transfer_note": "no feedback in the log: no losses"}  # fmt: skip
    catalogue = Catalogue(runtime.info.spec)
    for r in topics["items"]:
        try:
            catalogue.update([decode_item(r.value or b"")])
        except InvalidEvent:
            continue
    encoder = Encoder(runtime.info.spec, catalogue)
    clicked: dict[str, set[str]] = {}
    for r in topics["feedback"]:
        try:
            f = decode_feedback(r.value or b"")
        except InvalidEvent:
            continue
        clicked.setdefault(f.id, set()).update(map(str, f.clicked))
    known: list[Impression] = []
    for r in topics["impressions"]:
        try:
            e = decode_impression(r.value or b"")
        except InvalidEvent:
            continue
        if e.id in clicked and (e.user, e.id) in answers and e.ads:
            known.append(e)
    if not known:
        return nothing
    known.sort(key=lambda e: (e.ts, e.id))
    pairs = _Pairs()
    done = 0
    for i in range(0, len(known), 512):
        if done >= fm_pairs:
            break
        done = _score(known[i : i + 512], encoder, runtime, answers, clicked, pairs)
    label, vm, solaris, fm = (np.concatenate(x) for x in (pairs.label, pairs.vm, pairs.solaris, pairs.fm))
    splits = np.array(pairs.splits, np.int64)
    by = {name: metrics.summary(x, label, splits) for name, x in (("vm", vm), ("solaris", solaris), ("fm", fm))}
    users = np.repeat(np.array(pairs.users, np.uint64).view(np.int64), np.diff(splits))
    return {
        "log_loss": {k: v["log_loss"] for k, v in by.items()},
        "auc": {k: v["auc"] for k, v in by.items()},
        "metrics": by,
        "pairs_with_feedback": len(label),
        "ctr": round(float(label.mean()), 6),
        **transfer(vm, solaris, fm, label, users),
    }


def _score(
    events: Sequence[Impression],
    encoder: Encoder,
    runtime: Runtime,
    answers: dict[tuple[str, str], RankedAds],
    clicked: dict[str, set[str]],
    out: _Pairs,
) -> int:
    batch = encoder.impressions(events)
    out.vm.append(runtime.score(batch).logit)
    out.fm.append(runtime.embed(batch)[:, -1])
    for b, e in enumerate(events):
        answer = answers[e.user, e.id]
        scores = np.empty(len(e.ads), np.float64)
        scores[answer.positions] = answer.scores
        p = np.clip(scores, 1e-7, 1 - 1e-7)
        out.solaris.append(np.log(p / (1 - p)).astype(np.float32))
        out.label.append(np.array([str(ad) in clicked[e.id] for ad in e.ads], np.float32))
        out.users.append(int(batch.users[b]))
        out.splits.append(out.splits[-1] + len(e.ads))
    return out.splits[-1]


def _ratio(a: float, b: float) -> float | None:
    return round(a / b, 5) if b else None


def lines(report: dict[str, Any]) -> list[str]:
    """The ten lines that matter."""
    c, p, loss = report["coverage"], report["pairs"], report["log_loss"]
    if c["none"] is None:
        raise ContractError("nothing was ranked: there is no report to print")

    def ms(q: dict[str, float | None]) -> str:
        return "not measured" if q["p50"] is None else f"p50 {q['p50']:,.0f} ms, p99 {q['p99']:,.0f} ms"

    def hours(q: dict[str, float | None]) -> str:
        return "none" if q["p50"] is None else f"p50 {q['p50'] / 3.6e6:.1f} h, p99 {(q['p99'] or 0) / 3.6e6:.1f} h"

    ratio = report["transfer_ratio"]
    interval = report.get("transfer_ratio_interval") or [0, 0]
    shown = (
        report.get("transfer_note", "")
        if ratio is None
        else f"{ratio:.0%} of the FM's gain (95 %: {interval[0]:.0%} to {interval[1]:.0%})"
    )
    return [
        f"ranked      {report['requests']:,} impressions, {report['ads']:,} ads; lost {report['lost']}, "
        f"duplicated {report['duplicated']} (by reading the topics back)",
        f"candidates  {p['seen']:,} pairs seen, {p['accepted']:,} accepted, {p['embedded']:,} embedded, "
        f"{p['saved']:,} saved as still fresh",
        "coverage    " + ", ".join(f"{s} {c[s]:.1%}" for s in SOURCES),
        f"age         of direct embeddings when used: {hours(report['age_ms'])}",
        f"log loss    VM {_loss(loss['vm'])}, SOLARIS {_loss(loss['solaris'])}, FM {_loss(loss['fm'])}",
        f"transfer    {shown}",
        f"cost        {report['fm_calls_per_impression'] or 0:.1f} FM calls an impression, "
        f"{report['hits_per_fm_call'] or 0:.2f} direct hits an FM call; none while a user waits",
        f"freshness   user event to rankable state: {ms(report['freshness_ms'])}; "
        f"pairs: {ms(report['pair_freshness_ms'])}",
        f"latency     impression to ranked ads: {ms(report['rank_latency_ms'])}",
        f"throughput  {report['throughput']['impressions_per_s'] or 0:,.0f} impressions/s, "
        f"{report['throughput']['pairs_per_s'] or 0:,.0f} FM pairs/s, {report['seconds']:.0f} s of replay",
    ]


def _loss(x: float | None) -> str:
    return "n/a" if x is None else f"{x:.5f}"
