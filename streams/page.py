"""`report.html`: the report of a run, live or backtest, as one page. Pure but for the file that is written.

A part of the report that is absent (a backtest has no latencies) leaves its section out; text from the data is escaped
by `streams.markup` and `streams.charts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from models.api import SOURCES
from streams import charts
from streams.charts import Row, Series
from streams.durations import show_ms
from streams.markup import card, document, facts, figure, table, tiles

NAMES = {"vm": "VM", "solaris": "SOLARIS", "fm": "FM"}
_MEANING = {
    "direct": "this pair's own FM embedding",
    "topic": "mean over the ad's topic",
    "state": "the FM's newest state of the user",
    "aggregate": "mean over the user",
    "similar": "similar users' means",
    "none": "nothing: scored by the VM alone",
}


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Writes the page of a demo's or a backtest's report."""
    path.write_text(render(report), encoding="utf-8")


def render(report: Mapping[str, Any]) -> str:
    live = "rank_latency_ms" in report
    title = "Solaris: a run" if live else "Solaris: a backtest"
    cards = [
        _over_time(report),
        _models(report),
        _by_source(report),
        _funnel(report),
        _calls(report),
        _histogram(
            report, "freshness", "freshness_ms", "Freshness of the user's state",
            "From a user event entering its topic to the FM's new state of that user being readable.", "state",
        ),
        _histogram(
            report, "pairs", "pair_freshness_ms", "Freshness of pair embeddings",
            "From a candidates event entering its topic to its pair embeddings being readable.", "direct",
        ),
        _histogram(
            report, "rank_latency", "rank_latency_ms", "Latency of ranking",
            "From an impression entering its topic to its ranked ads being in a consumer's hand.", "topic",
        ),
        _histogram(
            report, "age", "age_ms", "Age of direct embeddings when used",
            "Event time between the computation of a pair's embedding and the impression that used it.", "direct",
        ),
        _conditions(report),
    ]  # fmt: skip
    about = f"{report['requests']:,} impressions with {report['ads']:,} ads, log {report.get('log', 'unknown')}"
    return document(title, about, [_headline(report), f'<div class="cards">{"".join(cards)}</div>'])


def _headline(report: Mapping[str, Any]) -> str:
    c, ratio = report["coverage"], report.get("transfer_ratio")
    entries = [(f"{report['requests']:,}", "impressions ranked")]
    if "lost" in report:
        entries.append(
            (f"{report['lost']:,} / {report['duplicated']:,}", "lost / duplicated, by reading the topics back")
        )
    if c["none"] is not None:
        entries.append(
            (f"{1 - c['none']:.0%}", f"of ads had something from the FM; {c['direct']:.0%} their own embedding")
        )
    shown = "n/a" if ratio is None else f"{ratio:.0%}"
    interval = report.get("transfer_ratio_interval")
    within = f" (95 %: {interval[0]:.0%} to {interval[1]:.0%})" if interval else ""
    entries.append((shown, f"of the FM's gain reaches the ranker{within}"))
    if report.get("fm_calls_per_impression") is not None:
        entries.append((f"{report['fm_calls_per_impression']:.1f}", "FM calls an impression, in the background"))
    for key, name in (
        ("freshness_ms", "user event to readable state"),
        ("rank_latency_ms", "impression to ranked ads"),
    ):
        q = report.get(key)
        if q and q["p50"] is not None:
            entries.append((_ms(q["p50"]), f"median, {name}; p99 {_ms(q['p99'])}"))
    if report.get("throughput"):
        entries.append((f"{report['throughput']['impressions_per_s'] or 0:,.0f}/s", "impressions ranked, as replayed"))
    return tiles(entries)


def _over_time(report: Mapping[str, Any]) -> str:
    spans = report.get("coverage_over_time") or []
    labels = [_clock(s["ts"]) for s in spans]
    series = [Series(name, name, [s[name] for s in spans]) for name in SOURCES]
    total = report["coverage"]
    said = ", ".join(f"{s} {total[s] or 0:.0%}" for s in SOURCES)
    chart = charts.stacked_area(labels, series, f"Share of ads by best source over event time. Overall: {said}")
    rows = [[_clock(s["ts"]), f"{s['ads']:,}", *(f"{s[name]:.1%}" for name in SOURCES)] for s in spans]
    keys = charts.legend([(f"{s} {total[s] or 0:.1%}: {_MEANING[s]}", s) for s in SOURCES])
    note = "The best that was known of each ad when it was ranked, in spans of event time (UTC)."
    return card("Coverage by source", figure(chart, ["from", "ads", *SOURCES], rows, keys), note, wide=True)


