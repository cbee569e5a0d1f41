"""The embedded broker keeps what the pipeline rests on: transactions, fencing, read_committed, data over a restart."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import NewTopic

from topics.brokers import Broker, EmbeddedBroker
from topics.errors import BrokerError
from topics.kafka import KafkaSettings, admin, consumer, producer

pytestmark = pytest.mark.broker
pytest.importorskip("noida_db", reason="the embedded extra is not installed (no wheel for this platform)")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("embedded"), tied=True) as broker:
        yield broker


@pytest.fixture
def first_look(embedded: EmbeddedBroker) -> KafkaSettings:
    return KafkaSettings(bootstrap=embedded.bootstrap, prefix=f"e{uuid.uuid4().hex[:8]}.")


def make_topic(kafka: KafkaSettings, name: str) -> str:
    topic = kafka.topic(name)
    control = admin(kafka)
    control.create_topics([NewTopic(topic, 1, 1)])[topic].result(10)
    return topic


def read(kafka: KafkaSettings, topic: str, count: int, seconds: float = 60.0) -> list[bytes]:
    reader = consumer(kafka, f"{kafka.prefix}reader")
    reader.assign([TopicPartition(topic, 0, 0)])
    got: list[bytes] = []
    try:
        for _ in range(int(seconds * 20)):
            message = reader.poll(0.05)
            if message is not None and message.error() is None:
                got.append(message.value())
                if len(got) == count:
                    break
    finally:
        reader.close()
    return got


def test_aborted_and_open_transactions_are_not_read(first_look: KafkaSettings) -> None:
    topic = make_topic(first_look, "tx")
    out = producer(first_look, f"{first_look.prefix}tx")
    out.init_transactions(60)
    out.begin_transaction()
    out.produce(topic, value=b"aborted")
    out.flush(120)
    out.abort_transaction(60)
    out.begin_transaction()
    out.produce(topic, value=b"committed")
    out.flush(120)
    assert read(first_look, topic, 1, seconds=1.0) == []
    out.commit_transaction(60)
    assert read(first_look, topic, 1) == [b"committed"]
    assert len(read(first_look, topic, 2, seconds=1.0)) < 2


def test_a_second_producer_fences_the_first(first_look: KafkaSettings) -> None:
    topic = make_topic(first_look, "fence")
    old = producer(first_look, f"{first_look.prefix}fence")
    old.init_transactions(60)
    old.begin_transaction()
    old.produce(topic, value=b"old")
    old.flush(120)
    new = producer(first_look, f"{first_look.prefix}fence")
    new.init_transactions(60)
    new.begin_transaction()
    new.produce(topic, value=b"new")
    new.commit_transaction(60)
    with pytest.raises(KafkaException):
        old.commit_transaction(60)
    assert read(first_look, topic, 1) == [b"new"]
    assert len(read(first_look, topic, 2, seconds=1.0)) < 2


def test_offsets_are_committed_with_the_results(first_look: KafkaSettings) -> None:
    source, target = make_topic(first_look, "in"), make_topic(first_look, "out")
    feed = producer(first_look)
    feed.produce(source, value=b"event")
    assert feed.flush(120) == 0
    reader = consumer(first_look, f"{first_look.prefix}role", group_instance_id="one")
    reader.subscribe([source])
    message = reader.poll(10.0)
    assert message is not None
    assert message.value() == b"event"
    out = producer(first_look, f"{first_look.prefix}role")
    out.init_transactions(60)
    out.begin_transaction()
    out.produce(target, value=b"result")
    out.send_offsets_to_transaction([TopicPartition(source, 0, 1)], reader.consumer_group_metadata(), 10)
    assert reader.committed([TopicPartition(source, 0)], timeout=300)[0].offset < 0
    out.commit_transaction(60)
    assert reader.committed([TopicPartition(source, 0)], timeout=300)[0].offset == 1
    reader.close()
    assert read(first_look, target, 1) == [b"result"]


def test_records_survive_a_clean_restart_on_the_same_port(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "data", tied=True)
    assert isinstance(broker, Broker)
    with broker:
        kafka = KafkaSettings(bootstrap=broker.bootstrap, prefix="kill.")
        topic = make_topic(kafka, "log")
        out = producer(kafka)
        out.produce(topic, value=b"kept")
        assert out.flush(120) == 0
        broker.stop()
        assert not broker.running
        broker.restart()
        assert broker.bootstrap == kafka.bootstrap
        assert read(kafka, topic, 1) == [b"kept"]
        with pytest.raises(BrokerError, match=f"port {broker.port} .* is taken"):
            EmbeddedBroker(tmp_path / "other", port=broker.port).start()
    assert not broker.running
