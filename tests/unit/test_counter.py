"""The counter: what it writes of impressions and feedback, and of records that are neither."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from counting_bundle import counting_bundle
from hypothesis import given
from hypothesis import strategies as st

from streams.bundles import wants_counter
from streams.counter import EventCounter
from streams.counter_steps import ClickedLane, ShownLane
from streams.settings import DEMO_BUNDLE, Settings
from streams.step import Record
from topics.events import Feedback, Impression, encode
from topics.ids import hash_id
from topics.packed_counts import BUCKET_MS, MAX_ITEMS_PER_DELTA, CountChunk, decode_count, decode_items, encode_items

T0 = 1_767_225_600_000
IDS = st.one_of(st.integers(0, 9), st.sampled_from(["a", "b", "7"]))
EVENTS = st.lists(
    st.one_of(
        st.builds(Impression, st.just("i"), st.sampled_from("uvw"), st.integers(T0, T0 + 3 * BUCKET_MS),
                  st.lists(IDS, max_size=6)),
        st.builds(Feedback, st.just("i"), st.sampled_from("uvw"), st.integers(T0, T0 + 3 * BUCKET_MS),
                  st.lists(IDS, max_size=3)),
    ),
    max_size=20,
)  # fmt: skip


def ads_of(event: Impression | Feedback) -> list[str | int]:
    return event.clicked if isinstance(event, Feedback) else event.ads


@given(EVENTS, st.integers(1, 5))
def test_every_ad_and_click_is_counted_once_however_events_are_batched(
    events: list[Impression | Feedback], size: int
) -> None:
    core = EventCounter()
    want: Counter[tuple[int, int, int, bool]] = Counter()
    got: Counter[tuple[int, int, int, bool]] = Counter()
    for at in range(0, len(events), size):
        batch = events[at : at + size]
        partitions = [hash_id(e.user) % 2 for e in batch]
        chunks = core.chunks(batch)
        for event, partition, chunk in zip(batch, partitions, chunks, strict=True):
            ids = [hash_id(i) for i in ads_of(event)]
            want.update((partition, event.ts // BUCKET_MS, i, isinstance(event, Feedback)) for i in ids)
            assert (chunk is None) == (not ids)
            if chunk is not None:
                assert (chunk.user, chunk.ts_ms, chunk.items.tolist()) == (hash_id(event.user), event.ts, ids)
                assert chunk.clicked == isinstance(event, Feedback)
        for d in core.deltas(chunks, partitions):
            assert encode_items(d.deltas)
            assert partitions[d.source] == d.partition
            bucket = d.deltas.bucket_ms // BUCKET_MS
            for item, shown, clicked in zip(d.deltas.items, d.deltas.shown, d.deltas.clicked, strict=True):
                got[d.partition, bucket, int(item), False] += int(shown)
                got[d.partition, bucket, int(item), True] += int(clicked)
    assert +got == +want
    shown = sum(n for (*_, clicked), n in want.items() if not clicked)
    assert core.counters["ads_counted"] == shown
    assert core.counters["clicks_counted"] == want.total() - shown
    assert core.counters["events_counted"] == len(events)


def test_many_items_of_one_bucket_are_cut_into_records_that_a_broker_takes() -> None:
    items = np.arange(1, MAX_ITEMS_PER_DELTA + 11, dtype=np.uint64)
    chunks: list[CountChunk | None] = [CountChunk(1, T0, False, items), CountChunk(2, T0 + 1, False, items)]
    first, second = EventCounter().deltas(chunks, [3, 3])
    assert (len(first.deltas.items), len(second.deltas.items)) == (MAX_ITEMS_PER_DELTA, 10)
    assert np.concatenate([first.deltas.items, second.deltas.items]).tolist() == items.tolist()
    assert set(first.deltas.shown.tolist()) | set(second.deltas.shown.tolist()) == {2}


def record(value: bytes | None, key: bytes | None, partition: int = 1) -> Record:
    return Record("t", partition, 0, key, value, T0)


def test_lanes_write_to_the_partition_of_the_event_and_tell_bad_records_apart() -> None:
    impression = encode(Impression("i", "u", T0, ["a", "b", "a"]))
    ahead = encode(Impression("i", "u", T0 + 2 * 86_400_000, ["a"]))
    shown = ShownLane(Settings())
    result = shown.run([record(impression, b"u", 2), record(b"{", b"u"), record(ahead, b"u"), record(impression, b"v")])
    assert result.dead == [], "the ranker reads the same records and reports them"
    assert {k: v for k, v in shown.totals().items() if k.startswith("rejected")} == {
        "rejected_not_json": 1, "rejected_far_future": 1, "rejected_key_mismatch": 1
    }  # fmt: skip
    chunk, deltas = result.outputs
    assert (chunk.topic, chunk.partition, chunk.key, chunk.source) == ("counts", 2, b"u", 0)
    assert decode_count(chunk.value).items.tolist() == [hash_id(i) for i in ("a", "b", "a")]
    assert (deltas.topic, deltas.partition, deltas.key, deltas.source) == ("item-counts", 2, None, 0)
    assert sorted(decode_items(deltas.value).shown.tolist()) == [1, 2]

    clicked = ClickedLane(Settings())
    nothing = encode(Feedback("i", "u", T0, []))
    good = encode(Feedback("i", "u", T0, ["a"], converted=["a"]))
    result = clicked.run([record(nothing, b"u"), record(b"{", b"u"), record(None, b"u"), record(good, b"u")])
    assert [(d.source, d.rejected.reason) for d in result.dead] == [(1, "not_json"), (2, "empty")]
    assert [o.source for o in result.outputs] == [3, 3]
    assert decode_count(result.outputs[0].value).clicked
    assert clicked.totals()["events_empty"] == 1


@pytest.mark.parametrize(("lane", "waits"), [(ShownLane, True), (ClickedLane, True)])
def test_a_lane_waits_a_little_for_a_fuller_batch(lane: type[ShownLane], waits: bool) -> None:
    made = lane(Settings())
    assert made.enough(1, 100) is not waits
    assert made.enough(500, 100)
    assert made.linger_s == 0.05


def test_which_bundles_want_a_counter(tmp_path: Path) -> None:
    assert not wants_counter(DEMO_BUNDLE)
    assert wants_counter(counting_bundle(tmp_path / "b"))
