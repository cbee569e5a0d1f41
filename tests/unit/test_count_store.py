"""Item and pair counts of serving: bounds, what is not known and why, damage, and a log that lost records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from state import count_kernels, kernels
from state.api import ChangelogRecord, StoreSettings
from state.count_store import EXACT_MS, SILENT_MS, ItemCounts, PairCounts, parse_counts, store_settings
from state.count_warm import warm_counts
from state.counts import BUCKET_MS, DAY_MS, HOUR_MS, Counts, CountSettings
from state.store import RocksStore, open_store
from topics.packed_counts import CountChunk, ItemDeltas, encode_count, encode_items

T0 = 1_767_225_600_000
SETTINGS = CountSettings(lag_ms=0)


class Clock:
    def __init__(self) -> None:
        self.now = -1

    def __call__(self, ts: int) -> int:
        self.now = max(self.now, ts)
        return self.now


def items_of(settings: CountSettings = SETTINGS, room: int = 1024) -> ItemCounts:
    made = ItemCounts(settings, Clock(), room)
    made.restored = True
    return made


def deltas(ts: int, counted: dict[int, tuple[int, int]]) -> bytes:
    names = np.array(sorted(counted), np.uint64)
    shown, clicked = (np.array([counted[int(i)][k] for i in names], np.uint32) for k in (0, 1))
    return encode_items(ItemDeltas(ts - ts % BUCKET_MS, names, shown, clicked))


def ask(items: ItemCounts, names: list[int], asked: int) -> Counts:
    out = Counts.unknown(1, len(names))
    at = np.array([asked], np.int64)
    out.known = items.known(at)
    items.lookup(np.array([0, len(names)], np.int64), np.array(names, np.uint64), at, out)
    return out


def test_many_items_and_buckets_with_growth_and_compaction_equal_plain_sums() -> None:
    rng = np.random.default_rng(3)
    counts, truth = items_of(room=4), Counter[tuple[int, int]]()
    end = 40 * 12
    for step in range(end):  # 40 hours, one record in each 5 minutes and sometimes a late one
        for bucket in (step, step - int(rng.integers(0, 30))) if step % 7 == 0 and step > 40 else (step,):
            named = {int(i): (int(rng.integers(0, 4)), 1) for i in 1 + rng.zipf(1.3, 40) % 300}
            record = deltas(T0 + bucket * BUCKET_MS, named)
            counts.apply(0, [counts.position.get(0, 0)], [record], counts.position.get(0, 0) + 1)
            truth.update({(i, bucket): shown for i, (shown, _) in named.items()})
    assert counts.counters["compactions"] > 3
    assert counts.items <= 300
    compacted, new = counts.counters["compactions"], 10_000
    while counts.counters["compactions"] == compacted:  # once more at the end, so that nothing is kept by chance
        record = deltas(T0 + (end - 1) * BUCKET_MS, {i: (1, 0) for i in range(new, new + 50)})
        counts.apply(0, [counts.position[0]], [record], counts.position[0] + 1)
        new += 50
    names = [*range(1, 301), 9_999]
    for back in (0, BUCKET_MS, HOUR_MS - 1, HOUR_MS, EXACT_MS - BUCKET_MS, EXACT_MS):
        asked = T0 + (end - 1) * BUCKET_MS - back
        got = ask(counts, names, asked)
        assert got.known.all()
        now, day = (asked - T0) // BUCKET_MS, ((asked // HOUR_MS - 23) * HOUR_MS - T0) // BUCKET_MS
        assert got.item_shown_hour.tolist() == [sum(truth[i, b] for b in range(now - 12, now)) for i in names]
        assert got.item_shown_day.tolist() == [sum(truth[i, b] for b in range(day, now)) for i in names]
    assert counts.nbytes < 1 << 20


def test_what_is_old_leaves_memory() -> None:
    counts = items_of(room=8)
    for hour in range(200):
        record = deltas(T0 + hour * HOUR_MS, {100 * hour + k: (1, 0) for k in range(1, 31)})
        counts.apply(0, [hour], [record], hour + 1)
    assert counts.items <= 3 * 30 * 28, "items of the last 28 hours or so, three times over at most"
    assert ask(counts, [1, 19_901], T0 + 200 * HOUR_MS).item_shown_hour.tolist() == [0, 1]


def test_beyond_max_items_new_ones_are_refused_and_counted_until_room_comes_free() -> None:
    counts = items_of(CountSettings(lag_ms=0, max_items=2), room=8)
    counts.apply(0, [0], [deltas(T0, {1: (1, 0), 2: (1, 1), 3: (4, 2)})], 1)
    assert counts.items == 2
    assert counts.counters["refused"] == 6
    counts.apply(0, [1], [deltas(T0, {2: (1, 0), 3: (1, 0)})], 2)
    assert counts.counters["refused"] == 7
    got = ask(counts, [1, 2, 3], T0 + BUCKET_MS)
    assert got.item_shown_hour.tolist() == [1, 2, 0]
    late = T0 + 30 * HOUR_MS
    counts.apply(0, [2], [deltas(late, {3: (5, 0), 4: (6, 0)})], 3)
    assert ask(counts, [1, 2, 3, 4], late + BUCKET_MS).item_shown_hour.tolist() == [0, 0, 5, 6]


def test_records_again_and_records_that_are_none() -> None:
    counts = items_of()
    good = deltas(T0, {7: (1, 1)})
    counts.apply(0, [0, 1, 2, 3], [good, None, b"no deltas", good], 4)
    counts.apply(0, [0, 3, 4], [good, good, good], 5)
    counts.apply(1, [3], [good], 4)
    assert {k: v for k, v in counts.counters.items() if v} == {"records": 4, "repeated": 2, "rejected": 2}
    assert ask(counts, [7], T0 + BUCKET_MS).item_clicked_day.tolist() == [4]
    assert counts.position == {0: 5, 1: 4}


def test_when_item_counts_are_not_known() -> None:
    counts = items_of()
    at = np.array([T0], np.int64)
    assert not counts.known(at)[0], "nothing was ever counted: there is no counter"
    counts.apply(0, [0], [deltas(T0, {1: (1, 0)})], 1)
    assert counts.known(np.array([T0, T0 + BUCKET_MS + SILENT_MS, T0 - EXACT_MS])).all()
    assert not counts.known(T0 + BUCKET_MS + SILENT_MS + at - at + 1)[0], "the counter has been silent for too long"
    assert not counts.known(T0 - EXACT_MS - 1 + at - at)[0], "further back than what is kept exactly"
    counts.restored = False
    assert not counts.known(at)[0]
    assert ask(counts, [1], T0 + BUCKET_MS).item_shown_hour.tolist() == [0], "nothing is said of what is not known"


def test_an_item_seen_more_often_than_32_bits_hold_is_right_within_the_window() -> None:
    counts = items_of(room=4)
    for k in range(4):
        counts.apply(0, [k], [deltas(T0 + k * BUCKET_MS, {1: (2**31 + k, 2**31)})], k + 1)
    later = T0 + 20 * BUCKET_MS
    counts.apply(0, [9], [deltas(later, {1: (5, 4)})], 10)
    got = ask(counts, [1], later + BUCKET_MS)
    assert (got.item_shown_hour[0], got.item_clicked_hour[0]) == (5, 4)


def pairs_at(path: Path, items: ItemCounts) -> PairCounts:
    base = StoreSettings(grace_ms=HOUR_MS, cache_bytes=1 << 20, lock_timeout_s=0)
    made = PairCounts(open_store(path, store_settings(base, SETTINGS), parse_counts), items, SETTINGS)
    made.restored = True
    return made


def chunk(offset: int, user: int, ts: int, items: list[int], clicked: bool = False) -> ChangelogRecord:
    return ChangelogRecord(offset, encode_count(CountChunk(user, ts, clicked, np.array(items, np.uint64))))


def look(pairs: PairCounts, user: int, items: list[int], now: int) -> Counts:
    return pairs.lookup(
        np.array([user], np.uint64), np.array([0, len(items)]), np.array(items, np.uint64), np.array([now])
    )


def test_a_user_with_more_chunks_than_the_cache_holds(tmp_path: Path) -> None:
    items = items_of()
    items.apply(0, [0], [deltas(T0, {1: (1, 0)})], 1)
    pairs = pairs_at(tmp_path / "s", items)
    wide = list(range(1, 1001))
    pairs.store.apply([chunk(k, 5, T0 + k, wide) for k in range(200)])  # 1.6 MB of one user
    pairs.store.apply([chunk(300, 6, T0, [3, 3, 4]), chunk(301, 6, T0 + 1, [3], True)])
    got = look(pairs, 5, [1, 1000, 1001, 1], T0 + 500)
    assert got.pair_shown.tolist() == [200, 200, 0, 200]
    assert got.pair_ts_ms.tolist() == [T0 + 199, T0 + 199, -1, T0 + 199]
    assert got.user_shown.tolist() == [200_000]
    got = look(pairs, 6, [3], T0 + 500)
    assert (got.pair_shown[0], got.pair_clicked[0], got.user_shown[0], got.user_clicked[0]) == (2, 1, 3, 1)
    assert look(pairs, 7, [], T0 + 500).user_shown.tolist() == [0]
    pairs.store.close()


def test_what_is_older_than_the_window_leaves_the_disk(tmp_path: Path) -> None:
    pairs = pairs_at(tmp_path / "s", items_of())
    for hour in range(0, 100, 2):
        ts = T0 + hour * HOUR_MS
        pairs.store.apply([chunk(hour, 5, ts, [1])])
        pairs.store.expire(ts)
    oldest = min(ts for _, _, ts, _, _ in pairs.store.scan())
    life = DAY_MS + HOUR_MS
    assert T0 + 98 * HOUR_MS - life - 7 * HOUR_MS <= oldest <= T0 + 98 * HOUR_MS - life
    pairs.store.close()


def test_chunks_that_are_none_are_passed_over_and_an_emptied_store_counts_again(tmp_path: Path) -> None:
    items = items_of()
    items.apply(0, [0], [deltas(T0, {1: (1, 0)})], 1)
    pairs = pairs_at(tmp_path / "s", items)
    log = [chunk(0, 5, T0, [1]), ChangelogRecord(1, b"no chunk"), ChangelogRecord(2, b""), chunk(3, 5, T0 + 1, [1])]
    result = pairs.store.apply(log)
    assert (result.applied, [o for o, _ in result.rejected]) == (2, [1, 2])
    pairs.store.wipe("the log lost records")
    assert pairs.store.position is None
    assert look(pairs, 5, [1], T0 + 9).pair_shown.tolist() == [0]
    pairs.store.apply(log[3:])
    assert look(pairs, 5, [1], T0 + 9).pair_shown.tolist() == [1]
    pairs.store.close()


def test_pair_counts_are_not_known_before_they_are_restored_or_past_the_grace(tmp_path: Path) -> None:
    items = items_of()
    items.apply(0, [0], [deltas(T0, {1: (1, 0)})], 1)
    pairs = pairs_at(tmp_path / "s", items)
    pairs.store.apply([chunk(0, 5, T0 - 1, [1])])
    pairs.restored = False
    assert not look(pairs, 5, [1], T0).known[0]
    pairs.restored = True
    assert look(pairs, 5, [1], T0).pair_shown.tolist() == [1]
    pairs.store.expire(T0 + HOUR_MS)
    assert look(pairs, 5, [1], T0).known[0]
    pairs.store.expire(T0 + HOUR_MS + 1)
    got = look(pairs, 5, [1], T0)
    assert not got.known[0]
    assert got.pair_shown.tolist() == [0]
    pairs.store.close()


def test_arguments_that_do_not_line_up(tmp_path: Path) -> None:
    pairs = pairs_at(tmp_path / "s", items_of())
    with pytest.raises(ValueError, match="splits"):
        pairs.lookup(np.ones(1, np.uint64), np.array([0, 2]), np.ones(1, np.uint64), np.array([T0]))
    pairs.store.close()


def test_embedding_stores_refuse_count_chunks(tmp_path: Path) -> None:
    store = RocksStore(tmp_path / "s", StoreSettings(cache_bytes=1 << 20))
    assert store.apply([chunk(0, 5, T0, [1])]).rejected == [(0, "wrong_kind")]
    store.close()


def test_nothing_is_left_to_compile_for_the_first_batch(tmp_path: Path) -> None:
    compiled = (
        count_kernels.scan, count_kernels.count_pairs, count_kernels.add, count_kernels.survey, count_kernels.compact,
        count_kernels.count_items, kernels.heads_of,
    )  # fmt: skip
    warm_counts()
    before = [len(k.signatures) for k in compiled]  # type: ignore[attr-defined]
    assert min(before) > 0
    items = items_of(room=4)
    items.apply(0, [0], [deltas(T0, {k: (1, 1) for k in range(1, 50)})], 1)
    pairs = pairs_at(tmp_path / "s", items)
    pairs.store.apply([chunk(0, 5, T0, [1, 2])])
    assert look(pairs, 5, [1], T0 + BUCKET_MS).known[0]
    pairs.store.close()
    assert [len(k.signatures) for k in compiled] == before  # type: ignore[attr-defined]
