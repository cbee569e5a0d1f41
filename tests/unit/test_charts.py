"""Charts: what is drawn is in the picture, data is escaped, and no data is a sentence."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from streams import charts
from streams.charts import Curve, Row, Series


def show(v: float) -> str:
    return f"{v:g}"


def parse(markup: str) -> list[ET.Element]:
    """Every picture of the markup, which must be well-formed."""
    root = ET.fromstring(f"<div>{markup}</div>")
    return list(root.iter("svg"))


def texts(svg: ET.Element) -> list[str]:
    return [t.text or "" for t in svg.iter("text")]


EVIL = '<script>alert("x")</script>&\''
EMPTY_CHARTS = {
    "stacked": charts.stacked_area([], [Series("a", "direct", [])], "alt"),
    "dots": charts.dots([], show, "alt"),
    "bars": charts.bars([], show, "alt"),
    "columns": charts.columns([1, 10], [0, 0, 0], show, [], "alt"),
    "curves": charts.curves([Curve("a", [])], show, show, "alt"),
    "curves of nothing finite": charts.curves([Curve("a", [(1, float("nan"))])], show, show, "alt"),
}
HOSTILE_CHARTS = {
    "stacked": charts.stacked_area([EVIL], [Series(EVIL, "direct", [0.5])], EVIL),
    "dots": charts.dots([Row(EVIL, 1.0, note=EVIL)], show, EVIL),
    "bars": charts.bars([Row(EVIL, 1.0, note=EVIL)], show, EVIL),
    "columns": charts.columns([1, 10], [0, 3, 0], lambda v: EVIL, [(EVIL, 3.0)], EVIL),
    "curves": charts.curves([Curve(EVIL, [(1, 2), (2, 3)])], lambda v: EVIL, lambda v: EVIL, EVIL),
    "legend": charts.legend([(EVIL, "direct")]),
}


@pytest.mark.parametrize("name", EMPTY_CHARTS)
def test_no_data_is_a_sentence(name: str) -> None:
    assert EMPTY_CHARTS[name] == charts.EMPTY


@pytest.mark.parametrize("name", HOSTILE_CHARTS)
def test_text_is_escaped(name: str) -> None:
    markup = HOSTILE_CHARTS[name]
    assert "<script" not in markup
    said = "".join(ET.fromstring(f"<div>{markup}</div>").itertext())
    assert EVIL in said
    for svg in parse(markup):
        assert svg.get("aria-label") == EVIL
        assert svg.get("role") == "img"


def test_stacked_shares_fill_the_height() -> None:
    markup = charts.stacked_area(
        ["00:00", "01:00"], [Series("a", "direct", [0.25, 0.5]), Series("b", "none", [0.75, 0.5])], "alt"
    )
    wide, narrow = parse(markup)
    for svg in (wide, narrow):
        ys = [float(p.split(",")[1]) for e in svg.iter("polygon") for p in e.get("points", "").split()]
        assert min(ys) == 8.0  # the top of the plot: shares that sum to 1 reach it
        assert max(ys) == 228.0
    assert "00:00" in texts(narrow)


def test_bars_are_in_proportion() -> None:
    (svg,) = parse(charts.bars([Row("a", 50, "direct"), Row("b", 25, "topic"), Row("c", 0)], show, "alt"))
    widths = [float(r.get("width", "0")) for r in svg.iter("rect") if r.get("fill") != "var(--line)"]
    assert widths == [charts.WIDTH, charts.WIDTH / 2]
    assert {"a", "b", "c", "50", "25", "0"} <= set(texts(svg))


def test_a_histogram_leaves_empty_ends_out_and_places_its_marks() -> None:
    edges = [1, 10, 100, 1_000, 10_000]
    (svg,) = parse(charts.columns(edges, [0, 0, 3, 1, 0, 0], show, [("p50", 100.0), ("p99", 1_000.0)], "alt"))
    bars = [r for r in svg.iter("rect")]
    assert len(bars) == 4  # the two used bins and one empty neighbour on each side
    right = [float(b.get("x", "0")) + float(b.get("width", "0")) + 1 for b in bars]
    marks = [float(m.get("x1", "0")) for m in svg.iter("line") if m.get("class") == "mark"]
    assert marks == pytest.approx([right[1], right[2]], abs=0.2)
    assert {"p50 100", "p99 1000"} <= set(texts(svg))
    heights = [float(b.get("height", "0")) for b in bars]
    assert heights[1] == pytest.approx(3 * heights[2], abs=0.2)


def test_labels_of_marks_do_not_meet() -> None:
    for a, b in ((100.0, 100.0), (1.0, 9_999.0), (9_998.0, 9_999.0), (1.0, 1.1)):
        edges = [1, 10, 100, 1_000, 10_000]
        (svg,) = parse(charts.columns(edges, [1] * 6, show, [("p50", a), ("p99", b)], "alt"))
        placed = [(float(t.get("x", "0")), t.text or "") for t in svg.iter("text") if (t.text or "").startswith("p")]
        (x0, first), (x1, last) = placed
        assert x0 >= 0
        assert x0 + 6.5 * len(first) < x1
        assert x1 + 6.5 * len(last) <= charts.WIDTH + 1


def test_curves_place_points_by_value_and_zero_left_of_a_log_axis() -> None:
    markup = charts.curves([Curve("a", [(0, 1), (10, 2), (100, 3)])], show, show, "alt", log_x=True)
    (svg,) = parse(markup)
    xs = [float(c.get("cx", "0")) for c in svg.iter("circle")]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    ys = [float(c.get("cy", "0")) for c in svg.iter("circle")]
    assert ys[0] > ys[1] > ys[2]


def test_dots_draw_intervals_around_their_values() -> None:
    (svg,) = parse(charts.dots([Row("a", 2.0, low=1.0, high=4.0), Row("b", 3.0)], show, "alt"))
    interval = next(e for e in svg.iter("line") if e.get("stroke-linecap"))
    at = [float(c.get("cx", "0")) for c in svg.iter("circle")]
    low, high = float(interval.get("x1", "0")), float(interval.get("x2", "0"))
    assert at[0] - low == pytest.approx((high - low) / 3, abs=0.2)
    assert low < at[0] < at[1] < high


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.1231, 0.1345), (-0.05, 0.07), (0, 12_345)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = charts.ticks(low, high, 5)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in found)
    step = found[1] - found[0]
    assert np.diff(found) == pytest.approx(step)
    assert float(f"{step:.1e}".split("e")[0]) in (1.0, 2.0, 2.5, 5.0)


def test_one_point_and_equal_values_are_drawn() -> None:
    for markup in (
        charts.curves([Curve("a", [(5, 2)])], show, show, "alt", log_x=True),
        charts.dots([Row("a", 0.0), Row("b", 0.0)], show, "alt"),
        charts.bars([Row("a", 0.0)], show, "alt"),
        charts.columns([1], [4, 0], show, [("p50", 0.0)], "alt"),
    ):
        (svg,) = parse(markup)
        assert not re.search(r"nan|inf\b", ET.tostring(svg, encoding="unicode"))
