"""Blocks: what is summed, how ranked ads meet their feedback, and that reading again changes nothing."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from streams.monitor.blocks import BLOCK_MS, MAX_PENDING, Block, Blocks, bucket, log_loss, upper_ms
from streams.monitor.figures import percentiles
from topics.events import Feedback, RankedAds, encode
from topics.ids import sampled

T = 1_700_000_000_000
WINDOW, KEEP = 60_000, 3_600_000


def ranked(i: str, ads: list[str | int] | None = None, scores: list[float] | None = None, **other: object) -> bytes:
    ads = ["a", "b"] if ads is None else ads
    n = len(ads)
    fields: dict[str, object] = {
        "id": i, "user": "u", "ts": 5, "ads": ads, "positions": list(range(n)), "scores": scores or [0.25] * n,
        "sources": ["direct"] * n, "ages_ms": [1000] * n, "vm": "v", "fm": "f", "state": "live", "received_ms": 100,
        "ranked_ms": 107, **other,
    }  # fmt: skip
    return encode(RankedAds(**fields))  # type: ignore[arg-type]


def feedback(i: str, *clicked: str | int) -> bytes:
    return encode(Feedback(id=i, user="u", ts=6, clicked=list(clicked)))


def blocks(share: float = 1.0, since_ms: int = 0) -> Blocks:
    return Blocks(share, WINDOW, KEEP, since_ms)


def total(b: Blocks) -> Block:
    return b.total(0, 2 * T)


@pytest.mark.parametrize("first", ["ranked", "feedback"])
def test_join_in_either_order_counts_in_the_block_of_the_ranked_record(first: str) -> None:
    b = blocks()
    steps = [
        lambda: b.ranked(0, T, ranked("i", ["a", 7], [0.2, 0.6], sources=["direct", "none"], ages_ms=[9, None]), T),
        lambda: b.feedback(0, T + BLOCK_MS, feedback("i", "7"), T),
    ]
    for step in steps if first == "ranked" else reversed(steps):
        step()
    got = b.total(T, T + BLOCK_MS)
    assert (got.counts["impressions"], got.counts["ads"], got.counts["joined"]) == (1, 2, 1)
    assert got.labelled["direct"].clicks == 0
    assert got.labelled["none"].clicks == 1  # 7 and "7" are one id
    assert got.labelled["direct"].loss == pytest.approx(-math.log(0.8))
    assert got.labelled["none"].loss == pytest.approx(-math.log(0.6))
    assert got.ages == {"direct": {bucket(9): 1}}
    assert got.latency == {bucket(7): 1}
    assert b.total(T + BLOCK_MS, T + 2 * BLOCK_MS).counts == {"feedback": 1}


def test_an_impression_without_feedback_is_no_label() -> None:
    b = blocks()
    b.ranked(0, T, ranked("i"), T)
    b.ranked(0, T, ranked("j"), T)
    b.feedback(0, T, feedback("j"), T)
    assert total(b).labelled["direct"].ads == 2
    assert total(b).counts["impressions"] == 2


def test_too_late_never_seen_and_repeated_feedback_are_counted_and_join_nothing() -> None:
    b = blocks()
    b.ranked(0, T, ranked("late"), T)
    b.feedback(0, T + WINDOW + 1, feedback("late", "a"), T)
    b.feedback(0, T, feedback("never", "a"), T)
    b.ranked(0, T, ranked("twice"), T)
    b.feedback(0, T, feedback("twice", "a"), T)
    b.feedback(0, T, feedback("twice", "b"), T)
    b.expire(T + WINDOW + 1)
    c = total(b).counts
    assert (c["feedback"], c["joined"], c["feedback_repeated"], c["feedback_unmatched"]) == (4, 1, 1, 2)
    assert total(b).labelled["direct"].clicks == 1


def test_waiting_ends_with_the_window_and_then_the_same_id_is_another_impression() -> None:
    b = blocks()
    b.ranked(0, T, ranked("i"), T)
    b.ranked(0, T, ranked("i"), T)
    assert total(b).counts["duplicates"] == 1
    b.expire(T + WINDOW)
    b.ranked(0, T, ranked("i"), T + WINDOW)
    assert total(b).counts["duplicates"] == 2
    b.expire(T + WINDOW + 1)
    b.ranked(0, T, ranked("i"), T + WINDOW + 1)
    assert total(b).counts["impressions"] == 2


@pytest.mark.parametrize("value", [None, b"", b"{", b'{"type":"ranked_ads"}', b"\xff\xfe", b"[" * 10_000])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_what_cannot_be_read_is_counted(value: bytes | None, share: float) -> None:
    b = blocks(share)
    b.ranked(0, T, value, T)
    b.feedback(0, T, value, T)
    assert total(b).counts == {"undecodable": 2}


def test_an_impression_without_ads() -> None:
    b = blocks()
    b.ranked(0, T, ranked("i", []), T)
    b.feedback(0, T, feedback("i", "a"), T)
    assert total(b).counts["joined"] == 1
    assert total(b).labelled == {}


def test_the_sample_holds_whole_impressions_in_the_share_asked_for() -> None:
    b = blocks(0.2)
    for i in range(5000):
        b.ranked(0, T, ranked(f"i{i}"), T)
        b.feedback(0, T, feedback(f"i{i}"), T)
    c = total(b).counts
    assert c["impressions"] == c["feedback"] == c["joined"] == sum(sampled(f"i{i}", 0.2) for i in range(5000))
    assert 850 < c["impressions"] < 1150


def test_memory_is_bounded_and_what_gives_way_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_PENDING == 200_000
    monkeypatch.setattr("streams.monitor.blocks.MAX_PENDING", 10)
    b = blocks()
    for i in range(15):
        b.ranked(0, T, ranked(f"i{i}"), T)
    b.feedback(0, T, feedback("i4", "a"), T)
    b.feedback(0, T, feedback("i5", "a"), T)
    assert b.skipped["pending_dropped"] == 5
    assert total(b).counts["joined"] == 1


def near(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """The same but for the order in which floats were summed."""
    x, y = a.pop("labelled"), b.pop("labelled")
    return Block.load({**a, "labelled": {}}) == Block.load({**b, "labelled": {}}) and x == {
        source: pytest.approx(sums) for source, sums in y.items()
    }


def test_reading_again_from_the_start_of_a_window_sets_the_same_rows() -> None:
    rng = random.Random(3)
    records = []
    for i in range(400):
        at, scores = T + i * 100, [rng.random() for _ in range(3)]
        records.append(("ranked", rng.randrange(3), at, ranked(f"i{i}", ["a", "b", "c"], scores)))
        if rng.random() < 0.8:
            clicked = [ad for ad in "abc" if rng.random() < 0.3]
            records.append(("feedback", 0, at + rng.randrange(-5000, 5000), feedback(f"i{i}", *clicked)))
    records.sort(key=lambda r: r[2])

    def play(b: Blocks, chosen: list[tuple[str, int, int, bytes]]) -> None:
        for kind, partition, at, value in chosen:
            getattr(b, kind)(partition, at, value, at)

    whole = blocks()
    play(whole, records)
    want = dict(whole.changed())

    half, three_quarters = len(records) // 2, len(records) * 3 // 4
    crashed = blocks()
    play(crashed, records[:half])
    table = {key: json.loads(json.dumps(value)) for key, value in crashed.changed()}
    play(crashed, records[half:three_quarters])  # in memory only: the kill comes here
    since = records[half][2] - 10_000
    since -= since % BLOCK_MS
    again = blocks(since_ms=since)
    for key, value in table.items():
        again.load(key, value)
    play(again, [r for r in records if r[2] >= since - BLOCK_MS])
    table.update(again.changed())
    assert any(start < since for _, start in table)
    assert table.keys() == want.keys()
    for key in want:
        assert near(table[key], want[key]), key


def test_a_loaded_row_never_replaces_what_is_read_and_old_records_touch_no_loaded_row() -> None:
    b = blocks(since_ms=T)
    stored = Block()
    stored.counts["impressions"] = 9
    b.ranked(0, T, ranked("i"), T)
    b.load((0, T), stored.dump())
    b.load((0, T - BLOCK_MS), stored.dump())
    b.ranked(0, T - 1, ranked("j"), T)
    assert b.total(T, T + BLOCK_MS).counts["impressions"] == 1
    assert b.total(T - BLOCK_MS, T).counts["impressions"] == 9
    assert b.skipped["too_old"] == 1
    assert [k for k, _ in b.changed()] == [(0, T)]


def test_windows_older_than_what_is_kept_go_whether_read_or_recovered() -> None:
    b = blocks(since_ms=T)
    b.load((2, T - BLOCK_MS), Block().dump())
    b.ranked(0, T, ranked("i"), T)
    assert b.expire(T + KEEP) == []
    assert b.expire(T + KEEP + 1) == [(2, T - BLOCK_MS)]
    assert b.expire(T + KEEP + BLOCK_MS + 1) == [(0, T)]
    assert b.changed() == []
    assert total(b) == Block()


def test_histograms_are_at_most_nine_percent_high() -> None:
    for ms in (1, 2, 3, 7, 10, 999, 1000, 12_345, 86_400_000, 3e9):
        assert ms <= upper_ms(bucket(ms)) * (1 + 1e-9) <= ms * 2 ** (1 / 8) * (1 + 1e-9) or ms == 1
    assert bucket(0) == bucket(-5) == bucket(1) == 0
    histogram = {bucket(10): 98, bucket(1000): 2}
    got = percentiles(histogram)
    assert got["p50"] == pytest.approx(10, rel=0.1)
    assert got["p99"] == pytest.approx(1000, rel=0.1)
    assert percentiles({}) == {"p50": None, "p90": None, "p99": None}


def test_log_loss_is_finite_at_the_ends() -> None:
    assert log_loss(0.0, True) == pytest.approx(-math.log(1e-7))
    assert log_loss(1.0, False) == pytest.approx(-math.log(1e-7), rel=1e-6)
    assert log_loss(0.3, True) == pytest.approx(-math.log(0.3))


def test_a_block_survives_json() -> None:
    b = blocks()
    b.ranked(0, T, ranked("i", ["a"], [0.123456789012345]), T)
    b.feedback(0, T, feedback("i", "a"), T)
    ((_, value),) = b.changed()
    assert Block.load(json.loads(json.dumps(value))) == total(b)
