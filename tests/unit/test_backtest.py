"""The backtest: the same bits twice, whatever the blocks; delays to the edge; what budget and TTL must do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from models.api import SOURCES, Runtime
from models.runtime import open_runtime
from state.api import StoreSettings
from streams.backtest import BacktestConfig, BacktestResult, backtest
from streams.backtest_report import judged, summarise, table
from streams.gate import GateSettings
from streams.settings import DEMO_BUNDLE
from topics.errors import ContractError, SettingsError
from topics.events import Candidates, Event, Feedback, Impression, Item
from topics.readers import open_log
from topics.simulator import preset, write

HOUR = 3_600_000
T0 = 1_700_000_000_000
FAST = BacktestConfig(with_fm=False)
Run = Callable[..., BacktestResult]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return open_runtime(DEMO_BUNDLE)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    path = tmp_path_factory.mktemp("log") / "tiny.jsonl"
    write(preset("tiny"), path)
    return list(open_log(path))


@pytest.fixture(scope="module")
def whole(events: list[Event], runtime: Runtime) -> BacktestResult:
    return backtest(events, runtime, BacktestConfig(), keep_answers=True)


def share(result: BacktestResult, source: str) -> float:
    return float((result.scored.source == SOURCES.index(source)).mean())


def test_same_log_same_bits(events: list[Event], runtime: Runtime, whole: BacktestResult) -> None:
    again = backtest(events, runtime, BacktestConfig(), keep_answers=True)
    for f in dataclasses.fields(whole.scored):
        a, b = getattr(whole.scored, f.name), getattr(again.scored, f.name)
        assert a == b if isinstance(a, list) else a.tobytes() == b.tobytes(), f.name
    assert again.answers == whole.answers
    assert again.counters == whole.counters
    assert summarise(again) == summarise(whole)


@pytest.mark.parametrize("size", [1, 37, 100_000])
def test_blocks_do_not_matter(events: list[Event], runtime: Runtime, whole: BacktestResult, size: int) -> None:
    n = 400 if size == 1 else len(events)
    config = dataclasses.replace(FAST, block_events=size)
    got = backtest(events[:n], runtime, config, keep_answers=True)
    assert got.answers is not None
    assert whole.answers is not None
    want = {a.id: a for a in whole.answers}
    assert len(got.answers) > 20
    for a in got.answers:
        b = want[a.id]
        assert (a.sources, a.ages_ms, a.positions) == (b.sources, b.ages_ms, b.positions)
        # The last bits of a matrix product may depend on the rows beside it.
        assert a.scores == pytest.approx(b.scores, abs=2e-6)
    if n == len(events):
        assert got.counters == whole.counters


def test_catalogue_record_applies_from_its_place_on(runtime: Runtime, events: list[Event]) -> None:
    """An item that changes in the middle of a block changes what follows and not what came before."""
    shown = next(e for e in events if isinstance(e, Impression))
    known = {str(e.id): e for e in events if isinstance(e, Item)}
    first = [known[str(ad)] for ad in dict.fromkeys(shown.ads)]
    other = next(e.features for e in known.values() if e.features != first[0].features)
    changed = [Item(e.id, shown.ts + 1, other) for e in first]
    later = Impression(id="later", user=shown.user, ts=shown.ts + 2, ads=shown.ads, features=shown.features)
    log = [*first, shown, *changed, later]
    results = [
        backtest(log, runtime, dataclasses.replace(FAST, block_events=size)).scored.vm.reshape(2, -1)
        for size in (1, 1_000)
    ]
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)
    assert not np.allclose(results[1][0], results[1][1], atol=1e-4)


def probe(runtime: Runtime, config: BacktestConfig, ask_after_ms: list[int]) -> list[list[str]]:
    """Sources of impressions of one pair, each `ask_after_ms` after the pair's candidates event."""
    log: list[Event] = [Candidates(id="c", user="u", ts=T0, items=["a"], features={"history": ["h1", "h2"]})]
    log += [Impression(id=f"i{ms}", user="u", ts=T0 + ms, ads=["a"]) for ms in ask_after_ms]
    result = backtest(log, runtime, dataclasses.replace(config, with_fm=False, block_events=2), keep_answers=True)
    assert result.answers is not None
    return [a.sources for a in result.answers]


