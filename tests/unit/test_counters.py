"""The list of counters is what the code counts, no more and no less, and docs/monitoring.md has its table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.runtime import open_runtime
from state.count_store import ItemCounts
from state.counts import CountSettings
from streams.counter_steps import ClickedLane, ShownLane
from streams.counters import ALL, KNOWN, LANES, kind, known, markdown, metric
from streams.gate import Gate, GateSettings
from streams.roles import PairLane, RankerStep, StateLane, VerifierStep
from streams.settings import DEMO_BUNDLE, load

ROOT = Path(__file__).parents[2]


def counted() -> Iterator[tuple[str, str]]:
    """(file, name) of everything that the code of the roles counts by name: ``counters["name"] += 1``; what is put in
    at run time is a ``*``."""
    for file in [*(ROOT / "streams").glob("*.py"), ROOT / "state" / "count_store.py"]:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.AugAssign) or not isinstance(node.target, ast.Subscript):
                continue
            of = node.target.value
            own = isinstance(of, ast.Attribute) and of.attr in ("counters", "_counters")
            if own or (isinstance(of, ast.Name) and file.name == "ranker.py"):
                for text in names(node.target.slice):
                    yield file.name, text


def names(index: ast.expr) -> Iterator[str]:
    if isinstance(index, ast.Constant) and isinstance(index.value, str):
        yield index.value
    elif isinstance(index, ast.IfExp):
        yield from names(index.body)
        yield from names(index.orelse)
    elif isinstance(index, ast.JoinedStr):
        yield "".join(str(v.value) if isinstance(v, ast.Constant) else "*" for v in index.values)


def prefixes(file: str) -> tuple[str, ...]:
    if file in ("loop.py", "transactions.py"):
        return ("loop_",)
    return ("item_counts_",) if file == "count_store.py" else ("",)


def listed(name: str) -> bool:
    begins = name.removesuffix("*")
    return any(k.name == name or (name.endswith("*") and k.name.startswith(begins)) for k in KNOWN)


def test_everything_that_is_counted_is_listed() -> None:
    found = set(counted())
    assert len(found) > 40, "the code is still searched for what it counts"
    missing = [(f, p + n) for f, n in found for p in prefixes(f) if not listed(p + n)]
    assert not missing, "add these to streams/counters.py"


def test_what_the_steps_say_is_listed_for_their_role(tmp_path: Path) -> None:
    settings = load(sets=[f"store.dir={tmp_path}"], environment={})
    runtime = open_runtime(DEMO_BUNDLE)
    verifier, gate = VerifierStep(runtime, settings), Gate(GateSettings())
    gate.seen, gate.refused = 1, dict.fromkeys(gate.refused, 1)
    verifier.core.gates[0] = gate
    assert len(verifier.totals()) > len(gate.refused)
    others = [kind(runtime, settings) for kind in (StateLane, PairLane, RankerStep)]
    for step in (verifier, *others, ShownLane(settings), ClickedLane(settings)):
        role = step.role.partition("-")[0]
        for name in step.totals():
            full = f"{step.role.replace('-', '_')}_{name}" if role in LANES else name
            assert known(role, full) is not None, f"{role}: {full}"
    held = ItemCounts(CountSettings(lag_ms=0), lambda ms: ms)
    assert all(known("ranker", f"item_counts_{name}") for name in held.counters)


def test_no_name_is_listed_that_nothing_counts() -> None:
    code = {p + n for f, n in counted() for p in prefixes(f)}
    texts = "".join(f.read_text("utf-8") for f in (ROOT / "streams").glob("*.py") if f.name != "counters.py")
    for k in KNOWN:
        name = k.name.removeprefix("counts_") if k.name.removeprefix("counts_") in code else k.name
        family = any(n.endswith("*") and name.startswith(n[:-1]) for n in code) or name.startswith("refused_")
        assert name in code or family or f'"{name}"' in texts, f"{name} is counted nowhere"


@pytest.mark.parametrize(
    ("role", "name", "bare", "lanes"),
    [
        ("verifier", "pairs_accepted", "pairs_accepted", ("verifier",)),
        ("embedder", "embedder_pairs_accepted", "pairs_accepted", ("embedder",)),
        ("embedder", "embedder_state_states", "states", ("embedder-state",)),
        ("embedder", "embedder_state_loop_dead", "loop_dead", ALL),
        ("counter", "counter_clicks_clicks_counted", "clicks_counted", ("counter-clicks",)),
        ("counter", "counter_rejected_far_future", "rejected_*", ALL),
        ("counter", "stats_dropped", "stats_dropped", ALL),
    ],
)
def test_a_lane_s_counters_have_its_prefix(role: str, name: str, bare: str, lanes: tuple[str, ...]) -> None:
    found = known(role, name)
    assert found is not None
    assert (found.name, found.lanes) == (bare, lanes)


@pytest.mark.parametrize(
    ("role", "name"),
    [("embedder", "pairs_accepted"), ("embedder", "embedder_stats_dropped"), ("counter", "bundles_accepted"),
     ("ranker", "pairs_seen"), ("nobody", "ads"), ("counter", "counter_clicks_counted")],
)  # fmt: skip
def test_what_a_role_has_not_is_not_known(role: str, name: str) -> None:
    assert known(role, name) is None
    assert metric(role, name, "solaris_") == (f"solaris_{name}_total", "counter")


def test_the_only_gauges_are_what_is_held() -> None:
    assert [k.name for k in KNOWN if k.kind == "gauge"] == [
        "item_counts_items", "item_counts_bytes", "item_counts_restored",
    ]  # fmt: skip
    assert metric("ranker", "item_counts_items", "solaris_role_") == ("solaris_role_item_counts_items", "gauge")
    assert kind("ranker", "ads") == "counter"


def test_monitoring_page_has_the_table() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    assert markdown() in page, "put in what `python -m streams.counters` prints"
