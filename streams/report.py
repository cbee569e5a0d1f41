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

from models.api import SOURCES, Runtime
from models.catalogue import Catalogue
from models.dataset import counted
from models.features import Encoder
from state.counts import CountSettings, CountSource
from streams.audit import check
from streams.losses import NO_FEEDBACK, Judged, compare, transfer
from streams.measures import AGE_BINS_MS, coverage_spans, histogram, quantiles, ratio
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
from topics.ids import ItemId
from topics.packed import decode_embedding, decode_precompute
from topics.tail import Record

__all__ = [
    "RunRecords", "build", "coverage_over_time", "histogram", "lines", "quantiles", "transfer", "transferred",
]  # fmt: skip

F32 = npt.NDArray[np.float32]


@dataclass(slots=True)
class RunRecords:
    """All committed records of one run, by contract name, and when a live consumer got the results."""

    topics: dict[str, list[Record]]
    ranked_at_ms: dict[str, float] = field(default_factory=dict)
    """impression id -> wall clock at which its answer was read"""
    chunk_at_ms: list[tuple[str, bool, float]] = field(default_factory=list)
    """(candidates event id, has a user state, wall clock at which the chunk was read)"""
    judged_from_ms: int = 0
    """event time from which on impressions count in the losses: those before it trained the models"""
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
    source: list[npt.NDArray[np.int64]] = field(default_factory=list)


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
        "hits_per_fm_call": ratio(sources["direct"], embedded),
        "fm_calls_per_impression": ratio(embedded, found.impressions),
        "fm_calls_avoided": {
            "ranked_pairs": ads,
            "at_request_time": ads,
            "note": "pairs an FM in the critical path would have to score while the user waits; here it scores none",
        },
        "coverage": {s: ratio(sources[s], ads) for s in SOURCES},
        "age_ms": quantiles(ages),
        "lost": found.lost,
        "duplicated": found.duplicated,
        "audit": found.as_dict(),
        "dead_letters": len(topics["dlq"]),
        "models": {"vm": runtime.info.vm, "fm": runtime.info.fm, "device": runtime.device},
        "seconds": round(run.seconds, 2),
        "throughput": {
            "impressions_per_s": ratio(found.ranked, run.seconds),
            "pairs_per_s": ratio(embedded, run.seconds),
        },
    }
    report.update(_latencies(run))
    report["histograms"]["age"] = histogram(ages, AGE_BINS_MS)
    report["coverage_over_time"] = coverage_over_time(list(answers.values()))
    report.update(_losses(topics, answers, runtime, fm_pairs, run.judged_from_ms))
    return report


def coverage_over_time(answers: Sequence[RankedAds], buckets: int = 24) -> list[dict[str, Any]]:
    """Shares of ads by source in equal spans of event time."""
    index = {name: k for k, name in enumerate(SOURCES)}
    sizes = np.array([len(a.sources) for a in answers], np.int64)
    ts = np.repeat(np.array([a.ts for a in answers], np.int64), sizes)
    return coverage_spans(ts, np.array([index[s] for a in answers for s in a.sources], np.int64), buckets)


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
    topics: dict[str, list[Record]],
    answers: dict[tuple[str, str], RankedAds],
    runtime: Runtime,
    fm_pairs: int,
    from_ms: int,
) -> dict[str, Any]:
    catalogue = Catalogue(runtime.info.spec)
    for r in topics["items"]:
        try:
            catalogue.update([decode_item(r.value or b"")])
        except InvalidEvent:
            continue
    encoder = Encoder(runtime.info.spec, catalogue)
    clicked: dict[str, set[str]] = {}
    clicks: list[tuple[str, int, list[ItemId]]] = []
    shown: list[tuple[str, int, list[ItemId]]] = []
    for r in topics["feedback"]:
        try:
            f = decode_feedback(r.value or b"")
        except InvalidEvent:
            continue
        clicked.setdefault(f.id, set()).update(map(str, f.clicked))
        clicks.append((f.user, f.ts, f.clicked))
    known: list[Impression] = []
    for r in topics["impressions"]:
        try:
            e = decode_impression(r.value or b"")
        except InvalidEvent:
            continue
        shown.append((e.user, e.ts, e.ads))
        if e.id in clicked and (e.user, e.id) in answers and e.ads and e.ts >= from_ms:
            known.append(e)
    if not known:
        return dict(NO_FEEDBACK)
    known.sort(key=lambda e: (e.ts, e.id))
    trained = CountSettings.as_trained(runtime.info.count_lag_ms)
    counts = counted(shown, clicks, trained) if runtime.info.rolling else None
    pairs = _Pairs()
    done = 0
    for i in range(0, len(known), 512):
        if done >= fm_pairs:
            break
        done = _score(known[i : i + 512], encoder, runtime, counts, answers, clicked, pairs)
    logits = {"vm": pairs.vm, "solaris": pairs.solaris, "fm": pairs.fm}
    judged = Judged(
        label=np.concatenate(pairs.label), logits={m: np.concatenate(x) for m, x in logits.items()},
        splits=np.array(pairs.splits, np.int64), users=np.array(pairs.users, np.uint64),
        source=np.concatenate(pairs.source),
    )  # fmt: skip
    return compare(judged)


