"""The simulated log: format, order, determinism, and the rules that make it usable as a test of the pipeline."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from topics.errors import SettingsError
from topics.events import Candidates, Feedback, Impression, Item, decode_event
from topics.readers import open_log
from topics.simulate_cli import simulate as simulate_command
from topics.simulator import PRESETS, SimulatorConfig, lines, preset, simulate, write, writer

TINY = preset("tiny")


@pytest.fixture(scope="module")
def events():
    return list(simulate(TINY))


def test_same_seed_same_bytes_other_seed_other_bytes():
    first, again, other = (b"".join(lines(TINY.with_(seed=s))) for s in (3, 3, 4))
    assert first == again
    assert first != other


def test_bytes_do_not_depend_on_the_window(monkeypatch):
    whole = b"".join(lines(TINY))
    monkeypatch.setattr(writer, "_WINDOWS_MS", (30_000,))
    assert b"".join(lines(TINY)) == whole


def test_items_first_then_events_in_order_of_time(events):
    kinds = [type(e) is Item for e in events]
    assert kinds == sorted(kinds, reverse=True)
    times = [e.ts for e in events if type(e) is not Item]
    assert times == sorted(times)
    assert times[0] >= TINY.start_ms
    assert max(e.ts for e in events if type(e) is not Feedback) < TINY.end_ms


def test_tiny_has_a_few_hundred_impressions_of_known_items_and_unique_ids(events):
    kinds = Counter(type(e) for e in events)
    assert 200 <= kinds[Impression] <= 900
    assert kinds[Candidates] > 100
    known = {e.id for e in events if isinstance(e, Item)}
    for e in events:
        if isinstance(e, Impression):
            assert set(e.ads) <= known
            assert len(set(e.ads)) == len(e.ads) == len(e.bids) == TINY.ads
        elif isinstance(e, Candidates):
            assert set(e.items) <= known
            assert len(set(e.items)) == len(e.items) == len(e.scores)
    ids = [(type(e), e.id) for e in events]
    assert len(set(ids)) == len(ids)


def test_history_is_newest_last_cut_and_holds_the_event_that_triggers(events):
    full = 0
    for e in events:
        if isinstance(e, Item | Feedback):
            continue
        f = e.features
        assert {"demographic", "device", "hour", "history", "history_ts", "history_kind"} == set(f)
        assert f["hour"] == e.ts // 3_600_000 % 24
        times = f["history_ts"]
        assert times == sorted(times)
        assert len(f["history"]) <= TINY.history
        assert set(f["history_kind"]) <= {1, 2, 3}
        full += len(f["history"]) == TINY.history
        if isinstance(e, Candidates):
            assert times[-1] == e.ts
            assert f["history"][-1] in e.items
        elif times:
            assert times[-1] < e.ts
    assert full > 0


def test_history_continues_from_event_to_event(events):
    last: dict[str, list[tuple]] = {}
    compared = 0
    for e in events:
        if isinstance(e, Item | Feedback):
            continue
        f = e.features
        rows = list(zip(f["history"], f["history_ts"], f["history_kind"], strict=True))
        before = last.get(e.user, [])
        newer = [r for r in rows if not before or r[1] > before[-1][1]]
        if len(newer) < len(rows):
            assert (before + newer)[-len(rows) :] == rows
            compared += 1
        last[e.user] = rows
    assert compared > 200


def test_an_impression_is_later_than_the_users_newest_candidates(events):
    newest: dict[str, int] = {}
    for e in events:
        if isinstance(e, Candidates):
            newest[e.user] = e.ts
        elif isinstance(e, Impression):
            assert newest.get(e.user, 0) < e.ts


def test_every_impression_has_one_later_feedback_and_clicks_enter_the_history(events):
    shown = {e.id: e for e in events if isinstance(e, Impression)}
    fed = [e for e in events if isinstance(e, Feedback)]
    assert Counter(e.id for e in fed) == Counter(shown.keys())
    clicks = set()
    for e in fed:
        assert shown[e.id].user == e.user
        assert shown[e.id].ts < e.ts
        assert set(e.clicked) <= set(shown[e.id].ads)
        assert set(e.converted or []) <= set(e.clicked)
        clicks |= {(e.user, item, e.ts) for item in e.clicked}
    remembered = {
        (e.user, item, ts)
        for e in events
        if isinstance(e, Candidates | Impression)
        for item, ts, kind in zip(*(e.features[n] for n in ("history", "history_ts", "history_kind")), strict=True)
        if kind == 3 and ts > TINY.start_ms + 60_000
    }
    assert remembered
    assert remembered <= clicks


def test_late_and_disordered_events_are_the_same_events_in_another_order():
    plain = b"".join(lines(TINY)).splitlines()
    mixed = b"".join(lines(TINY.with_(late_share=0.1, late_ms=300_000, disorder_ms=2_000))).splitlines()
    assert mixed != plain
    assert sorted(mixed) == sorted(plain)
    newest, behind = 0, []
    for line in mixed:
        ts = decode_event(line).ts
        newest = max(newest, ts)
        behind.append(newest - ts)
    assert 60_000 < max(behind) <= 302_000
    assert 0.02 < np.mean(np.array(behind) > 2_000) < 0.25


@pytest.mark.parametrize("form", ["npz", "parquet"])
def test_truth_lines_up_with_the_log(tmp_path: Path, form: str):
    log, truth = tmp_path / "log.jsonl", tmp_path / f"truth.{form}"
    config = TINY.with_(late_share=0.2, disorder_ms=5_000)
    summary = write(config, log, truth)
    impressions = [e for e in map(decode_event, log.read_bytes().splitlines()) if isinstance(e, Impression)]
    if form == "npz":
        data = np.load(truth, allow_pickle=False)
        p, splits = data["p"], data["splits"]
    else:
        import pyarrow.parquet as pq

        table = pq.read_table(truth)
        assert table["id"].to_pylist() == [e.id for e in impressions]
        column = table["p"].combine_chunks()
        p, splits = column.flatten().to_numpy(), np.cumsum([0, *column.value_lengths().to_pylist()])
    assert np.diff(splits).tolist() == [len(e.ads) for e in impressions]
    assert len(p) == summary.ads
    assert ((p > 0) & (p < 1)).all()
    assert abs(p.sum() - summary.clicks) < 5 * np.sqrt(p.sum())
    # a probability belongs to its own ad: the true model puts clicked ads above their impression's mean
    clicked = {
        e.id: set(e.clicked) for e in map(decode_event, log.read_bytes().splitlines()) if isinstance(e, Feedback)
    }
    lift = [
        p[a + i] / p[a:b].mean()
        for e, a, b in zip(impressions, splits[:-1], splits[1:], strict=True)
        for i, ad in enumerate(e.ads)
        if ad in clicked[e.id]
    ]
    assert np.mean(lift) > 1.5
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted([log.name, truth.name])


def test_parquet_holds_the_same_events(tmp_path: Path, events):
    write(TINY, tmp_path / "log.parquet")
    assert list(open_log(tmp_path / "log.parquet", None)) == events


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_accumulate", stop)
    with pytest.raises(KeyboardInterrupt):
        write(TINY, tmp_path / "log.jsonl", tmp_path / "truth.npz")
    assert list(tmp_path.iterdir()) == []


def test_sessions_preset_has_prices_of_the_day_and_a_candidates_event_a_user_event():
    events = list(simulate(preset("sessions").with_(users=30, hours=12.0, live_items=240)))
    price = {e.id: e.features["price"] for e in events if isinstance(e, Item)}
    ratios = [
        p / price[ad]
        for e in events
        if isinstance(e, Impression)
        for ad, p in zip(e.ads, e.ad_features["price"], strict=True)
    ]
    assert 0.1 < np.std(np.log(ratios)) < 0.2
    cands = [e for e in events if isinstance(e, Candidates)]
    assert len(cands) > 100
    gaps = [b.ts - a.ts for a, b in pairwise(cands) if a.user == b.user]
    assert 1_000 < np.median(gaps) < 30_000


@pytest.mark.parametrize(
    "change",
    [
        {"users": 0}, {"hours": -1.0}, {"hours": float("nan")}, {"late_share": 1.5}, {"seed": -1},
        {"candidates": 5_000}, {"ads": 700, "live_items": 1_200}, {"nonsense": 1}, {"start_ms": 0},
        {"hours": float("inf")}, {"users": 10.5}, {"w_match": "x"}, {"hours": 1e9},
        {"ad_prices": 1},
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_is_refused_by_name(change):
    with pytest.raises(SettingsError) as error:
        TINY.with_(**change)
    assert next(iter(change)) in error.value.key or "live_items" in str(error.value)


def test_names_of_files_and_presets_are_checked(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"\.jsonl or \.parquet"):
        write(TINY, tmp_path / "log.csv")
    with pytest.raises(SettingsError, match=r"\.npz or \.parquet"):
        write(TINY, tmp_path / "log.jsonl", tmp_path / "truth.pkl")
    with pytest.raises(SettingsError, match="demo, day, week, sessions, tiny"):
        preset("weekend")
    assert list(tmp_path.iterdir()) == []


def test_presets_are_configs_that_hold_their_own_rules():
    assert set(PRESETS) == {"demo", "day", "week", "sessions", "tiny"}
    for config in PRESETS.values():
        assert config == SimulatorConfig(**{f: getattr(config, f) for f in SimulatorConfig.__slots__})


def test_command_line_writes_what_it_reports(tmp_path: Path):
    app = typer.Typer()
    app.command()(simulate_command)
    log = tmp_path / "log.jsonl"
    args = ["--out", str(log), "--preset", "tiny", "--users", "40", "--seed", "2", "--set", "w_match=2.5", "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    lines_ = log.read_bytes().splitlines()
    kinds = Counter(type(decode_event(line)).__name__ for line in lines_)
    assert report["impressions"] == kinds["Impression"] > 0
    assert report["candidates"] == kinds["Candidates"]
    assert report["bytes"] == log.stat().st_size
    bad = CliRunner().invoke(app, ["--out", str(log), "--preset", "tiny", "--set", "w_match"])
    assert isinstance(bad.exception, SettingsError)
