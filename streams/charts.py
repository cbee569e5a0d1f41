"""Charts as inline SVG, without a library. Pure: data in, markup out; every text from data is escaped here.

Charts are drawn 460 units wide and scale with the page; colours are the CSS variables ``--direct``, ``--vm``, ... of
`STYLE`, which follow the reader's light or dark scheme. Each chart has a text alternative. A chart without data is the
sentence `EMPTY`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH = 460
EMPTY = '<p class="empty">Nothing was measured here.</p>'
CYCLE = ("direct", "state", "topic", "aggregate", "similar", "vm")
"""colours for series that have none of their own"""
STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--fg:#1b1f24;--dim:#5b6470;--line:#d9dde3;
--direct:#0b63b0;--topic:#00836a;--state:#b86200;--aggregate:#b1508a;--similar:#3f8fc9;--none:#8a9099;
--vm:#6b7280;--solaris:#0b63b0;--fm:#7a4fc0}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1d2126;--fg:#e8eaed;--dim:#a2abb6;--line:#363d46;
--direct:#5aa9f2;--topic:#2bc49b;--state:#f0a53a;--aggregate:#e08cc0;--similar:#a5dcff;--none:#6f7883;
--vm:#9aa4b1;--solaris:#5aa9f2;--fm:#b79bf0}}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font:12px system-ui,sans-serif;fill:var(--fg)}svg text.dim{fill:var(--dim)}
svg .grid{stroke:var(--line);stroke-width:1}svg .mark{stroke:var(--fg);stroke-width:1.5;stroke-dasharray:4 3}
"""

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    colour: str
    """name of a CSS variable, without the dashes"""
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a horizontal chart. `low` and `high` are the ends of its interval, where it has one."""

    name: str
    value: float
    colour: str = "direct"
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]
    """(x, y), in order of x"""
    colour: str = ""
    """empty: the next of `CYCLE`"""


def stacked_area(labels: Sequence[str], series: Sequence[Series], alternative: str) -> str:
    """Shares (0..1) of each series in every column of `labels`, stacked from the first series up. Drawn twice, for a
    wide page and a narrow one, so that its text has the same size on both; the page's style shows one of them."""
    if not labels or not series:
        return EMPTY
    wide, narrow = (_stacked(labels, series, alternative, w, n) for w, n in ((1000, 12), (WIDTH, 6)))
    return f'<div class="if-wide">{wide}</div><div class="if-narrow">{narrow}</div>'


def _stacked(labels: Sequence[str], series: Sequence[Series], alternative: str, whole: int, most_labels: int) -> str:
    n = len(labels)
    left, top, height, width = 40, 8, 220, whole - 48
    step = width / n
    parts = [_grid(left, top, width, height, [0, 0.25, 0.5, 0.75, 1], 0, 1, lambda v: f"{v:.0%}")]
    base = [0.0] * n
    for s in series:
        above = [b + max(0.0, v) for b, v in zip(base, s.values, strict=True)]
        if any(s.values):
            outline = [(left + i * step + d, top + height * (1 - a)) for i, a in enumerate(above) for d in (0, step)]
            floor = [(left + i * step + d, top + height * (1 - b)) for i, b in enumerate(base) for d in (0, step)]
            parts.append(
                f'<polygon points="{_points([*outline, *reversed(floor)])}" fill="var(--{s.colour})" '
                f'stroke="var(--card)" stroke-width="1"><title>{escape(s.name)}</title></polygon>'
            )
        base = above
    every = max(1, math.ceil(n / most_labels))
    for i in range(0, n, every):
        parts.append(_text(left + i * step, top + height + 17, labels[i], "middle", dim=True))
    return _svg(top + height + 24, alternative, parts, whole)