def _models(report: Mapping[str, Any]) -> str:
    by = report.get("metrics")
    if not by:
        return card("Loss: VM, SOLARIS, FM", charts.EMPTY, str(report.get("transfer_note", "")))
    rows = []
    for m, f in by.items():
        low, high = f.get("intervals", {}).get("log_loss", (None, None))
        rows.append(Row(NAMES[m], f["log_loss"], m, low, high))
    said = ", ".join(f"{r.name} {r.value:.5f}" for r in rows)
    losses = charts.dots(rows, lambda v: f"{v:.4f}", f"Log loss, lower is better: {said}")
    gains = [
        Row(NAMES[m], g["gain"], m, g["interval"][0], g["interval"][1])
        for m, g in report.get("gain_over_vm", {}).items()
    ]
    gained = charts.dots(gains, lambda v: f"{v:.1%}", "Log loss below the VM's", zero=True) if gains else ""
    head = ["", "log loss", "AUC", "request AUC", "MRR", "calibration"]
    names = ("log_loss", "auc", "request_auc", "request_mrr", "calibration")
    numbers = [[NAMES[m], *(_number(f[n]) for n in names)] for m, f in by.items()]
    ratio, interval = report.get("transfer_ratio"), report.get("transfer_ratio_interval")
    text = (
        str(report.get("transfer_note", ""))
        if ratio is None
        else f"Transfer ratio {ratio:.0%}"
        + (f", 95 %: {interval[0]:.0%} to {interval[1]:.0%}" if interval else "")
        + ": the share of the FM's gain over the VM that SOLARIS keeps."
    )
    if report.get("speed", 1) > 1:
        text += (
            f" The run's clock was {report['speed']:,.0f} times faster than its events': a second from event to "
            "embedding cost that many seconds of freshness, so read SOLARIS here as a lower bound."
        )
    note = (
        f"{text} {report['pairs_with_feedback']:,} ads with feedback, click rate {report['ctr']:.2%}. Lines are 95 % "
        "intervals over users; models see the same users, so the gains below are surer than the losses look."
    )
    body = f"<figure>{losses}</figure>" + (
        f'<p class="dim">Log loss below the VM\'s</p><figure>{gained}</figure>' if gains else ""
    )
    return card("Log loss: VM, SOLARIS, FM", body + table(head, numbers), note)


def _by_source(report: Mapping[str, Any]) -> str:
    by = report.get("by_source")
    if not by:
        return ""
    models = list(report["metrics"])
    rows = []
    for name, f in by.items():
        rows.append([name, f"{f['ads']:,}", f"{f['ctr']:.2%}", *(f"{f['log_loss'][m]:.5f}" for m in models)])
    gains = [
        Row(name, 1 - f["log_loss"]["solaris"] / f["log_loss"]["vm"], name)
        for name, f in by.items()
        if f["log_loss"]["vm"]
    ]
    chart = charts.dots(gains, lambda v: f"{v:+.1%}", "Log loss of SOLARIS below the VM's, by source", zero=True)
    note = (
        "How far SOLARIS is below the VM on the ads of each source. Ads that were retrieved are likelier to be "
        "clicked, so compare models within a row, not rows."
    )
    head = ["source", "ads", "click rate", *(NAMES[m] for m in models)]
    return card("Where the gain comes from", f"<figure>{chart}</figure>" + table(head, rows), note)


