"""What the broker promises and `streams.transactions` relies on: a role's two identities may follow each other as
closely as they like, and offsets and records are still those of the batches in order."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import NewTopic

from topics.kafka import KafkaSettings, admin, consumer, producer

pytestmark = [pytest.mark.broker, pytest.mark.java]


@pytest.fixture
def topic(kafka: KafkaSettings) -> str:
    name = kafka.topic("out")
    control = admin(kafka)
    control.create_topics([NewTopic(name, 1, 1)])[name].result(20)
    return name


def begun(kafka: KafkaSettings, name: str, topic: str, value: bytes, group: Consumer, offset: int) -> Producer:
    """A transaction with one record and one offset, not yet committed."""
    out = producer(kafka, kafka.prefix + name)
    out.init_transactions(30)
    out.begin_transaction()
    out.produce(topic, value)
    assert out.flush(30) == 0
    positions = [TopicPartition(topic, 0, offset)]
    out.send_offsets_to_transaction(positions, group.consumer_group_metadata(), 30)
    return out


def committed(group: Consumer, topic: str) -> int:
    """Waits, as the loop does, while a transaction holds the offset back."""
    for _ in range(100):
        (found,) = group.committed([TopicPartition(topic, 0)], timeout=10)
        if found.error is None:
            return int(found.offset)
        time.sleep(0.1)
    raise AssertionError(f"still unstable: {found.error}")


def readable(reader: Consumer, topic: str, polls: int) -> list[bytes]:
    found = []
    for _ in range(polls):
        message = reader.poll(0.1)
        if message is not None and message.error() is None:
            found.append(message.value())
    return found


@pytest.mark.parametrize("first_ends", ["commit", "abort"])
def test_the_offset_sent_last_stands_whichever_marker_comes_first(
    kafka: KafkaSettings, topic: str, first_ends: str
) -> None:
    group = consumer(kafka, kafka.prefix + "group")
    reader = consumer(kafka, kafka.prefix + "reader")
    reader.assign([TopicPartition(topic, 0, 0)])
    first = begun(kafka, "role", topic, b"first", group, 5)
    second = begun(kafka, "role+1", topic, b"second", group, 7)
    second.commit_transaction(30)
    assert readable(reader, topic, 5) == []  # nothing overtakes the open transaction
    if first_ends == "commit":
        first.commit_transaction(30)
    else:
        first.abort_transaction(30)
    assert committed(group, topic) == 7
    assert readable(reader, topic, 10) == ([b"first", b"second"] if first_ends == "commit" else [b"second"])
    group.close()
    reader.close()
