"""The loop alone on a real broker: what it does with input that is gone and with results that cannot be written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from confluent_kafka import TopicPartition

from streams.loop import Loop
from streams.settings import Settings
from streams.step import Output, PlainStep, Record, StepResult
from topics import admin
from topics import kafka as clients
from topics.kafka import KafkaSettings

pytestmark = pytest.mark.broker

BIG = b"big"


class Echo(PlainStep):
    """Writes what it reads; `BIG` becomes more than a record may hold."""

    role = "verifier"
    input_topic = "candidates"

    def run(self, records: Sequence[Record]) -> StepResult:
        values = [bytes(8 << 20) if r.value == BIG else r.value or b"" for r in records]
        return StepResult(
            [
                Output("precompute", r.partition, r.key, v, i)
                for i, (r, v) in enumerate(zip(records, values, strict=True))
            ]
        )


@pytest.fixture
def settings(kafka: KafkaSettings) -> Settings:
    admin.create(kafka)
    return replace(Settings(), kafka=kafka)


def feed(kafka: KafkaSettings, values: Sequence[bytes], partition: int = 0) -> None:
    out = clients.producer(kafka)
    for value in values:
        out.produce(kafka.topic("candidates"), value, b"u", partition=partition)
    assert out.flush(60) == 0


@contextmanager
def running(settings: Settings) -> Iterator[Loop]:
    loop = Loop(Echo(), settings, "one")
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join(60)
    assert not thread.is_alive()


def wait(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def delete_before(kafka: KafkaSettings, offset: int) -> None:
    client = clients.admin(kafka)
    place = TopicPartition(kafka.topic("candidates"), 0, offset)
    for done in client.delete_records([place]).values():
        done.result(30)


def test_input_that_was_deleted_before_it_was_read_is_counted_and_work_goes_on(settings: Settings) -> None:
    kafka = settings.kafka
    feed(kafka, [b"%d" % i for i in range(100)])
    delete_before(kafka, 40)
    with running(settings) as loop:  # nothing is committed yet: it begins with what there is
        wait(lambda: loop.counters["records"] == 60)
    assert loop.counters["input_deleted"] == 0
    feed(kafka, [b"%d" % i for i in range(100, 200)])
    delete_before(kafka, 150)
    with running(settings) as loop:
        wait(lambda: loop.counters["records"] == 50)
        feed(kafka, [b"more"])
        wait(lambda: loop.counters["records"] == 51)
    assert loop.counters["input_deleted"] == 50
    assert loop.counters["dropped_generation"] == 0


def test_dead_letters_made_at_the_commit_are_counted(settings: Settings) -> None:
    feed(settings.kafka, [b"a", BIG, b"c"])
    with running(settings) as loop:
        wait(lambda: loop.counters["records"] == 3)
    assert loop.counters["dead"] == 1
