"""The grid, its processes and its page."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from models.runtime import open_runtime
from state.api import StoreSettings
from streams import sweep
from streams.backtest import BacktestConfig, backtest
from streams.backtest_report import summarise
from streams.settings import DEMO_BUNDLE
from streams.sweep_page import render
from topics.errors import SettingsError, SolarisError
from topics.readers import open_log
from topics.simulator import preset, write

HOUR = 3_600_000
BASE = BacktestConfig()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "tiny.jsonl"
    write(preset("tiny").with_(users=40, hours=6.0), path)
    return path


def run(log: Path, grid: list[sweep.Point], processes: int) -> dict[str, Any]:
    return sweep.run(log, "auto", DEMO_BUNDLE, BASE, grid, processes)


@pytest.fixture(scope="module")
def result(log: Path) -> dict[str, Any]:
    axes = sweep.parse_grid(["budget=0.2,0,ttl=1h,6h"])
    return {"axes": axes, "each": False, "base": {"ttl_ms": 6 * HOUR}, **run(log, sweep.points(axes), 2)}


def test_grids_as_people_write_them() -> None:
    want = {"budget": ["10", "100", "0"], "ttl": ["1h", "6h"]}
    assert sweep.parse_grid(["budget=10,100,0,ttl=1h,6h"]) == want
    assert sweep.parse_grid(["budget=10,100,0", "ttl=1h,6h,1h"]) == want
    assert sweep.parse_grid([" refresh=ttl , on_change"]) == {"refresh": ["ttl", "on_change"]}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "at least one axis"),
        (["10,20"], "axis=value"),
        (["budget="], "axis=value"),
        (["budget=1", "budget=2"], "twice"),
        (["speed=1"], "no such axis"),
        (["budget=lots"], "number"),
        (["budget=-1"], "from 0"),
        (["share=2"], "from 0 to 1"),
        (["top_k=1.5"], "number"),
        (["per_user_cap=1.5"], "number"),
        (["ttl=6"], "unit"),
        (["refresh=never"], "on_change"),
        (["delay=1s,pair_delay=2s"], "at once"),
    ],
)
def test_grids_that_are_refused(texts: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        sweep.parse_grid(texts)


def test_points() -> None:
    axes = {"budget": ["1", "2"], "ttl": ["1h", "6h"]}
    assert sweep.points(axes) == [
        {"budget": "1", "ttl": "1h"}, {"budget": "1", "ttl": "6h"},
        {"budget": "2", "ttl": "1h"}, {"budget": "2", "ttl": "6h"},
    ]  # fmt: skip
    assert sweep.points(axes, each=True) == [{"budget": "1"}, {"budget": "2"}, {"ttl": "1h"}, {"ttl": "6h"}]
    with pytest.raises(SettingsError, match="1000 at most"):
        sweep.points({"budget": list(map(str, range(40))), "top_k": list(map(str, range(40)))})


def test_a_point_changes_what_it_names() -> None:
    got = sweep.configured(
        BASE,
        {"budget": "5", "share": "0.5", "threshold": "0.1", "top_k": "3", "per_user_cap": "7", "burst": "5m",
         "ttl": "1h", "window": "12h", "delay": "2s", "refresh": "ttl"},
    )  # fmt: skip
    assert (got.gate.budget_pairs_per_s, got.gate.budget_share, got.gate.threshold, got.gate.top_k) == (5, 0.5, 0.1, 3)
    assert (got.gate.budget_burst_s, got.gate.per_user_cap) == (300, 7)
    assert (got.store.ttl_ms, got.store.window_ms, got.refresh) == (HOUR, 12 * HOUR, "ttl")
    assert got.pair_delay_ms == got.state_delay_ms == 2_000
    one = sweep.configured(BASE, {"pair_delay": "3s"})
    assert (one.pair_delay_ms, one.state_delay_ms, one.store) == (3_000, 0, StoreSettings())
    with pytest.raises(SettingsError, match="pair_delay_ms"):
        sweep.configured(BASE, {"ttl": "1s", "delay": "2s"})


def test_the_numbers_do_not_depend_on_the_processes(log: Path, result: dict[str, Any]) -> None:
    grid = sweep.points(result["axes"])
    alone = run(log, grid, 1)
    assert alone["points"] == result["points"]


def test_a_point_is_the_backtest_of_its_settings(log: Path, result: dict[str, Any]) -> None:
    point = result["points"][2]
    config = sweep.configured(BASE, point["settings"])
    want = summarise(backtest(open_log(log), open_runtime(DEMO_BUNDLE), config))
    assert {**want, **{k: v for k, v in point.items() if k != "settings"}} == want
    assert point["log_loss"]["fm"] is not None


def test_page_and_table(result: dict[str, Any]) -> None:
    markup = render(result)
    for title in ("Coverage against budget", "Log loss against ttl", "Direct hits per FM call against budget"):
        assert f"<h2>{title}</h2>" in markup
    assert "no limit" in markup
    assert "ttl 1h" in markup  # the other axis is told apart
    assert len(sweep.table(result).splitlines()) == 1 + len(result["points"])
    some = [{**p, "settings": {"ttl": p["settings"]["ttl"]}} for p in result["points"][:2]]
    each = {**result, "each": True, "points": some}
    assert "<h2>Log loss against ttl</h2>" in render(each)
    hostile = {**result, "log": "<script>x</script>"}
    assert "<script" not in render(hostile)
    json.dumps(result, allow_nan=False)


def test_a_killed_process_is_an_error_and_not_a_hang(log: Path) -> None:
    def kill_one() -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            for child in psutil.Process().children():
                try:
                    if any("spawn_main" in word for word in child.cmdline()):
                        child.kill()
                        return
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.05)

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(SolarisError, match="killed"):
        run(log, [{"budget": "1"}, {"budget": "0"}], 2)
    killer.join()


def test_what_is_wrong_is_said(log: Path, tmp_path: Path) -> None:
    grid = [{"budget": "1"}]
    with pytest.raises(SolarisError, match="there is no log"):
        run(tmp_path / "absent.jsonl", grid, 1)
    with pytest.raises(SolarisError, match="no-bundle"):  # from a process of the sweep
        sweep.run(log, "auto", tmp_path / "no-bundle", BASE, grid, 1)
    with pytest.raises(SolarisError, match="sources"):
        sweep.run(log, "carry_over,nonsense", DEMO_BUNDLE, BASE, grid, 1)
