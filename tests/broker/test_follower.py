"""What the follower hands over of a topic: keys where they are asked for, null values as they are."""

from __future__ import annotations

from queue import SimpleQueue

from streams.follower import Followed, Follower
from topics import admin
from topics.kafka import KafkaSettings, producer


def test_keys_come_with_the_records_of_keyed_topics_only(kafka: KafkaSettings) -> None:
    admin.create(kafka, ["items", "stats"])
    written = [(b"a", b"1"), (b"b", b"2"), (b"a", None)]  # a compacted topic takes no record without a key
    out = producer(kafka)
    topics = [kafka.topic("items"), kafka.topic("stats")]
    for topic in topics:
        for key, value in written:
            out.produce(topic, value, key, partition=0)
    assert out.flush(120) == 0
    handed: SimpleQueue[Followed] = SimpleQueue()
    follower = Follower(kafka, "test", handed.put, topics, topics[:1])
    follower.start()
    try:
        found: dict[str, list[Followed]] = {t: [] for t in topics}
        for topic in topics:
            follower.add(topic, 0, None, 1)
        while not all(of and of[-1].caught_up for of in found.values()):
            batch = handed.get(timeout=120)
            found[batch.topic].append(batch)
            batch.done()
    finally:
        follower.stop(30)
    items, stats = (found[t] for t in topics)
    assert [k for b in items for k in b.keys] == [k for k, _ in written]
    assert [v for b in items for v in b.values] == [v for _, v in written]
    assert [v for b in stats for v in b.values] == [v for _, v in written]
    assert not any(b.keys for b in stats)