def _funnel(report: Mapping[str, Any]) -> str:
    p = report["pairs"]
    direct = round((report["hits_per_fm_call"] or 0) * p["embedded"])
    steps = [
        ("seen by the verifier", p["seen"], "none"),
        ("accepted", p["accepted"], "similar"),
        ("embedded by the FM", p["embedded"], "direct"),
        ("saved: still fresh", p["saved"], "topic"),
        ("ads that hit one directly", direct, "state"),
    ]
    seen = p["seen"] or 1
    rows = [Row(name, n, colour, note=f"{n / seen:.0%}") for name, n, colour in steps]
    chart = charts.bars(rows, lambda v: f"{v:,.0f}", "; ".join(f"{name} {n:,}" for name, n, _ in steps))
    refused = {k: n for k, n in report.get("refused", _refused(report)).items() if n}
    said = "Refused: " + (", ".join(f"{k} {n:,}" for k, n in refused.items()) or "none") + "."
    note = f"Pairs of user and item, and their share of those seen. {said} An embedding may hit more than once."
    return card("What the verifier let through, and what it was good for", f"<figure>{chart}</figure>", note)


def _refused(report: Mapping[str, Any]) -> dict[str, int]:
    counters = report.get("counters", {}).get("verifier", {})
    return {k.removeprefix("refused_"): n for k, n in counters.items() if k.startswith("refused_")}


def _calls(report: Mapping[str, Any]) -> str:
    ads, requests, embedded = report["ads"], report["requests"], report["pairs"]["embedded"]
    rows = [
        Row("FM in the request path: one call an ad, while the user waits", ads / (requests or 1), "fm"),
        Row("here: pair calls in the background", report["fm_calls_per_impression"] or 0.0, "direct"),
        Row("here: user-state passes (cheap) in the background", report.get("states", 0) / (requests or 1), "state"),
    ]
    moved = f"{embedded / ads:.0%} of that work, moved out of the request" if ads else "nothing to compare it with"
    note = (
        f"FM calls saved, said plainly: an FM in the request path would have scored {ads:,} pairs while users waited; "
        f"here it scored none of them then, but made {embedded:,} pair calls in the background: {moved}. "
        f"{report['pairs']['saved']:,} more were not made because their embedding was still fresh, and each call gave "
        f"{report['hits_per_fm_call'] or 0:.2f} direct hits."
    )
    said = "; ".join(f"{r.name} {r.value:.1f}" for r in rows)
    chart = charts.bars(rows, lambda v: f"{v:.1f}", f"FM calls an impression: {said}")
    return card("FM calls an impression", f"<figure>{chart}</figure>", note)


def _histogram(report: Mapping[str, Any], name: str, key: str, title: str, note: str, colour: str) -> str:
    h = report.get("histograms", {}).get(name)
    if h is None:
        return ""
    q = report.get(key) or {}
    marks = [(p, q[p]) for p in ("p50", "p99") if q.get(p) is not None]
    edges, counts = h["up_to_ms"], h["count"]
    said = ", ".join(f"{p} {_ms(v)}" for p, v in marks) or "no values"
    chart = charts.columns(edges, counts, _ms, marks, f"{title}: {said}", colour)
    total = sum(counts) or 1
    names = [f"up to {_ms(e)}" for e in edges] + [f"above {_ms(edges[-1])}"]
    rows = [[n, f"{c:,}", f"{c / total:.1%}"] for n, c in zip(names, counts, strict=True) if c]
    return card(title, figure(chart, ["", "count", "share"], rows), note)


def _conditions(report: Mapping[str, Any]) -> str:
    entries: dict[str, Any] = dict(report.get("conditions", {}))
    models = report.get("models", {})
    entries |= {k.upper(): models[k] for k in ("vm", "fm") if k in models}
    if "speed" in report:
        entries["speed"] = f"{report['speed']:,.0f} times real time, {report['seconds']:.0f} s of replay"
    if "config" in report:
        entries["settings"] = {k: show_ms(v) if k.endswith("_ms") else v for k, v in report["config"].items()}
    note = "Take figures of other machines and speeds as ratios only."
    return card("Under which conditions", facts(entries), note, wide=True)


def _ms(value: float) -> str:
    for size, unit in ((3.6e6, "h"), (60_000, "min"), (1_000, "s")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} ms"


def _clock(ts_ms: int) -> str:
    return datetime.fromtimestamp(ts_ms / 1000, UTC).strftime("%H:%M")


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.5g}"
