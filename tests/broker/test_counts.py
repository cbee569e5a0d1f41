"""Rolling counts on a real broker: the counter is killed in mid-transaction and after a commit, and every ad and click
is counted once; a ranker that starts from nothing answers with the counts of the whole log."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from counting_bundle import counting_bundle, scores
from pipeline import Roles

from state.api import ChangelogRecord, StoreSettings
from state.count_store import ItemCounts, PairCounts, parse_counts, store_settings
from state.counts import PER_REQUEST, Counts, CountSettings
from state.counts_reference import ReferenceCounts
from state.store import open_store
from streams.audit import read_all
from streams.audit_counts import CountAudit, audit_counts
from topics import admin
from topics.events import Event, Feedback, Impression, decode_ranked_ads, encode
from topics.ids import hash_id
from topics.kafka import KafkaSettings, producer
from topics.readers import open_log
from topics.simulator import preset, write

pytestmark = pytest.mark.broker
COUNTS = CountSettings()
AD_LISTS = 40


def ads_of(e: Impression | Feedback) -> tuple[int, ...]:
    return tuple(hash_id(i) for i in (e.clicked if isinstance(e, Feedback) else e.ads))


def send(kafka: KafkaSettings, events: list[Event]) -> None:
    out = producer(kafka)
    for e in events:
        assert isinstance(e, Impression | Feedback)
        topic = "feedback" if isinstance(e, Feedback) else "impressions"
        out.produce(kafka.topic(topic), encode(e), e.user.encode())
    assert out.flush(60) == 0


def serving(kafka: KafkaSettings, folder: Path, clock: int) -> dict[int, PairCounts]:
    """The counts as a ranker has them: built from the topics into empty folders."""
    items = ItemCounts(COUNTS, lambda ts: clock)
    chunks = read_all(kafka, "counts")
    for r in read_all(kafka, "item-counts"):
        items.apply(r.partition, [r.offset], [r.value], r.offset + 1)
    items.restored = True
    out = {}
    for p in range(kafka.partitions):
        store = open_store(folder / str(p), store_settings(StoreSettings(), COUNTS), parse_counts)
        store.apply([ChangelogRecord(r.offset, r.value or b"") for r in chunks if r.partition == p])
        out[p] = PairCounts(store, items, COUNTS)
        out[p].restored = True
    return out


def test_counts_are_exact_after_kills_and_a_ranker_from_nothing_serves_them(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    write(preset("tiny"), tmp_path / "tiny.jsonl")
    events = [e for e in open_log(tmp_path / "tiny.jsonl") if isinstance(e, Impression | Feedback)]
    again = [e for e in events if hash_id(e.id) % 20 == 0]  # a source that delivers twice is counted twice
    mixed = [*events, *again]
    random.Random(4).shuffle(mixed)
    reference = ReferenceCounts(COUNTS)
    for e in mixed:
        tell = reference.clicked if isinstance(e, Feedback) else reference.shown
        tell(hash_id(e.user), np.array(ads_of(e), np.uint64), e.ts)

    admin.create(kafka)
    bundle = counting_bundle(tmp_path / "bundle")
    send(kafka, mixed[: len(mixed) // 2])
    with Roles(kafka, tmp_path / "roles", bundle, ["loop.batch_records=40", "ranker.restore_deadline_s=0"]) as roles:
        for point in ("after_produce:3", "after_commit:2"):
            roles.start("counter", env={"SOLARIS_FAILPOINT": point})
            assert roles.processes.pop("counter").wait(120) == -9, roles.logs()
        send(kafka, mixed[len(mixed) // 2 :])
        out = producer(kafka)
        out.produce(kafka.topic("feedback"), b"no feedback", b"somebody")
        out.produce(kafka.topic("impressions"), b"no impression", b"somebody")
        assert out.flush(60) == 0
        roles.start("counter", sets=["loop.guarantee=at_least_once"])  # which the counter does not heed
        roles.settle()
        assert roles.stop() == {"counter": 0}, roles.logs()
        assert audit_counts(kafka) == CountAudit(events=sum(len(ads_of(e)) > 0 for e in mixed))
        letters = {dict(r.headers)["solaris-source-topic"] for r in read_all(kafka, "dlq")}
        assert letters == {kafka.topic("feedback").encode()}, "bad impressions are the ranker's to report"

        out.produce(kafka.topic("counts"), b"no chunk", b"somebody")
        out.produce(kafka.topic("item-counts"), b"no sums", partition=0)
        assert out.flush(60) == 0

        now = max(e.ts for e in events) + COUNTS.lag_ms
        shown = [e for e in events if isinstance(e, Impression)][-AD_LISTS:]
        asked = [Impression(f"ask{k}", e.user, now, e.ads) for k, e in enumerate(shown)]
        users = np.array([hash_id(e.user) for e in asked], np.uint64)
        splits = np.cumsum([0, *(len(e.ads) for e in asked)])
        items = np.array([i for e in asked for i in ads_of(e)], np.uint64)
        at = np.full(len(asked), now)
        truth = reference.lookup(users, splits, items, at)
        assert truth.item_clicked_day.any()
        assert truth.pair_shown.any()

        place = {r.key: r.partition for r in read_all(kafka, "counts")}
        mine = serving(kafka, tmp_path / "stores", max(e.ts for e in events))
        for k, e in enumerate(asked):
            own = slice(splits[k], splits[k + 1])
            got = mine[place[e.user.encode()]].lookup(users[[k]], np.array([0, len(e.ads)]), items[own], at[[k]])
            for name in Counts.__dataclass_fields__:
                expected = getattr(truth, name)[slice(k, k + 1) if name in PER_REQUEST else own]
                assert getattr(got, name).tolist() == expected.tolist(), (name, e)

        for name in ("ranker", "ranker-second"):  # each has the items of all partitions, and its own users
            roles.start("ranker", name)
        roles.wait_ready()
        send(kafka, list(asked))
        roles.settle()
        assert roles.stop() == {"ranker": 0, "ranker-second": 0}, roles.logs()
    said = [msgspec.json.decode(r.value or b"{}") for r in read_all(kafka, "stats")]
    last = {s["pid"]: s["counters"] for s in said if s["role"] == "ranker"}
    assert sum(c["counts_known"] for c in last.values()) >= AD_LISTS
    assert sum(c["counts_chunks_rejected"] for c in last.values()) == 1
    assert [c["item_counts_rejected"] for c in last.values()] == [1, 1]
    items_seen = len({item for _, item, *_ in reference.events})
    assert [(c["item_counts_restored"], c["item_counts_items"]) for c in last.values()] == [(1, items_seen)] * 2
    answers = {a.id: a for a in (decode_ranked_ads(r.value or b"") for r in read_all(kafka, "ranked-ads"))}
    wanted = scores(truth, splits, at)
    for k, e in enumerate(asked):
        a = answers[e.id]
        by_position = dict(zip(a.positions, a.scores, strict=True))
        assert a.state == "live"
        assert [by_position[p] for p in range(len(e.ads))] == pytest.approx(wanted[splits[k] : splits[k + 1]], abs=1e-6)
