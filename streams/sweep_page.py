"""`sweep.html`: the curves of a sweep. Pure but for the file that is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from streams import charts
from streams.charts import CYCLE, Curve
from streams.durations import show_ms
from streams.markup import card, document, facts, figure, table
from streams.sweep import DURATIONS, figures, number

UNITS = {
    "budget": "pairs accepted per second of event time",
    "share": "share of the pairs seen that may be accepted",
    "threshold": "least pCTR worth an FM call",
    "top_k": "pairs accepted per candidates event",
    "per_user_cap": "pairs accepted per user and hour",
    "ttl": "how long an embedding is live",
    "window": "window of the aggregates",
    "burst": "how much of the budget may be saved up for one moment",
    "delay": "from an event to its embeddings and state being servable",
    "pair_delay": "from an event to its pair embeddings being servable",
    "state_delay": "from an event to the user's state being servable",
}
NO_LIMIT_AT_0 = ("budget", "top_k", "per_user_cap")
_MAX_CURVES = len(CYCLE)
_COLOURS = {"VM": "vm", "SOLARIS": "solaris", "FM": "fm", "anything": "state"}

Figure = Callable[[Mapping[str, Any]], float | None]


def write_sweep_page(result: Mapping[str, Any], path: Path) -> None:
    path.write_text(render(result), encoding="utf-8")


def render(result: Mapping[str, Any]) -> str:
    axes: Mapping[str, Sequence[str]] = result["axes"]
    points = result["points"]
    cards = [c for axis in axes if axis in UNITS and len(axes[axis]) > 1 for c in _axis(axis, axes, points, result)]
    head = [*axes, "direct", "covered", "calls/imp.", "hits/call", "VM", "SOLARIS", "FM", "transfer"]
    rows = [[*(p["settings"].get(a, "") for a in axes), *figures(p)] for p in points]
    cards.append(card("All points", table(head, rows), wide=True))
    base = {k: show_ms(v) if k.endswith("_ms") else v for k, v in result["base"].items()}
    shown = {**result["conditions"], "other settings": base}
    cards.append(card("Under which conditions", facts(shown), wide=True))
    first = points[0]
    about = (
        f"{len(points)} backtests of {first['requests']:,} impressions with {first['ads']:,} ads each, "
        f"log {result['log']}"
    )
    return document("Solaris: a sweep", about, [f'<div class="cards">{"".join(cards)}</div>'])


def _axis(
    axis: str, axes: Mapping[str, Sequence[str]], points: Sequence[Mapping[str, Any]], result: Mapping[str, Any]
) -> list[str]:
    others = [a for a in axes if a != axis and not result["each"]]
    split = next((a for a in others if len(axes[a]) > 1), None)
    fixed = {a: axes[a][0] for a in others if a != split}
    rows = [p for p in points if axis in p["settings"] and all(p["settings"][a] == v for a, v in fixed.items())]
    groups = {"": rows}
    if split is not None:
        groups = {f"{split} {v}": [p for p in rows if p["settings"][split] == v] for v in axes[split][:_MAX_CURVES]}
    single = len(groups) == 1
    note = f"x: {axis}, {UNITS[axis]}." + (f" At {', '.join(f'{a} {v}' for a, v in fixed.items())}." if fixed else "")

    def loss(m: str) -> Figure:
        return lambda p: p["log_loss"].get(m)

    charts_of: list[tuple[str, dict[str, Figure], Callable[[float], str], bool]] = [
        (
            f"Coverage against {axis}",
            {"own embedding": lambda p: p["coverage"]["direct"]}
            | ({"anything": lambda p: 1 - p["coverage"]["none"]} if single else {}),
            lambda v: f"{v:.0%}", True,
        ),
        (
            f"Log loss against {axis}",
            {"SOLARIS": loss("solaris")} | ({"VM": loss("vm"), "FM": loss("fm")} if single else {}),
            lambda v: f"{v:.4f}", False,
        ),
        (f"Direct hits per FM call against {axis}", {"hits": lambda p: p["hits_per_fm_call"]}, _short, True),
        (f"FM calls an impression against {axis}", {"calls": lambda p: p["fm_calls_per_impression"]}, _short, True),
    ]  # fmt: skip
    return [_curves(title, axis, groups, of, show, up, note) for title, of, show, up in charts_of]


def _curves(
    title: str,
    axis: str,
    groups: Mapping[str, Sequence[Mapping[str, Any]]],
    of: Mapping[str, Figure],
    show: Callable[[float], str],
    top_up: bool,
    note: str,
) -> str:
    xs = {p["settings"][axis]: number(axis, p["settings"][axis]) or 0.0 for rows in groups.values() for p in rows}
    places = _places(axis, list(xs.values()))
    series: list[Curve] = []
    for group, rows in groups.items():
        for name, get in of.items():
            found = [(places[xs[p["settings"][axis]]], get(p)) for p in rows]
            points = sorted((x, y) for x, y in found if y is not None)
            if points:
                label = group if len(of) == 1 and group else ", ".join(w for w in (group, name) if w)
                colour = CYCLE[len(series) % len(CYCLE)] if group else _COLOURS.get(name, "direct")
                series.append(Curve(label, points, colour))
    names = {place: _name(axis, x) for x, place in places.items()}
    positive = [x for x in places.values() if x > 0]
    log_x = bool(positive) and max(positive) >= 8 * min(positive)
    drawn = charts.curves(series, names.__getitem__, show, title, log_x, top_up)
    keys = charts.legend([(s.name, s.colour) for s in series]) if len(series) > 1 else ""
    numbers = [[s.name, *(dict((names[x], show(y)) for x, y in s.points).get(names[x], "") for x in sorted(names))]
               for s in series]  # fmt: skip
    return card(title, figure(drawn, ["", *(names[x] for x in sorted(names))], numbers, keys), note)


def _places(axis: str, xs: Sequence[float]) -> dict[float, float]:
    """Where each value stands: as it is, but "no limit" one step right of the largest."""
    ordered = sorted(x for x in set(xs) if x > 0 or axis not in NO_LIMIT_AT_0)
    out = {x: x for x in ordered}
    if len(ordered) < len(set(xs)):
        step = math.sqrt(ordered[-1] / ordered[0]) if len(ordered) > 1 else 2.0
        out[0.0] = ordered[-1] * max(1.5, min(step, 4.0)) if ordered else 1.0
    return out


def _name(axis: str, x: float) -> str:
    if axis in NO_LIMIT_AT_0 and x == 0:
        return "no limit"
    return show_ms(x) if axis in DURATIONS else f"{x:g}"


def _short(value: float) -> str:
    return f"{value:.3g}"
