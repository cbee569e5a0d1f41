"""`solaris backtest` and `solaris sweep` as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from streams import backtest_cli
from streams.durations import parse_ms, show_ms
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
    assert backtest_cli._start("2019-11-14T16:00") == backtest_cli._start("1573747200000") == 1_573_747_200_000
    assert backtest_cli._start("2019-11-14T16:00+02:00") == 1_573_747_200_000 - 7_200_000


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