def dots(rows: Sequence[Row], show: Format, alternative: str, zero: bool = False) -> str:
    """A dot and its interval per row. The axis spans the data, or starts at 0 when `zero`."""
    if not rows:
        return EMPTY
    ends = [v for r in rows for v in (r.value, r.low, r.high) if v is not None]
    low, high = (min(0.0, *ends), max(0.0, *ends)) if zero else (min(ends), max(ends))
    pad = (high - low) * 0.06 or abs(high) * 0.01 or 1.0
    low, high = (low if zero and low == 0 else low - pad), high + pad
    left, width, pitch = 76, WIDTH - 76 - 78, 34
    height = pitch * len(rows)
    parts = []
    for tick in ticks(low, high, 4):
        x = left + width * (tick - low) / (high - low)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height}"/>')
        parts.append(_text(x, height + 15, show(tick), "middle", dim=True))
    for i, r in enumerate(rows):
        y = pitch * (i + 0.5)

        def at(v: float) -> float:
            return left + width * (v - low) / (high - low)

        parts.append(_text(left - 8, y + 4, r.name, "end"))
        if r.low is not None and r.high is not None:
            parts.append(
                f'<line x1="{at(r.low):.1f}" y1="{y}" x2="{at(r.high):.1f}" y2="{y}" stroke="var(--{r.colour})" '
                f'stroke-width="3" stroke-linecap="round" opacity=".5"/>'
            )
        parts.append(f'<circle cx="{at(r.value):.1f}" cy="{y}" r="6" fill="var(--{r.colour})"/>')
        parts.append(_text(WIDTH, y + 4, r.note or show(r.value), "end"))
    return _svg(height + 20, alternative, parts)


def bars(rows: Sequence[Row], show: Format, alternative: str) -> str:
    """A bar from 0 per row, with its value and note beside its name above it."""
    if not rows:
        return EMPTY
    largest = max(r.value for r in rows) or 1.0
    pitch, parts = 42, []
    for i, r in enumerate(rows):
        y = pitch * i
        parts.append(_text(0, y + 13, r.name))
        parts.append(_text(WIDTH, y + 13, show(r.value) + (f" · {r.note}" if r.note else ""), "end"))
        parts.append(f'<rect x="0" y="{y + 19}" width="{WIDTH}" height="13" rx="3" fill="var(--line)" opacity=".5"/>')
        width = WIDTH * max(0.0, r.value) / largest
        if r.value > 0:
            parts.append(
                f'<rect x="0" y="{y + 19}" width="{max(2.0, width):.1f}" height="13" rx="3" fill="var(--{r.colour})"/>'
            )
    return _svg(pitch * len(rows), alternative, parts)


def columns(
    edges: Sequence[float],
    counts: Sequence[float],
    show: Format,
    marks: Sequence[tuple[str, float]],
    alternative: str,
    colour: str = "direct",
) -> str:
    """A histogram: `counts` [n+1] of values up to each of `edges` [n] (rising), the last above all. `marks` are named
    values, rising, drawn as lines. Empty bins at both ends are left out."""
    used = [i for i, c in enumerate(counts) if c]
    if not used:
        return EMPTY
    first, last = max(0, used[0] - 1), min(len(counts) - 1, used[-1] + 1)
    total, peak = sum(counts), max(counts)
    left, top, height, width = 40, 26, 150, WIDTH - 48
    step = width / (last - first + 1)
    share = peak / total
    parts = [_grid(left, top, width, height, ticks(0, share, 3), 0, share, lambda v: f"{v:.0%}")]
    for i in range(first, last + 1):
        h = height * counts[i] / peak
        x = left + (i - first) * step
        reach = f"up to {show(edges[i])}" if i < len(edges) else f"above {show(edges[-1])}"
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{top + height - h:.1f}" width="{max(1.0, step - 2):.1f}" height="{h:.1f}" '
            f'fill="var(--{colour})"><title>{escape(reach)}: {counts[i]:,.0f}</title></rect>'
        )
    every = max(1, math.ceil((last - first + 1) / 7))
    for i in range(first, min(last + 1, len(edges)), every):
        parts.append(_text(left + (i - first + 1) * step, top + height + 16, show(edges[i]), "middle", dim=True))
    places = [left + min(max(0.0, (_place(v, edges) - first) * step), width) for _, v in marks]
    labels = [f"{name} {show(value)}" for name, value in marks]
    for x, start, label in zip(places, _beside(places, labels), labels, strict=True):
        parts.append(f'<line class="mark" x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{top + height}"/>')
        parts.append(_text(start, top - 11, label))
    return _svg(top + height + 22, alternative, parts)


