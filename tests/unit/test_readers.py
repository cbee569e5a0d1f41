"""Readers of event logs: what each format gives, order, bounded memory, bad rows."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path

import pytest

from topics.errors import ContractError
from topics.events import Candidates, Event, Feedback, Impression, Item, encode
from topics.readers import BadLines, EventLog, detect, jsonl, mind, open_log
from topics.readers.parquet import ParquetWriter
from topics.readers.sort import sort_by_time

DATA = Path(os.environ.get("SOLARIS_DATA", Path(__file__).parents[2].parent / "shared" / "data"))

EVENTS: list[Event] = [
    Item("N7", 0, {"category": "sport", "tags": ["a", "b"]}),
    Candidates("c1", "u1", 1_000, ["N7", 5], [0.5, 0.25], {"history": ["N1"]}, {"price": [1, None]}),
    Impression("i1", "u1", 2_000, ["N7", "N9"], [1.5, 0.5], {"history": ["N1"], "age": 3}, {"price": [90, 1.5]}),
    Feedback("i1", "u1", 2_500, ["N7"], []),
    Impression("i2", "ü\t2", 3_000, []),
]

MIND_ROWS = (
    "1\tU1\t11/14/2019 9:05:00 AM\tN1 N2\tN3-1 N4-0\n"
    "2\tU1\t11/14/2019 8:00:00 AM\tN1 N2\tN5-0 N3-1\n"
    "3\tU2\t11/14/2019 12:00:01 PM\t\tN5-0 N6-0\n"
    "4\tU3\t11/14/2019 12:00:01 AM\tN1\tN5 N6\n"
)
NINE_AM = 1_573_722_300_000


def write_jsonl(path: Path, events: list[Event]) -> Path:
    path.write_bytes(b"".join(encode(e) + b"\n" for e in events))
    return path


def as_text_ids(event: Event) -> bytes:
    return encode(event).replace(b'["N7",5]', b'["N7","5"]')


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "jsonl.gz", "jsonl.zst"])
def test_json_lines_give_the_events_in_file_order(tmp_path: Path, ending: str) -> None:
    data = b"".join(encode(e) + b"\n" for e in EVENTS)
    path = tmp_path / f"log.{ending}"
    if ending.endswith("gz"):
        data = gzip.compress(data)
    elif ending.endswith("zst"):
        import pyarrow as pa

        data = pa.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)
    assert list(open_log(path)) == EVENTS


def test_lines_are_the_same_wherever_the_chunks_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n" + b"\r\n".join(encode(e) for e in EVENTS))  # blank first line, no end of the last
    for size in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(jsonl, "CHUNK_BYTES", size)
        assert list(open_log(path, None)) == EVENTS


def test_bad_lines_are_counted_named_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    bad_rows = [b"{", b'{"type":"nothing"}', b'{"type":"impression","id":"i","user":"","ts":1,"ads":[]}', b"\xff\xfe"]
    rows = [encode(EVENTS[2]), *bad_rows * 4, encode(EVENTS[3])]
    path.write_bytes(b"\n".join(rows))
    bad = BadLines()
    assert list(open_log(path, None, bad)) == [EVENTS[2], EVENTS[3]]
    assert bad.count == 16
    assert sum(bad.reasons.values()) == 16
    assert bad.reasons["empty_user"] == 4
    assert [b.line for b in bad.first] == list(range(2, 12))


def test_strict_stops_at_the_first_bad_line_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(encode(EVENTS[0]) + b"\nnonsense\n")
    with pytest.raises(ContractError, match=r"log\.jsonl, line 2: not_json"):
        list(open_log(path, None, BadLines(strict=True)))


def test_a_line_without_end_is_one_bad_line_and_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_EVENT_BYTES", 1_000)
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", 128)
    path = tmp_path / "log.jsonl"
    path.write_bytes(encode(EVENTS[0]) + b"\n" + b"x" * 50_000 + b"\n" + encode(EVENTS[3]) + b"\n" + b"y" * 9_000)
    bad = BadLines()
    assert list(open_log(path, None, bad)) == [EVENTS[0], EVENTS[3]]
    assert [(b.line, b.reason) for b in bad.first] == [(2, "too_large"), (4, "too_large")]


def test_a_compressed_log_that_breaks_off_is_said(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [encode(Feedback(f"{rng.random()}", "u", 1, [])) for _ in range(2_000)]
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(rows))[:-2_000])
    bad = BadLines()
    assert 0 < len(list(open_log(path, None, bad))) < 2_000
    assert bad.reasons["truncated"] == 1


def test_parquet_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    writer = ParquetWriter(path, group_rows=2)
    for event in EVENTS:
        writer.write(event)
    writer.close()
    assert [encode(e) for e in open_log(path)] == [as_text_ids(e) for e in EVENTS]


def test_parquet_rows_that_are_no_events_are_counted(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = {
        "type": ["impression", "impression", None, "feedback", "item"],
        "id": ["a", "b", "c", "d", "e"],
        "user": ["u", None, "u", "u", None],
        "ts": [1, 2, 3, -4, 5],
        "items": [["x"], ["x"], [], ["x"], None],
        "features": [None, None, None, None, "{not json"],
    }
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table(rows), path)
    bad = BadLines()
    assert [e.id for e in open_log(path, None, bad)] == ["a"]
    assert bad.reasons == {"wrong_type": 2, "time_out_of_range": 1, "not_json": 1}


def test_parquet_of_other_columns_is_refused_by_name(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"id": ["a"], "ts": [1]}), path)
    with pytest.raises(ContractError, match="no column 'type'"):
        list(open_log(path, None))


def test_mind_gives_impressions_and_feedback_in_time_order(tmp_path: Path) -> None:
    path = tmp_path / "behaviors.tsv"
    path.write_text(MIND_ROWS)
    events = list(open_log(path, None))
    assert [e.ts for e in events] == sorted(e.ts for e in events)
    assert [(type(e).__name__, e.id) for e in events] == [
        ("Impression", "4"), ("Impression", "2"), ("Feedback", "2"), ("Impression", "1"), ("Feedback", "1"),
        ("Impression", "3"), ("Feedback", "3"),
    ]  # fmt: skip
    second = events[3]
    assert isinstance(second, Impression)
    assert second.ts == NINE_AM
    assert second.ads == ["N3", "N4"]
    # the file's history first, then the click of 8:00:30
    assert second.features == {"history": ["N1", "N2", "N3"], "history_ts": [-1, -1, NINE_AM - 65 * 60_000 + 30_000]}
    feedback = [e for e in events if isinstance(e, Feedback)]
    assert {f.id: f.clicked for f in feedback} == {"1": ["N3"], "2": ["N3"], "3": []}


def test_mind_news_gives_items_first(tmp_path: Path) -> None:
    (tmp_path / "behaviors.tsv").write_text(MIND_ROWS)
    (tmp_path / "news.tsv").write_text("N3\tsports\tgolf\tTitle\t\t\t[]\t[]\n")
    assert next(open_log(tmp_path)) == Item("N3", 0, {"category": "sports", "subcategory": "golf"})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1\tU1\t11/14/2019 9:05:00 AM\tN1", "wrong_columns"),
        ("1\tU1\t14.11.2019 9:05\tN1\tN2-1", "wrong_time"),
        ("1\tU1\t11/14/2019 13:05:00 PM\tN1\tN2-1", "wrong_time"),
        ("1\tU1\t11/14/2019 9:05:00 AM\tN1\tN2-7", "wrong_label"),
        ("1\tU1\t11/14/2019 9:05:00 AM\tN1\tN2-1 N3", "wrong_label"),
        ("1\t\t11/14/2019 9:05:00 AM\tN1\tN2-1", "empty_user"),
    ],
)
def test_mind_rows_that_cannot_be_used(tmp_path: Path, row: str, reason: str) -> None:
    path = tmp_path / "behaviors.tsv"
    path.write_text(MIND_ROWS + row + "\n")
    bad = BadLines()
    assert len(list(open_log(path, None, bad))) == 7
    assert [(b.line, b.reason) for b in bad.first] == [(5, reason)]


@pytest.mark.parametrize(
    ("text", "hour"), [("12:00:00 AM", 0), ("1:00:00 AM", 1), ("12:00:00 PM", 12), ("11:00:00 PM", 23)]
)
def test_mind_twelve_hour_clock(text: str, hour: int) -> None:
    assert mind.parse_time(f"11/14/2019 {text}") == 1_573_689_600_000 + hour * 3_600_000


def test_external_sort_equals_sorted_with_runs_on_disk() -> None:
    rng = random.Random(5)
    records = [(rng.randrange(50), i, bytes(rng.randrange(40))) for i in range(5_000)]
    want = sorted(records, key=lambda r: r[:2])
    for run_bytes in (1_000, 30_000, 1 << 30):  # 1,000: more runs than are merged at once
        assert list(sort_by_time(iter(records), run_bytes, fan_in=4)) == want


def test_ebnerd_histories_delays_and_labels(tmp_path: Path) -> None:
    from datetime import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    def at(hour: int) -> datetime:
        return datetime(2023, 5, 1, hour)

    behaviors = {
        "impression_id": [2, 1, 3],
        "user_id": [7, 7, 8],
        "impression_time": [at(12), at(10), at(11)],
        "read_time": [5.0, None, 1e9],
        "article_ids_inview": [[1, 2], [3, 4], [5]],
        "article_ids_clicked": [[2], [4], []],
        "age": [30, 30, None],
    }
    history = {
        "user_id": [7],
        "impression_time_fixed": [[at(8), at(9), at(13)]],
        "article_id_fixed": [[91, 92, 93]],
    }
    pq.write_table(pa.table(behaviors), tmp_path / "behaviors.parquet")
    pq.write_table(pa.table(history), tmp_path / "history.parquet")
    assert detect(tmp_path / "behaviors.parquet")[0] == "ebnerd"
    events = list(open_log(tmp_path, None))
    assert [e.ts for e in events] == sorted(e.ts for e in events)
    by_id = {e.id: e for e in events if isinstance(e, Impression)}
    ten = by_id["1"].ts
    hour = 3_600_000
    # nothing from after the impression; the click in the log comes last
    assert by_id["1"].features == {"history": ["91", "92"], "history_ts": [ten - 2 * hour, ten - hour], "age": 30}
    assert by_id["2"].features["history"] == ["91", "92", "4"]
    assert by_id["2"].features["history_ts"] == [ten - 2 * hour, ten - hour, ten + 30_000]
    assert by_id["3"].features == {}
    delays = {e.id: e.ts - by_id[e.id].ts for e in events if isinstance(e, Feedback)}
    assert delays == {"1": 30_000, "2": 5_000, "3": 600_000}


def test_unknown_logs_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="there is no log"):
        open_log(tmp_path / "none.jsonl")
    (tmp_path / "a.xml").write_text("")
    with pytest.raises(ContractError, match=r"a\.xml is not known"):
        open_log(tmp_path / "a.xml")
    with pytest.raises(ContractError, match="folder without any of"):
        open_log(tmp_path)
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(ContractError, match="not a Parquet file"):
        open_log(tmp_path / "a.parquet")


def test_identity_follows_content_and_sources(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "log.jsonl", EVENTS)
    one = EventLog(path, "off").identity()
    assert EventLog(path, None).identity() == one
    assert EventLog(path, "popular:5").identity() != one
    write_jsonl(path, EVENTS[1:])
    assert EventLog(path, None).identity() != one


@pytest.mark.skipif(not (DATA / "mind_20191114").is_dir(), reason="the MIND day is not here; see docs/data.md")
def test_the_mind_day_comes_out_whole() -> None:
    log = EventLog(DATA / "mind_20191114", None)
    events = list(log.events())
    rows = (DATA / "mind_20191114" / "behaviors.tsv").read_text().splitlines()
    assert log.bad.count == 0
    assert [e.ts for e in events] == sorted(e.ts for e in events)
    assert {e.id for e in events if isinstance(e, Impression)} == {r.split("\t")[0] for r in rows}
    clicked = sum(len(e.clicked) for e in events if isinstance(e, Feedback))
    assert clicked == sum(r.count("-1") for r in rows)


@pytest.mark.skipif(not (DATA / "ebnerd_fixture").is_dir(), reason="the EB-NeRD files are not here; see docs/data.md")
def test_the_ebnerd_fixture_comes_out_whole() -> None:
    log = EventLog(DATA / "ebnerd_fixture", None)
    events = list(log.events())
    impressions = [e for e in events if isinstance(e, Impression)]
    assert log.bad.count == 0
    assert len(impressions) == 1_046
    assert sum(len(e.ads) for e in impressions) == 10_848
    assert [e.ts for e in events] == sorted(e.ts for e in events)
    for e in impressions:
        times = e.features.get("history_ts", [])
        assert isinstance(times, list)
        assert all(t <= e.ts for t in times)


@pytest.mark.skipif(not (DATA / "ml_latest_small").is_dir(), reason="MovieLens is not here; see docs/data.md")
def test_movielens_makes_the_same_requests_every_time() -> None:
    from itertools import islice

    def head() -> list[Event]:
        return list(islice(open_log(DATA / "ml_latest_small", None), 15_000))

    events = head()
    assert events == head()
    impressions = [e for e in events if isinstance(e, Impression)]
    assert len(impressions) > 2_000
    assert all(len(set(e.ads)) == len(e.ads) for e in impressions)
    times = [e.ts for e in events if not isinstance(e, Item)]
    assert times == sorted(times)
