"""The page of a report: whole, self-contained, and nothing in it that the data could run."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.api import SOURCES
from streams import conditions
from streams.losses import Judged, compare
from streams.measures import AGE_BINS_MS, coverage, coverage_spans, histogram, quantiles
from streams.page import render, write_page

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; raises on tags that do not match."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(markup)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def report() -> dict[str, Any]:
    """A live run's report, as `streams.report.build` makes it."""
    rng = np.random.default_rng(1)
    n = 4_000
    source = rng.integers(0, len(SOURCES), n)
    fm = rng.normal(-2, 1.5, n).astype(np.float32)
    label = (rng.random(n) < 1 / (1 + np.exp(-fm))).astype(np.float32)
    logits = {"vm": np.full(n, -1.5, np.float32), "solaris": (fm * 0.7 - 0.5).astype(np.float32), "fm": fm}
    judged = Judged(label, logits, np.arange(0, n + 1, 20), rng.integers(0, 50, n // 20), source)
    waits = rng.exponential(300, 500)
    return {
        "requests": 200, "ads": n, "pairs": {"seen": 9_000, "accepted": 5_000, "embedded": 4_000, "saved": 1_000},
        "states": 300, "hits_per_fm_call": 0.25, "fm_calls_per_impression": 20.0, "coverage": coverage(source),
        "age_ms": quantiles(waits), "lost": 3, "duplicated": 0, "seconds": 15.0, "speed": 5_000.0,
        "throughput": {"impressions_per_s": 150.0, "pairs_per_s": 900.0},
        "rank_latency_ms": quantiles(waits), "freshness_ms": quantiles(waits), "pair_freshness_ms": quantiles([]),
        "histograms": {
            "rank_latency": histogram(waits), "freshness": histogram(waits), "pairs": histogram([]),
            "age": histogram(waits, AGE_BINS_MS),
        },
        "coverage_over_time": coverage_spans(1_700_000_000_000 + np.arange(n) * 20_000, source),
        "counters": {"verifier": {"refused_top_k": 4_000, "refused_budget": 0}},
        "models": {"vm": "demo-vm@1", "fm": "demo-fm@1", "device": "cpu"}, "log": "events.jsonl",
        "conditions": {"broker": "embedded", "packages": {"numpy": "2.4"}},
        **compare(judged, draws=20),
    }  # fmt: skip


def test_the_page_says_what_the_report_says(report: dict[str, Any]) -> None:
    page = Page(render(report))
    interval = report["transfer_ratio_interval"]
    for said in (
        "3 / 0", f"{report['transfer_ratio']:.0%}", f"{interval[0]:.0%} to {interval[1]:.0%}", "top_k 4,000",
        "9,000", "demo-fm@1", "5,000 times real time", "embedded", "numpy 2.4", f"{report['log_loss']['vm']:.5g}",
        "100% of that work",
    ):  # fmt: skip
        assert said in page.text, said
    titles = re.findall(r"<h2>(.*?)</h2>", render(report))
    assert len(titles) == 10
    assert page.text.count("Nothing was measured here.") == 1  # no pair embedding was waited for


def test_the_page_is_self_contained_and_for_every_reader(report: dict[str, Any]) -> None:
    markup = render(report)
    page = Page(markup)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "form"}
    for _, attributes in page.tags:
        assert not {"src", "href", "onclick", "onload"} & attributes.keys()
    assert "http" not in markup
    assert "url(" not in markup
    assert "prefers-color-scheme:dark" in markup
    assert ("meta", {"name": "viewport", "content": "width=device-width,initial-scale=1"}) in page.tags
    pictures = [a for tag, a in page.tags if tag == "svg"]
    assert len(pictures) >= 10
    assert all(a["role"] == "img" and a["aria-label"] for a in pictures)


def test_text_from_data_is_escaped(report: dict[str, Any]) -> None:
    hostile = copy.deepcopy(report)
    hostile["log"] = hostile["transfer_note"] = EVIL
    hostile["models"] = {"vm": EVIL, "fm": EVIL}
    hostile["conditions"] = {EVIL: EVIL, "packages": {EVIL: EVIL}}
    hostile["counters"]["verifier"] = {f"refused_{EVIL}": 7}
    hostile["transfer_ratio"] = None
    page = Page(render(hostile))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert page.text.count(EVIL) >= 7


def test_parts_that_are_absent_leave_their_sections_out(report: dict[str, Any]) -> None:
    nothing = {
        "requests": 1, "ads": 0, "pairs": {"seen": 0, "accepted": 0, "embedded": 0, "saved": 0},
        "hits_per_fm_call": None, "fm_calls_per_impression": None, "coverage": dict.fromkeys(SOURCES),
        "transfer_ratio": None, "transfer_note": "no feedback in the log: no losses",
        "log_loss": {"vm": None, "solaris": None, "fm": None},
    }  # fmt: skip
    text = Page(render(nothing)).text
    assert "no feedback in the log" in text
    assert "Latency" not in text
    assert "a backtest" in text


def test_write_page(report: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(report, path)
    assert path.read_text(encoding="utf-8") == render(report)


def test_secrets_of_the_command_line_are_masked() -> None:
    typed = ["/usr/bin/solaris", "demo", "--set", "kafka.properties.sasl.password=hunter2", "--users", "300"]
    shown = conditions.command(typed)
    assert "hunter2" not in shown
    assert shown.startswith("solaris demo --set")
    assert shown.endswith("--users 300")


def test_conditions_name_the_machine_and_the_versions(tmp_path: Path) -> None:
    found = conditions.conditions(tmp_path / "my-bundle", "cpu", {"broker": "java"})
    assert found["broker"] == "java"
    assert found["bundle"] == "my-bundle"
    assert found["packages"]["numpy"] == np.__version__
    assert re.match(r"\d+ cores, \d+ GiB memory", found["machine"])