def test_pairs_are_servable_from_delay_to_ttl(runtime: Runtime) -> None:
    delay, ttl = 5_000, 60_000
    config = BacktestConfig(
        store=StoreSettings(ttl_ms=ttl, window_ms=ttl), pair_delay_ms=delay, state_delay_ms=ttl - 1
    )  # fmt: skip
    asked = [0, delay - 1, delay, delay + 1, ttl - 2, ttl - 1, ttl]
    got = [s for (s,) in probe(runtime, config, asked)]
    assert got[:2] == ["none", "none"]
    assert got[2:6] == ["direct"] * 4
    assert got[6] == "none"


def test_states_are_servable_from_delay_to_ttl(runtime: Runtime) -> None:
    delay, ttl = 2_000, 60_000
    config = BacktestConfig(
        store=StoreSettings(ttl_ms=ttl, window_ms=ttl), gate=GateSettings(threshold=1.0), state_delay_ms=delay
    )
    asked = [delay - 1, delay, ttl - 1, ttl]
    assert [s for (s,) in probe(runtime, config, asked)] == ["none", "state", "state", "none"]


def test_without_delay_an_embedding_serves_from_its_own_time_to_its_ttl(runtime: Runtime) -> None:
    config = BacktestConfig(store=StoreSettings(ttl_ms=60_000, window_ms=60_000))
    assert [s for (s,) in probe(runtime, config, [0, 59_999, 60_000])] == ["direct", "direct", "none"]