def curves(
    series: Sequence[Curve], show_x: Format, show_y: Format, alternative: str, log_x: bool = False, top_up: bool = False
) -> str:
    """Lines with a dot at each point. `log_x` spreads x by its logarithm (0 stands one step left of the least x above
    0); `top_up` lets the y axis start at 0."""
    points = [p for s in series for p in s.points if math.isfinite(p[1])]
    if not points:
        return EMPTY
    xs = sorted({x for x, _ in points})
    place = _log_place(xs) if log_x else (lambda x: x)
    x_low, x_high = place(xs[0]), place(xs[-1])
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    if top_up:
        y_low = min(0.0, y_low)
    pad = (y_high - y_low) * 0.08 or abs(y_high) * 0.01 or 1.0
    y_low, y_high = (0.0 if top_up and y_low == 0 else y_low - pad), y_high + pad
    left, top, height, width = 58, 8, 190, WIDTH - 58 - 22

    def at(x: float, y: float) -> tuple[float, float]:
        across = (place(x) - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return left + width * across, top + height * (1 - (y - y_low) / (y_high - y_low))

    parts = [_grid(left, top, width, height, ticks(y_low, y_high, 5), y_low, y_high, show_y)]
    for x in _apart([(at(x, y_low)[0], x) for x in xs], 44):
        parts.append(_text(at(x, y_low)[0], top + height + 17, show_x(x), "middle", dim=True))
    for k, s in enumerate(series):
        colour = f"var(--{s.colour or CYCLE[k % len(CYCLE)]})"
        line = [at(x, y) for x, y in s.points if math.isfinite(y)]
        dash = ' stroke-dasharray="5 4"' if k >= len(CYCLE) else ""
        parts.append(f'<polyline points="{_points(line)}" fill="none" stroke="{colour}" stroke-width="2.5"{dash}/>')
        for (x, y), (cx, cy) in zip([p for p in s.points if math.isfinite(p[1])], line, strict=True):
            parts.append(
                f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{colour}">'
                f"<title>{escape(s.name)}: {escape(show_x(x))}, {escape(show_y(y))}</title></circle>"
            )
    return _svg(top + height + 24, alternative, parts)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(name, colour) -> a line of keys."""
    keys = (f'<span><i style="background:var(--{colour})"></i>{escape(name)}</span>' for name, colour in entries)
    return f'<p class="legend">{"".join(keys)}</p>'


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most about `most` round numbers in [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, most)
    size = 10 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(
    left: float, top: float, width: float, height: float, at: Sequence[float], low: float, high: float, show: Format
) -> str:
    parts = []
    for v in at:
        y = top + height * (1 - (v - low) / ((high - low) or 1))
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}"/>')
        parts.append(_text(left - 6, y + 4, show(v), "end", dim=True))
    return "".join(parts)


def _place(value: float, edges: Sequence[float]) -> float:
    """Where `value` lies, in bins from the left, by its logarithm within its bin."""
    lower = 0.0
    for i, upper in enumerate(edges):
        if value <= upper:
            if lower <= 0 or value <= 0:
                return i + (value / upper if upper > 0 else 0.0)
            return i + math.log(value / lower) / math.log(upper / lower)
        lower = upper
    return len(edges) + 0.5


def _beside(places: Sequence[float], labels: Sequence[str]) -> list[float]:
    """Where labels start so that they do not meet: the last right of its line, the others left of theirs."""
    widths = [7.0 * len(label) for label in labels]
    starts = [0.0] * len(labels)
    limit = float(WIDTH)
    for i in range(len(labels) - 1, -1, -1):
        wanted = places[i] - 4 if i == len(labels) - 1 else places[i] - widths[i] + 4
        starts[i] = max(sum(w + 8 for w in widths[:i]), min(wanted, limit - widths[i]))
        limit = starts[i] - 8
    return starts


def _log_place(xs: Sequence[float]) -> Callable[[float], float]:
    positive = [x for x in xs if x > 0]
    if not positive:
        return lambda x: x
    logs = [math.log(x) for x in positive]
    step = min((b - a for a, b in pairwise(logs)), default=1.0)
    return lambda x: math.log(x) if x > 0 else logs[0] - step


def _apart(placed: Sequence[tuple[float, float]], gap: float) -> list[float]:
    """Those of (position, value), left to right, that stand `gap` from the one kept before."""
    kept, last = [], -math.inf
    for position, value in placed:
        if position - last >= gap:
            kept.append(value)
            last = position
    return kept


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _text(x: float, y: float, text: str, anchor: str = "start", dim: bool = False) -> str:
    shade = ' class="dim"' if dim else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{shade}>{escape(text)}</text>'


def _svg(height: float, alternative: str, parts: Sequence[str], width: int = WIDTH) -> str:
    label = escape(alternative, quote=True)
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
