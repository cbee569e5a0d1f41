"""Putting dead letters back, exactly once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import KafkaException, Message, Producer, TopicPartition

from topics import dlq, tail
from topics.contracts import CONTRACTS
from topics.dlq import DeadLetter
from topics.errors import BrokerError
from topics.kafka import KafkaSettings, consumer, group_name, producer, watermarks

ROLE = "dlq-retry"
TIMEOUT_S = 30.0


@dataclass(slots=True)
class RetryCounts:
    retried: int = 0
    """put back to their source topics"""
    parked: int = 0
    """marked as not to be retried any more, by this run"""
    already_parked: int = 0
    kept: int = 0
    """not chosen: put at the end of the DLQ, unchanged, for a later run"""


def retry(
    kafka: KafkaSettings,
    chosen: Callable[[DeadLetter], bool] = lambda letter: True,
    max_attempts: int = 3,
    batch: int = 50,
) -> RetryCounts:
    """Works through the DLQ from where the last run ended to its end as of now.

    1. The transactional id is taken: another run that is still going on is fenced and its open step aborted.
    2. Letters are read from the committed offset of the group `<prefix>dlq-retry`.
    3. In one transaction: letters go back to their source topic with their attempt raised by one, or, when they may not
       be retried, to the end of the DLQ marked as parked, or, when not chosen, to the end of the DLQ as they were;
       and the group's offset moves past them.
    4. The transaction commits. A crash before it repeats the step, after it does not.

    Records written during the run are left for the next one. Raises `BrokerError`.
    """
    topic = kafka.topic("dlq")
    parts = tail.partitions(kafka, topic)
    out = producer(kafka, transactional_id=group_name(kafka, ROLE))
    source = consumer(kafka, group_name(kafka, ROLE), enable_partition_eof=True)
    counts = RetryCounts()
    in_step = False
    try:
        out.init_transactions(TIMEOUT_S)
        ends: dict[int, int] = {}
        start: list[TopicPartition] = []
        for tp in source.committed([TopicPartition(topic, p) for p in parts], timeout=TIMEOUT_S):
            low, high = watermarks(source, topic, tp.partition, TIMEOUT_S)
            at = max(tp.offset, low) if tp.offset >= 0 else low
            if at < high:
                ends[tp.partition] = high
                start.append(TopicPartition(topic, tp.partition, at))
        if start:
            source.assign(start)
        silent_since = time.monotonic()
        while ends:
            records: list[Message] = []
            for message in source.consume(batch, timeout=0.2):
                silent_since = time.monotonic()
                if tail.at_end(message):
                    ends.pop(message.partition(), None)
                elif message.offset() < ends.get(message.partition(), 0):
                    records.append(message)
            if time.monotonic() - silent_since > TIMEOUT_S:
                raise BrokerError(f"{topic} at {kafka.bootstrap} stopped answering; what was committed so far stays")
            if records:
                out.begin_transaction()
                in_step = True
                step = _step(out, kafka, records, chosen, max_attempts)
                offsets = {m.partition(): (m.offset() or 0) + 1 for m in records}
                out.send_offsets_to_transaction(
                    [TopicPartition(topic, p, o) for p, o in offsets.items()], source.consumer_group_metadata()
                )
                out.commit_transaction(TIMEOUT_S)
                in_step = False
                counts.retried += step.retried
                counts.parked += step.parked
                counts.already_parked += step.already_parked
                counts.kept += step.kept
            # Transaction markers take offsets too, so the end is where the position is, not where a record was.
            for tp in source.position([TopicPartition(topic, p) for p in ends]):
                if tp.offset >= ends[tp.partition]:
                    del ends[tp.partition]
    except KafkaException as e:
        raise BrokerError(f"dead letters cannot be put back: {e.args[0].str()}") from None
    finally:
        if in_step:
            with contextlib.suppress(KafkaException):  # else the next run aborts it
                out.abort_transaction(TIMEOUT_S)
        source.close()
    return counts


def positions(kafka: KafkaSettings) -> dict[int, int]:
    """How far retries have worked through each partition of the DLQ: a letter before that is history, unless it was
    parked. It was put back, or stands again at the end."""
    topic = kafka.topic("dlq")
    source = consumer(kafka, group_name(kafka, ROLE))
    try:
        parts = [TopicPartition(topic, p) for p in tail.partitions(kafka, topic)]
        return {tp.partition: max(tp.offset, 0) for tp in source.committed(parts, timeout=TIMEOUT_S)}
    except KafkaException as e:
        raise BrokerError(
            f"no answer about {topic} from kafka.bootstrap = {kafka.bootstrap}: {e.args[0].str()}"
        ) from None
    finally:
        source.close()


def _step(
    out: Producer,
    kafka: KafkaSettings,
    records: list[Message],
    chosen: Callable[[DeadLetter], bool],
    max_attempts: int,
) -> RetryCounts:
    counts = RetryCounts()
    topic = kafka.topic("dlq")
    sources = {kafka.topic(c.name) for c in CONTRACTS} - {topic}
    for message in records:
        letter = tail.dead_letter_of(message)
        headers = list(message.headers() or ())
        if letter.parked:
            counts.already_parked += 1
        elif not chosen(letter):
            _send(out, topic, message.key(), message.value(), headers)
            counts.kept += 1
        elif why := dlq.why_not_retried(letter, max_attempts, sources):
            _send(out, topic, message.key(), message.value(), [*headers, (dlq.PARKED, why.encode())])
            counts.parked += 1
        else:
            _send(out, letter.source_topic, letter.key, letter.value, dlq.back_to_source(letter))
            counts.retried += 1
    return counts


def _send(out: Producer, topic: str, key: bytes | None, value: bytes | None, headers: dlq.Headers) -> None:
    """Waits for room in the producer's queue instead of failing."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            out.produce(topic, key=key, value=value, headers=headers)
            return
        except BufferError:
            out.poll(0.1)
            if time.monotonic() > deadline:
                raise BrokerError(f"{topic}: the producer's queue stays full") from None
