"""What a backtest found, as one dict (JSON) and as a table for people. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.api import SOURCES
from streams.backtest import BacktestResult, Scored
from streams.gate import REASONS
from streams.losses import BOOTSTRAPS, Judged, compare
from streams.measures import AGE_BINS_MS, coverage, coverage_spans, histogram, quantiles, ratio
from streams.report import transferred

NAMES = {"vm": "VM", "solaris": "SOLARIS", "fm": "FM"}


def summarise(result: BacktestResult, draws: int = BOOTSTRAPS) -> dict[str, Any]:
    """The report. `requests`, `ads`, coverage, ages and losses are of the reported impressions (from `start_ms` on);
    `pairs`, `states` and the FM's calls are of the whole log. Losses count requests with known feedback only.
    """
    s, c = result.scored, result.counters
    direct = s.age_ms[s.source == SOURCES.index("direct")]
    embedded, saved = c["embedder_pairs_embedded"], c["embedder_pairs_saved"]
    of_ad = np.diff(s.splits)
    return {
        "requests": len(s.ts_ms),
        "ads": len(s.label),
        "users": len(np.unique(s.users)),
        "pairs": {"seen": c["pairs_seen"], "accepted": c["pairs_accepted"], "embedded": embedded, "saved": saved},
        "refused": {reason: c[f"refused_{reason}"] for reason in REASONS},
        "not_finite": {"pairs": c["embedder_pairs_not_finite"], "states": c["embedder_states_not_finite"]},
        "states": c["embedder_states"],
        "hits_per_fm_call": ratio(c["ranker_source_direct"], embedded),
        "fm_calls_per_impression": ratio(embedded, c["ranker_impressions"]),
        "coverage": coverage(s.source),
        "age_ms": quantiles(direct),
        "age_by_source_ms": {
            name: quantiles(s.age_ms[s.source == k]) for k, name in enumerate(SOURCES[:-1]) if (s.source == k).any()
        },
        "histograms": {"age": histogram(direct, AGE_BINS_MS)},
        "coverage_over_time": coverage_spans(np.repeat(s.ts_ms, of_ad), s.source),
        **compare(judged(s), draws),
    }  # fmt: skip


def judged(s: Scored) -> Judged:
    """The pairs of requests with known feedback."""
    sizes = np.diff(s.splits)
    keep = np.repeat(s.known, sizes)
    logits = {"vm": s.vm[keep], "solaris": s.solaris[keep]}
    if s.fm is not None:
        logits["fm"] = s.fm[keep]
    splits = np.concatenate([[0], np.cumsum(sizes[s.known])]).astype(np.int64)
    return Judged(s.label[keep], logits, splits, s.users[s.known], s.source[keep])


def table(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    p, c, age = report["pairs"], report["coverage"], report["age_ms"]
    hours = "none" if age["p50"] is None else ", ".join(f"{q} {age[q] / 3.6e6:.2f} h" for q in ("p50", "p90", "p99"))
    refused = ", ".join(f"{k} {n:,}" for k, n in report["refused"].items() if n) or "none"
    lines = [
        f"requests    {report['requests']:,} of {report['users']:,} users, {report['ads']:,} ads",
        f"pairs       {p['seen']:,} seen, {p['accepted']:,} accepted, {p['embedded']:,} embedded, {p['saved']:,} saved "
        f"as still fresh; refused: {refused}",
        f"FM          {report['fm_calls_per_impression'] or 0:.1f} pair calls an impression, "
        f"{report['hits_per_fm_call'] or 0:.3f} direct hits a call, {report['states']:,} user states",
        "coverage    " + ", ".join(f"{s} {c[s] or 0:.1%}" for s in SOURCES),
        f"age         of direct embeddings when used: {hours}",
    ]
    if "metrics" not in report:
        return "\n".join([*lines, f"losses      {report['transfer_note']}"])
    lines += [
        f"transfer    {transferred(report)}",
        f"losses      over {report['requests_with_feedback']:,} requests with feedback, "
        f"click rate {report['ctr']:.2%}; in brackets 95 % over users",
        "",
        f"{'':<9}{'log loss':<30}{'AUC':<28}{'request AUC':<28}{'MRR':<28}{'calibration'}",
    ]
    for m, f in report["metrics"].items():
        cells = [_cell(f, "log_loss", 5), _cell(f, "auc", 4), _cell(f, "request_auc", 4), _cell(f, "request_mrr", 4)]
        widths = (30, 28, 28, 28)
        shown = "".join(f"{cell:<{w}}" for cell, w in zip(cells, widths, strict=True))
        lines.append(f"{NAMES[m]:<9}{shown}{f['calibration']}")
    lines += ["", f"{'source':<11}{'ads':>9}{'click rate':>12}" + "".join(f"{NAMES[m]:>10}" for m in report["metrics"])]
    for name, f in report["by_source"].items():
        losses = "".join(f"{x:>10.5f}" for x in f["log_loss"].values())
        lines.append(f"{name:<11}{f['ads']:>9,}{f['ctr']:>12.2%}{losses}")
    return "\n".join(lines)


def _cell(figures: dict[str, Any], name: str, digits: int) -> str:
    value, (low, high) = figures[name], figures["intervals"][name]
    if value is None or low is None:
        return "n/a"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
