"""`solaris log check` and `convert`: what they count, and that their memory is bounded."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from topics.errors import ContractError, SettingsError
from topics.events import Candidates, Event, Feedback, Impression, Item, encode
from topics.ids import hash_id
from topics.log_check import HOUR_MS, CoverageCeiling, Distinct, check_log
from topics.log_cli import app
from topics.log_convert import write_log
from topics.readers import EventLog, open_log

T0 = 1_700_000_000_000
EVENTS: list[Event] = [
    Item("a", 0, {"category": "x"}),
    Candidates("c1", "u", T0, ["a", "b", "c", "d"]),
    Impression("i1", "u", T0 + HOUR_MS // 2, ["a", "x"]),
    Feedback("i1", "u", T0 + HOUR_MS // 2 + 5, ["a"]),
    Impression("i2", "u", T0 + 5 * HOUR_MS, ["b", "y"]),
    Impression("i2", "v", T0 + 4 * HOUR_MS, ["b"]),
    Impression("i3", "u", T0 + 7 * HOUR_MS, ["c"]),
]


def write(path: Path, events: list[Event], *extra: bytes) -> Path:
    path.write_bytes(b"".join(encode(e) + b"\n" for e in events) + b"".join(line + b"\n" for line in extra))
    return path


def test_what_a_log_holds(tmp_path: Path) -> None:
    report = check_log(EventLog(write(tmp_path / "log.jsonl", EVENTS, b"{", b"[]")))
    assert report.rows == {"item": 1, "candidates": 1, "impression": 4, "feedback": 1}
    assert (report.users, report.items, report.exact) == (2, 6, True)
    assert (report.first_ts, report.last_ts) == (T0, T0 + 7 * HOUR_MS)
    assert (report.pairs, report.clicks) == (6, 1)
    assert report.click_rate == pytest.approx(1 / 6)
    assert (report.ads_per_impression, report.candidates_per_request) == (1.5, 4.0)
    assert (report.order_violations, report.largest_lateness_ms) == (1, HOUR_MS)
    assert report.duplicate_ids == {"candidates": 0, "impression": 1, "feedback": 0}
    assert report.coverage_ceiling == pytest.approx({"1 h": 1 / 6, "6 h": 2 / 6, "24 h": 3 / 6})
    assert [b["line"] for b in report.first_bad_lines] == [8, 9]
    assert report.bad_lines == 2
    assert not report.ok


def test_derived_candidates_are_not_counted_as_rows(tmp_path: Path) -> None:
    rows: list[Event] = [Impression("i1", "u", T0, ["a", "b"]), Impression("i2", "u", T0 + 1_000, ["b", "c"])]
    report = check_log(EventLog(write(tmp_path / "log.jsonl", rows), "carry_over"))
    assert report.rows == {"impression": 2, "candidates": 0}
    assert (report.derived_candidates, report.sources) == (2, "carry_over:1000")
    # the first impression's own list does not count for itself
    assert report.coverage_ceiling["1 h"] == pytest.approx(1 / 4)
    assert report.ok


def test_the_ttl_ends_exactly_when_it_ends() -> None:
    for age, covered in ((0, 1), (HOUR_MS - 1, 1), (HOUR_MS, 0), (-1, 0)):
        ceiling = CoverageCeiling(ttls_h=[1])
        ceiling.add(Candidates("c", "u", T0, ["a"]))
        ceiling.add(Impression("i", "u", T0 + age, ["a"]))
        assert ceiling.covered == {1: covered}


def test_distinct_is_exact_below_and_close_above_its_capacity() -> None:
    exact = Distinct(1_000)
    for i in [*range(500), *range(100)]:
        exact.add(hash_id(i))
    assert (exact.count, exact.repeats, exact.exact) == (500, 100, True)
    rough = Distinct(1_000)
    for i in [*range(50_000), *range(20_000)]:
        rough.add(hash_id(i))
    assert not rough.exact
    assert len(rough._kept) <= 1_000
    assert rough.count == pytest.approx(50_000, rel=0.15)
    assert rough.repeats == pytest.approx(20_000, rel=0.3)


def test_a_bounded_ceiling_looks_at_a_share_of_the_users() -> None:
    rng = random.Random(1)
    events: list[Candidates | Impression] = []
    for i in range(4_000):
        items: list[str | int] = [f"n{rng.randrange(1_000)}" for _ in range(10)]
        user = f"u{rng.randrange(2_000)}"
        events += [
            Candidates(f"c{i}", user, T0 + i, items),
            Impression(f"i{i}", user, T0 + i + 1, items[:5] + ["z"] * 5),
        ]
    small, whole = CoverageCeiling(2_000), CoverageCeiling()
    for event in events:
        small.add(event)
        whole.add(event)
    assert whole.user_share == 1.0
    assert small.user_share < 0.3
    assert len(small._last) <= 2_000
    assert whole.covered[1] / whole.pairs == pytest.approx(0.5)
    assert small.covered[1] / small.pairs == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.parquet"])
def test_convert_writes_what_reads_back_the_same(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "log.jsonl", EVENTS)
    out = tmp_path / name
    assert write_log(open_log(path, None), out) == len(EVENTS)
    assert list(open_log(out, None)) == EVENTS
    with pytest.raises(ContractError, match="--force"):
        write_log(open_log(path, None), out)
    assert write_log(open_log(path, None), out, force=True, sort=True) == len(EVENTS)
    assert [e.ts for e in open_log(out, None)] == sorted(e.ts for e in EVENTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["log.jsonl", name])


def test_convert_refuses_other_endings_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="jsonl"):
        write_log(EVENTS, tmp_path / "out.csv")
    assert list(tmp_path.iterdir()) == []


def test_command_line(tmp_path: Path) -> None:
    run = CliRunner().invoke
    path = str(write(tmp_path / "log.jsonl", EVENTS))
    done = run(app, ["check", path, "--json"])
    assert done.exit_code == 0
    assert json.loads(done.output)["rows"]["impression"] == 4
    text = run(app, ["check", path]).output
    assert "coverage ceiling 6 h" in text
    bad = str(write(tmp_path / "bad.jsonl", EVENTS, b"{"))
    done = run(app, ["check", bad])
    assert done.exit_code == 1
    assert "line 8: not_json" in done.output
    out = str(tmp_path / "o.parquet")
    assert json.loads(run(app, ["convert", bad, out, "--json"]).output)["bad_lines"] == 1
    strict = run(app, ["convert", bad, out, "--strict", "--force"])
    assert isinstance(strict.exception, ContractError)
    assert len(list(open_log(out, None))) == 7  # the earlier file is still there, whole
