"""The loop alone on a real broker: what it does with input that is gone and with results that cannot be written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from confluent_kafka import TopicPartition

from streams.loop import Loop
from streams.settings import Settings
from streams.step import Output, PlainStep, Record, StepResult
from topics import admin
from topics import kafka as clients
from topics.errors import IdentityLost
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


class Held(Echo):
    """Works on its first batch until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def run(self, records: Sequence[Record]) -> StepResult:
        self.begun.set()
        assert self.go.wait(300)
        return super().run(records)


@pytest.fixture
def settings(kafka: KafkaSettings) -> Settings:
    admin.create(kafka)
    made = Settings()
    # A loop waits for a dead member's transaction as long as for one of its own: here as long as the test may take.
    return replace(made, kafka=kafka, loop=replace(made.loop, transaction_timeout_ms=600_000))


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


def test_a_gap_met_while_reading_makes_the_role_join_anew(settings: Settings) -> None:
    """A loop that is not let read on, because its worker is busy, while what it has not read is deleted."""
    kafka = settings.kafka
    step = Held()
    loop = Loop(step, replace(settings, loop=replace(settings.loop, batch_records=5, queue_batches=1)), "one")
    ended: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except IdentityLost as e:
            ended.append(e)

    thread = threading.Thread(target=run)
    feed(kafka, [b"%d" % i for i in range(5)])
    thread.start()
    try:
        assert step.begun.wait(120)
        loop._consumer.pause([TopicPartition(kafka.topic("candidates"), 0)])
        feed(kafka, [b"%d" % i for i in range(5, 100)])
        delete_before(kafka, 60)
        step.go.set()
        wait(lambda: loop.counters["records"] == 5)
        with suppress(RuntimeError):  # where the loop paused too it has resumed by itself, and may have ended
            loop._consumer.resume([TopicPartition(kafka.topic("candidates"), 0)])
        wait(lambda: not thread.is_alive())
    finally:
        step.go.set()
        loop.stop()
        thread.join(60)
    assert len(ended) == 1
    with running(settings) as loop:
        wait(lambda: loop.counters["records"] == 40)
    assert loop.counters["input_deleted"] == 55


def test_a_log_that_ends_before_what_was_committed_is_counted_and_work_goes_on(settings: Settings) -> None:
    kafka = settings.kafka
    feed(kafka, [b"%d" % i for i in range(10)])
    group = clients.consumer(kafka, clients.group_name(kafka, "verifier"))
    group.commit(offsets=[TopicPartition(kafka.topic("candidates"), 0, 25)], asynchronous=False)
    group.close()
    with running(settings) as loop:
        wait(lambda: loop.ready)
        feed(kafka, [b"more"] * 3)
        wait(lambda: loop.counters["records"] == 3)
    assert loop.counters["input_truncated"] == 15


def test_dead_letters_made_at_the_commit_are_counted(settings: Settings) -> None:
    feed(settings.kafka, [b"a", BIG, b"c"])
    with running(settings) as loop:
        wait(lambda: loop.counters["records"] == 3)
    assert loop.counters["dead"] == 1


def test_what_is_held_goes_on_while_a_dead_members_transaction_keeps_back_the_rest(settings: Settings) -> None:
    kafka, topic = settings.kafka, settings.kafka.topic("candidates")
    every = range(kafka.partitions)
    with running(settings) as loop:
        wait(lambda: loop.ready and loop.partitions == list(every))
        for p in every:
            feed(kafka, [b"first"], p)
        wait(lambda: loop.counters["records"] == kafka.partitions)
        # Another member takes some of the partitions, sends their offsets in a transaction, and is gone.
        group = clients.group_name(kafka, "verifier")
        peer = clients.consumer(kafka, group, partition_assignment_strategy="cooperative-sticky")
        peer.subscribe([topic])
        wait(lambda: peer.poll(0.05) is None and bool(peer.assignment()))
        taken = sorted(tp.partition for tp in peer.assignment())
        kept = [p for p in every if p not in taken]
        assert taken
        assert kept
        left_open = clients.producer(kafka, "a-dead-member", transaction_timeout_ms=600_000)
        left_open.init_transactions(30)
        left_open.begin_transaction()
        ends = [TopicPartition(topic, p, 1) for p in taken]
        left_open.send_offsets_to_transaction(ends, peer.consumer_group_metadata(), 30)
        peer.close()
        wait(lambda: loop.partitions == list(every))
        assert not loop.ready
        for p in every:
            feed(kafka, [b"second"] * 5, p)
        wait(lambda: loop.counters["records"] == kafka.partitions + 5 * len(kept))
        assert not loop.ready
        left_open.abort_transaction(30)
        wait(lambda: loop.ready and loop.counters["records"] >= 6 * kafka.partitions)
        time.sleep(0.5)
        assert loop.counters["records"] == 6 * kafka.partitions
    assert loop.counters["input_deleted"] == 0
    assert loop.counters["dropped_generation"] == 0
