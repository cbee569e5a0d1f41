"""`solaris backtest` and `solaris sweep` as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from streams import backtest_cli
from streams.backtest import BacktestConfig
from streams.backtest_settings import Flags, configure, describe, parse_start, service
from streams.durations import parse_ms, show_ms
from streams.roles import gate_settings
from streams.settings import load
from topics.errors import SettingsError
from topics.simulator import preset, write

app = typer.Typer()
app.command()(backtest_cli.backtest)
app.command()(backtest_cli.sweep)
runner = CliRunner()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "tiny.jsonl"
    write(preset("tiny").with_(users=40, hours=6.0), path)
    return path


def test_backtest_prints_and_writes_its_report(log: Path, tmp_path: Path) -> None:
    found = runner.invoke(app, ["backtest", str(log), "--budget", "2", "--pair-delay", "3s", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert "transfer" in found.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["config"]["pair_delay_ms"] == 3_000
    assert report["config"]["budget_pairs_per_s"] == 2
    assert report["conditions"]["bundle"] == "demo_bundle"
    page = (tmp_path / "report.html").read_text()
    assert "a backtest" in page
    assert "pair_delay_ms 3s" in page


def test_json_is_one_object_and_the_same_twice(log: Path) -> None:
    first, second = (runner.invoke(app, ["backtest", str(log), "--no-fm", "--json"]) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout
    report = json.loads(first.stdout)
    assert report["log_loss"]["fm"] is None
    assert report["transfer_ratio"] is None


def test_start_takes_a_time(log: Path) -> None:
    whole = json.loads(runner.invoke(app, ["backtest", str(log), "--no-fm", "--json"]).stdout)
    begin = whole["coverage_over_time"][12]["ts"]
    part = json.loads(runner.invoke(app, ["backtest", str(log), "--no-fm", "--json", "--start", str(begin)]).stdout)
    assert 0 < part["requests"] < whole["requests"]
    assert part["pairs"] == whole["pairs"]
    assert parse_start("2019-11-14T16:00") == parse_start("1573747200000") == 1_573_747_200_000
    assert parse_start("2019-11-14T16:00+02:00") == 1_573_747_200_000 - 7_200_000


def test_without_a_service_s_settings_there_are_no_limits_whatever_lies_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "solaris.toml").write_text("[verifier]\ntop_k = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOLARIS_VERIFIER__BUDGET_SHARE", "0.5")
    config = configure(backtest_cli._base(backtest_cli._settings(None, None)), Flags())
    assert config == BacktestConfig()
    assert (config.gate.top_k, config.gate.per_user_cap, config.gate.budget_pairs_per_s) == (0, 0, 0.0)
    assert config.gate.budget_share == 1.0


def test_a_service_s_settings_are_taken_whole_and_flags_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOLARIS_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "service.toml"
    file.write_text(
        "[verifier]\nbudget_pairs_per_s = 40\nbudget_burst_s = 60\n[store]\nttl_ms = 7200000\ngrace_ms = 5\n"
        '[embedder]\nrefresh = "ttl"\n[counter]\nlag_ms = 0\n[ranker]\nneighbours = 4\n[model]\nbundle = "mine"\n'
    )
    settings = backtest_cli._settings(file, ["verifier.top_k=20"])
    assert settings is not None
    config = configure(backtest_cli._base(settings), Flags(ttl="1h", per_user_cap=0, pair_delay="3s"))
    gate, store = config.gate, config.store
    assert (gate.budget_pairs_per_s, gate.budget_burst_s) == (40, 60), "the log is one partition: it has all of it"
    assert (gate.top_k, gate.per_user_cap) == (20, 0)
    assert (store.ttl_ms, store.window_ms, store.grace_ms) == (3_600_000, 86_400_000, 5)
    assert (config.refresh, config.neighbours, config.pair_delay_ms) == ("ttl", 4, 3_000)
    assert config.counts is not None
    assert config.counts.lag_ms == 0
    assert backtest_cli._bundle(None, settings) == Path("mine")
    assert describe(config)["burst_ms"] == 60_000


def test_a_service_by_default_is_what_its_roles_have() -> None:
    settings = load(sets=[], environment={})
    config = configure(service(settings), Flags())
    live = gate_settings(settings)
    n = settings.kafka.partitions
    assert n > 1
    assert (config.gate.top_k, config.gate.per_user_cap) == (live.top_k, live.per_user_cap) == (100, 2_000)
    assert config.gate.cap_window_ms == live.cap_window_ms
    assert config.gate.budget_burst_s == live.budget_burst_s == 10.0
    lively = gate_settings(load(sets=["verifier.budget_burst_s=30", "verifier.budget_pairs_per_s=50"], environment={}))
    assert (lively.budget_burst_s, lively.budget_pairs_per_s) == (30, 50 / n)


def test_a_cap_is_kept_and_reported(log: Path) -> None:
    flags = ["--no-fm", "--json"]
    capped = json.loads(runner.invoke(app, ["backtest", str(log), *flags, "--per-user-cap", "30"]).stdout)
    of_service = json.loads(
        runner.invoke(app, ["backtest", str(log), *flags, "--set", "verifier.per_user_cap=30"]).stdout
    )
    assert capped["config"]["per_user_cap"] == of_service["config"]["per_user_cap"] == 30
    assert (capped["config"]["top_k"], of_service["config"]["top_k"]) == (0, 100)
    assert capped["refused"]["user_cap"] > 0
    free = json.loads(runner.invoke(app, ["backtest", str(log), *flags]).stdout)
    assert free["config"]["per_user_cap"] == 0
    assert free["refused"]["user_cap"] == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ttl", "6"], "unit"),
        (["--ttl", "0"], "above 0"),
        (["--refresh", "sometimes"], "on_change"),
        (["--start", "yesterday"], "ISO time"),
        (["--pair-delay", "7h"], "less than ttl_ms"),
    ],
)
def test_wrong_flags_name_their_remedy(log: Path, flags: list[str], said: str) -> None:
    found = runner.invoke(app, ["backtest", str(log), *flags])
    assert isinstance(found.exception, SettingsError)
    assert said in str(found.exception)


def test_sweep_writes_curves(log: Path, tmp_path: Path) -> None:
    flags = ["--each", "--no-fm", "--processes", "2", "--out", str(tmp_path), "--json"]
    found = runner.invoke(app, ["sweep", str(log), "--grid", "budget=0.5,0", "--grid", "delay=0,2h", *flags])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert result == json.loads((tmp_path / "sweep.json").read_text())
    assert [p["settings"] for p in result["points"]] == [
        {"budget": "0.5"}, {"budget": "0"}, {"delay": "0"}, {"delay": "2h"}
    ]  # fmt: skip
    direct = [p["coverage"]["direct"] for p in result["points"]]
    assert direct[0] < direct[1] == direct[2] > direct[3]
    assert "Coverage against delay" in (tmp_path / "sweep.html").read_text()


@pytest.mark.parametrize(
    ("text", "ms"),
    [("250ms", 250), ("1.5h", 5_400_000), ("90s", 90_000), ("15m", 900_000), ("1d", 86_400_000), ("0", 0)],
)
def test_durations(text: str, ms: int) -> None:
    assert parse_ms("--ttl", text) == ms
    assert parse_ms("--ttl", show_ms(ms)) == ms


@pytest.mark.parametrize("text", ["", "h", "-1h", "1 h", "5", "1e3s", "367d", "nan"])
def test_durations_that_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--ttl"):
        parse_ms("--ttl", text)