def _score(
    events: Sequence[Impression],
    encoder: Encoder,
    runtime: Runtime,
    counts: CountSource | None,
    answers: dict[tuple[str, str], RankedAds],
    clicked: dict[str, set[str]],
    out: _Pairs,
) -> int:
    batch = encoder.impressions(events)
    known = None if counts is None else counts.lookup(batch.users, batch.splits, batch.items, batch.ts_ms)
    out.vm.append(runtime.score(batch, known).logit)
    out.fm.append(runtime.embed(batch)[:, -1])
    for b, e in enumerate(events):
        answer = answers[e.user, e.id]
        scores = np.empty(len(e.ads), np.float64)
        scores[answer.positions] = answer.scores
        p = np.clip(scores, 1e-7, 1 - 1e-7)
        out.solaris.append(np.log(p / (1 - p)).astype(np.float32))
        source = np.empty(len(e.ads), np.int64)
        source[answer.positions] = [SOURCES.index(s) for s in answer.sources]
        out.source.append(source)
        out.label.append(np.array([str(ad) in clicked[e.id] for ad in e.ads], np.float32))
        out.users.append(int(batch.users[b]))
        out.splits.append(out.splits[-1] + len(e.ads))
    return out.splits[-1]


def lines(report: dict[str, Any]) -> list[str]:
    """The ten lines that matter."""
    c, p, loss = report["coverage"], report["pairs"], report["log_loss"]
    if c["none"] is None:
        raise ContractError("nothing was ranked: there is no report to print")

    def ms(q: dict[str, float | None]) -> str:
        return "not measured" if q["p50"] is None else f"p50 {q['p50']:,.0f} ms, p99 {q['p99']:,.0f} ms"

    def hours(q: dict[str, float | None]) -> str:
        return "none" if q["p50"] is None else f"p50 {q['p50'] / 3.6e6:.1f} h, p99 {(q['p99'] or 0) / 3.6e6:.1f} h"

    return [
        f"ranked      {report['requests']:,} impressions, {report['ads']:,} ads; lost {report['lost']}, "
        f"duplicated {report['duplicated']} (by reading the topics back)",
        f"candidates  {p['seen']:,} pairs seen, {p['accepted']:,} accepted, {p['embedded']:,} embedded, "
        f"{p['saved']:,} saved as still fresh",
        "coverage    " + ", ".join(f"{s} {c[s]:.1%}" for s in SOURCES),
        f"age         of direct embeddings when used: {hours(report['age_ms'])}",
        f"log loss    VM {_loss(loss['vm'])}, SOLARIS {_loss(loss['solaris'])}, FM {_loss(loss['fm'])}",
        f"transfer    {transferred(report)}",
        f"cost        {report['fm_calls_per_impression'] or 0:.1f} FM calls an impression, "
        f"{report['hits_per_fm_call'] or 0:.2f} direct hits an FM call; none while a user waits",
        f"freshness   user event to rankable state: {ms(report['freshness_ms'])}; "
        f"pairs: {ms(report['pair_freshness_ms'])}",
        f"latency     impression to ranked ads: {ms(report['rank_latency_ms'])}",
        f"throughput  {report['throughput']['impressions_per_s'] or 0:,.0f} impressions/s, "
        f"{report['throughput']['pairs_per_s'] or 0:,.0f} FM pairs/s, {report['seconds']:.0f} s of replay",
    ]


def transferred(report: dict[str, Any]) -> str:
    """The transfer ratio in words."""
    found = report["transfer_ratio"]
    if found is None:
        return str(report.get("transfer_note", ""))
    low, high = report.get("transfer_ratio_interval") or (found, found)
    return f"{found:.0%} of the FM's gain (95 %: {low:.0%} to {high:.0%})"


def _loss(x: float | None) -> str:
    return "n/a" if x is None else f"{x:.5f}"