def test_expiry_leaves_a_long_delay_its_ttl(runtime: Runtime) -> None:
    """Stores that are asked as of long ago expire by that clock: a delay above the grace period takes nothing away."""
    ttl, delay = 8 * HOUR, 3 * HOUR
    config = BacktestConfig(store=StoreSettings(ttl_ms=ttl, window_ms=ttl), pair_delay_ms=delay, state_delay_ms=delay)
    asked = [k * HOUR // 4 for k in range(1, 33)]
    got = [s for (s,) in probe(runtime, config, asked)]
    assert got == ["none" if ms < delay or ms >= ttl else "direct" for ms in asked]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (BacktestConfig(pair_delay_ms=6 * HOUR), "pair_delay_ms"),
        (BacktestConfig(state_delay_ms=-1), "state_delay_ms"),
        (BacktestConfig(store=StoreSettings(ttl_ms=HOUR, window_ms=HOUR - 1)), "window_ms"),
    ],
)
def test_configs_that_no_store_can_serve_are_refused(runtime: Runtime, config: BacktestConfig, key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        backtest([], runtime, config)


def test_a_smaller_budget_embeds_and_covers_less(events: list[Event], runtime: Runtime) -> None:
    embedded, direct = [], []
    for budget in (0.1, 0.5, 0.0):
        result = backtest(events, runtime, dataclasses.replace(FAST, gate=GateSettings(budget_pairs_per_s=budget)))
        c = result.counters
        refused = sum(n for k, n in c.items() if k.startswith("refused_"))
        assert c["pairs_seen"] == c["pairs_accepted"] + refused
        assert c["pairs_accepted"] == c["embedder_pairs_embedded"] + c["embedder_pairs_saved"]
        embedded.append(c["embedder_pairs_embedded"])
        direct.append(share(result, "direct"))
    assert 0 < embedded[0] < embedded[1] < embedded[2]
    assert direct[0] < direct[1] < direct[2]


def test_a_longer_ttl_covers_more(events: list[Event], runtime: Runtime) -> None:
    direct, none = [], []
    for ttl in (HOUR // 4, 2 * HOUR, 6 * HOUR):
        result = backtest(events, runtime, dataclasses.replace(FAST, store=StoreSettings(ttl_ms=ttl)))
        direct.append(share(result, "direct"))
        none.append(share(result, "none"))
        ages = result.scored.age_ms[result.scored.source == 0]
        assert ages.max() < ttl
    assert direct[0] < direct[1] < direct[2]
    assert none[0] >= none[1] >= none[2]


def test_refresh_by_ttl_saves_what_on_change_computes_again(events: list[Event], runtime: Runtime) -> None:
    on_change, by_ttl = (
        backtest(events, runtime, dataclasses.replace(FAST, refresh=refresh)).counters  # type: ignore[arg-type]
        for refresh in ("on_change", "ttl")
    )
    assert by_ttl["embedder_pairs_saved"] > on_change["embedder_pairs_saved"]
    assert by_ttl["embedder_pairs_embedded"] < on_change["embedder_pairs_embedded"]


def test_summary(whole: BacktestResult, events: list[Event]) -> None:
    report = summarise(whole)
    shown = [e for e in events if isinstance(e, Impression)]
    known = {e.id for e in events if isinstance(e, Feedback)}
    assert report["requests"] == len(shown)
    assert report["ads"] == sum(len(e.ads) for e in shown)
    assert sum(report["coverage"].values()) == pytest.approx(1, abs=1e-4)
    assert report["requests_with_feedback"] == sum(e.id in known for e in shown)
    assert report["hits_per_fm_call"] == pytest.approx(
        share(whole, "direct") * report["ads"] / report["pairs"]["embedded"], abs=1e-5
    )
    for figures in report["metrics"].values():
        for name, (low, high) in figures["intervals"].items():
            assert low < figures[name] < high, name
    assert sum(f["ads"] for f in report["by_source"].values()) == report["pairs_with_feedback"]
    none = report["by_source"]["none"]["log_loss"]
    assert none["solaris"] == pytest.approx(none["vm"], abs=1e-6)
    assert report["transfer_ratio"] is not None
    text = table(report)
    assert "SOLARIS" in text
    assert f"{report['requests']:,} of" in text


def test_only_requests_with_feedback_count_in_losses(events: list[Event], runtime: Runtime) -> None:
    kept = [e for e in events if not (isinstance(e, Feedback) and int(e.id.rsplit("-", 1)[1]) % 2)]
    result = backtest(kept, runtime, FAST)
    part = judged(result.scored)
    assert 0 < result.scored.known.sum() < len(result.scored.known)
    assert len(part.users) == result.scored.known.sum()
    assert len(part.label) == part.splits[-1]
    nothing = backtest([e for e in events if not isinstance(e, Feedback)], runtime, FAST)
    report = summarise(nothing)
    assert report["transfer_ratio"] is None
    assert report["log_loss"] == {"vm": None, "solaris": None, "fm": None}
    assert "no feedback" in table(report)


def test_start_reports_the_end_of_the_log_only(events: list[Event], runtime: Runtime, whole: BacktestResult) -> None:
    middle = int(np.median(whole.scored.ts_ms))
    result = backtest(events, runtime, dataclasses.replace(FAST, start_ms=middle))
    late = whole.scored.ts_ms >= middle
    assert result.scored.ids == [i for i, keep in zip(whole.scored.ids, late, strict=True) if keep]
    np.testing.assert_array_equal(
        result.scored.source, whole.scored.source[np.repeat(late, np.diff(whole.scored.splits))]
    )
    assert result.counters == whole.counters
    with pytest.raises(ContractError, match="start_ms"):
        backtest(events, runtime, dataclasses.replace(FAST, start_ms=int(whole.scored.ts_ms.max()) + 1))
    with pytest.raises(ContractError, match="no impressions"):
        backtest([e for e in events if not isinstance(e, Impression)], runtime, FAST)
