"""What a replay sends for a log, and when an event is due."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.errors import ContractError
from topics.events import Candidates, Event, Feedback, Impression, Item, encode
from topics.pacing import MAX_GAP_MS, Pacer
from topics.readers import BadLines, EventLog, Progress
from topics.replay_block import Block, Record
from topics.replay_records import AHEAD_BLOCKS, TOPICS, Ahead, blocks, first_time, records

T0 = 1_700_000_000_000
EVENTS: list[Event] = [
    Item(7, 0, {"category": "x"}),
    Candidates("c1", "u", T0, ["a", "b"], features={"history": ["q"], "history_ts": [T0 - 5]}),
    Impression("i1", "u", T0 + 1, ["a", 4], features={"history": ["q", "r"], "history_ts": [-1, T0]}),
    Feedback("i1", "u", T0 + 2, []),
]


def write(path: Path, lines: list[bytes]) -> EventLog:
    path.write_bytes(b"\n".join(lines))
    return EventLog(path)


def test_raw_lines_pass_byte_for_byte_with_key_topic_and_pairs(tmp_path: Path) -> None:
    lines = [encode(e).replace(b'":', b'" : ') for e in EVENTS]  # not as this program would write them
    got = list(records(write(tmp_path / "log.jsonl", lines), TOPICS))
    assert [r.value for r in got] == lines
    assert [(r.position, r.topic, r.key, r.pairs) for r in got] == [
        (1, "items", b"7", 0), (2, "candidates", b"u", 2), (3, "impressions", b"u", 2), (4, "feedback", b"u", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not_json"),
        (b'{"type":"impression","id":"i","user":"","ts":1,"ads":[]}', "empty_user"),
        (b'{"type":"impression","id":"","user":"u","ts":1,"ads":[]}', "empty_id"),
        (b'{"type":"impression","id":"i","user":"u","ts":-1,"ads":[]}', "time_out_of_range"),
        (b'{"type":"impression","id":"i","user":"u","ts":1}', "wrong_type"),
        (b'{"type":"candidates","id":"i","user":"u","ts":1,"items":[1.5]}', "wrong_type"),
        (b'{"type":"feedback","id":"i","user":"u","ts":1,"clicked":[""]}', "empty_id"),
        (b'{"type":"other","id":"i","user":"u","ts":1}', "unknown_type"),
    ],
)
def test_bad_lines_are_found_with_the_reason_of_the_decoder(tmp_path: Path, line: bytes, reason: str) -> None:
    log = write(tmp_path / "log.jsonl", [encode(EVENTS[1]), line, encode(EVENTS[2])])
    assert [r.position for r in records(log, TOPICS)] == [1, 3]
    assert log.bad.reasons == {reason: 1}
    assert log.bad.first[0].line == 2


def test_strict_also_finds_broken_features(tmp_path: Path) -> None:
    line = b'{"type":"impression","id":"i","user":"u","ts":1,"ads":["a"],"bids":[1,2]}'
    path = tmp_path / "log.jsonl"
    write(path, [line])
    assert len(list(records(EventLog(path, None), TOPICS))) == 1
    with pytest.raises(ContractError, match="not_aligned"):
        list(records(EventLog(path, None, BadLines(strict=True)), TOPICS))


def test_positions_do_not_depend_on_where_one_begins(tmp_path: Path) -> None:
    rows = [encode(e) for e in EVENTS]
    log = write(tmp_path / "log.jsonl", [rows[0], b"{", *rows[1:]])
    whole = list(records(log, TOPICS))
    for after in range(6):
        assert list(records(log, TOPICS, after)) == [r for r in whole if r.position > after]
    derived = EventLog(log.path, "carry_over")
    whole = list(records(derived, TOPICS))
    for after in range(len(whole)):
        assert list(records(derived, TOPICS, after)) == whole[after:]


def test_reading_ahead_changes_neither_order_nor_the_place_of_an_error(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", [encode(e) for e in EVENTS])
    ahead = Ahead(blocks(log, TOPICS), log.progress)
    while ahead.more():
        pass
    assert ahead.share(1.0) == 0.0  # read, not used
    assert [r for block in ahead for r in block] == list(records(log, TOPICS))
    assert ahead.share(1.0) == 1.0

    def many():  # type: ignore[no-untyped-def]
        for i in range(2 * AHEAD_BLOCKS):
            yield Block.of([Record(i, "items", b"k", b"", 0, 0)])
        raise ContractError("bad line")

    ahead = Ahead(many(), Progress(total=100))
    got: list[int] = []

    def take() -> None:
        for block in ahead:
            got.extend(r.position for r in block)
            while len(got) % 3 == 0 and ahead.more():
                pass

    with pytest.raises(ContractError):
        take()
    assert got == list(range(2 * AHEAD_BLOCKS))


def test_the_share_sent_lies_within_the_block_under_way() -> None:
    progress = Progress(total=100)

    def chunks():  # type: ignore[no-untyped-def]
        for done in (40, 100):
            progress.done = done
            yield Block.of([Record(1, "items", b"k", b"", 0, 0)])

    ahead = Ahead(chunks(), progress)
    next(ahead)
    assert [ahead.share(x) for x in (0.0, 0.5, 1.0)] == [0.0, 0.2, 0.4]
    assert ahead.more()
    assert ahead.share(1.0) == 0.4
    next(ahead)
    assert [ahead.share(x) for x in (0.0, 1.0)] == [0.4, 1.0]


def test_moving_times_moves_histories_and_leaves_what_is_unknown(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", [encode(e) for e in EVENTS])
    assert first_time(log) == T0
    moved = [r.value for r in records(log, TOPICS, shift_ms=1_000)]
    assert moved[0] == encode(EVENTS[0])
    assert b'"history_ts":[-1,1700000001000]' in moved[2]
    assert b'"ts":1700000001001' in moved[2]


def test_pacing_goes_by_event_time_and_speed() -> None:
    pacer = Pacer(60.0)
    assert pacer.due(T0, 5.0) == 0
    assert pacer.due(T0 + 60_000, 5.25) == pytest.approx(0.75)
    assert pacer.due(T0 + 30_000, 6.0) < 0  # late: at once
    assert pacer.due(T0 + 120_000, 6.0) == pytest.approx(1.0)


def test_one_wrong_time_does_not_stop_the_replay_and_a_real_gap_is_skipped() -> None:
    pacer = Pacer(1.0)
    pacer.due(T0, 0.0)
    far = T0 + 10 * MAX_GAP_MS
    assert pacer.due(far, 1.0) == 0
    assert pacer.due(T0 + 2_000, 1.0) == pytest.approx(1.0)
    assert pacer.due(far, 2.0) == 0
    assert pacer.due(far + 500, 2.0) == 0
    assert pacer.due(far + 1_500, 2.0) == pytest.approx(1.0)


@given(st.lists(st.integers(0, 10 * MAX_GAP_MS), min_size=1, max_size=50))
def test_no_wait_is_longer_than_the_largest_gap(times: list[int]) -> None:
    pacer = Pacer(1.0)
    now = 0.0
    for ts in times:
        wait = pacer.due(ts, now)
        assert wait <= MAX_GAP_MS / 1000 + 1e-6
        now += max(wait, 0.0)
