"""A group-less consumer that follows chosen partitions from chosen offsets and hands their records to the worker.

It reads committed records only. It stops fetching while the worker has not taken what was handed over, so memory is
bounded, and says once per partition when the end that the log had at that moment was reached.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicPartition

from streams.deadline import Deadline
from topics.errors import BrokerError
from topics.kafka import KafkaSettings, consumer, passing, watermarks

log = logging.getLogger(__name__)

_MAX_RECORDS = 2_000
_MAX_HANDED = 4
_LOOK_S, _LOOKS = 5.0, 3
_GONE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)


@dataclass(frozen=True, slots=True)
class Followed:
    topic: str
    partition: int
    offsets: list[int]
    values: list[bytes | None]
    keys: list[bytes | None]
    """of a `keyed` topic; empty for others"""
    next_offset: int
    caught_up: bool
    """the end of the log was reached with these records"""
    generation: int
    done: Callable[[], None]
    """to be called once taken"""


def _lost(topic: str, partition: int | None, error: KafkaError) -> str:
    if error.code() == KafkaError._AUTO_OFFSET_RESET:
        return (
            f"{topic} {partition}: records were deleted before this store had read them ({error.str()}); "
            "the next start rebuilds it from what is left"
        )
    return f"{topic} {partition} cannot be followed: {error.str()}"


class Follower:
    """`watched`: topics (full names) without which the role cannot go on; the client library alone may be silent for
    minutes about one that was deleted. `keyed`: those whose records' keys are asked for; a store's changelog says in
    its values whose they are."""

    def __init__(
        self,
        kafka: KafkaSettings,
        name: str,
        hand_over: Callable[[Followed], None],
        watched: Sequence[str] = (),
        keyed: Sequence[str] = (),
    ) -> None:
        # A group id is required by the client; nothing is ever committed to it.
        self._consumer = consumer(
            kafka,
            f"{kafka.prefix}{name}-follower-{uuid.uuid4().hex[:8]}",
            enable_partition_eof=True,
            # An offset that the log no longer has is for the store to decide about, never silently skipped.
            auto_offset_reset="error",
        )
        # The client serialises calls on one consumer, and `_consumer` is always in a poll: questions go to another.
        self._asker = consumer(kafka, f"{kafka.prefix}{name}-follower-{uuid.uuid4().hex[:8]}")
        self._hand_over = hand_over
        self._keyed = frozenset(keyed)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._generations: dict[tuple[str, int], int] = {}
        self._room = threading.Semaphore(_MAX_HANDED)
        self._stop = threading.Event()
        self._missing = dict.fromkeys(watched, 0)
        self._next_look_s = 0.0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name}-follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, topic: str, partition: int, offset: int | None, generation: int) -> None:
        """Follow from `offset` (None: the beginning). Takes effect soon; `generation` comes back with the records."""

        def command() -> None:
            self._generations[topic, partition] = generation
            start = OFFSET_BEGINNING if offset is None else offset
            self._consumer.incremental_assign([TopicPartition(topic, partition, start)])

        self._commands.put(command)

    def remove(self, topic: str, partition: int) -> None:
        def command() -> None:
            if self._generations.pop((topic, partition), None) is not None:
                self._consumer.incremental_unassign([TopicPartition(topic, partition)])

        self._commands.put(command)

    def partitions(self, topic: str, timeout_s: float = 10.0) -> int:
        """Number of partitions of a topic, from the broker."""
        meta = self._asker.list_topics(topic, timeout=timeout_s).topics[topic]
        if meta.error is not None:
            raise KafkaException(meta.error)
        return len(meta.partitions)

    def bounds(self, topic: str, partition: int, timeout_s: float = 30.0) -> tuple[int, int]:
        """(first offset, end offset of committed records) of a partition, from the broker; waits for one that is away
        or whose leader moves."""
        deadline = Deadline(timeout_s)
        while True:
            try:
                return watermarks(self._asker, topic, partition, deadline.left(5.0))
            except KafkaException as e:
                later = passing(e.args[0]) or e.args[0].code() == KafkaError._UNKNOWN_PARTITION
                if deadline.over or self._stop.is_set() or not later:
                    raise
                log.warning("follower: bounds of %s %d: %s; trying again", topic, partition, e.args[0])
                time.sleep(0.2)

    def stop(self, timeout_s: float) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            with contextlib.suppress(KafkaException, RuntimeError):
                self._consumer.close()
                self._asker.close()

    def _learn_topics(self) -> None:
        """Asks for the topics' leaders. A partition of a topic of which the client knows nothing yet is fetched only
        after its next look at unknown topics, up to a second later."""
        with contextlib.suppress(KafkaException):  # then it comes to know them in its own time
            for topic in self._missing:
                self._consumer.list_topics(topic, timeout=2.0)

    def _run(self) -> None:
        try:
            self._learn_topics()
            while not self._stop.is_set():
                self._obey()
                self._look_at_topics()
                first = self._consumer.poll(0.1)
                if first is None:
                    continue
                messages = [first, *self._consumer.consume(_MAX_RECORDS, 0)]
                for batch in self._group(messages):
                    while not self._room.acquire(timeout=0.1):
                        if self._stop.is_set():
                            return
                    self._hand_over(batch)
        except BaseException as e:  # the loop looks at `error` and stops the process
            self.error = e
            if not isinstance(e, BrokerError):
                log.exception("follower stopped")

    def _look_at_topics(self) -> None:
        """A topic that the broker does not know several times in a row was deleted."""
        now = time.monotonic()
        if now < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_S
        for topic, times in self._missing.items():
            try:
                found = self._asker.list_topics(topic, timeout=2.0).topics.get(topic)
            except KafkaException:  # away: says nothing about its topics
                return
            gone = found is None or (found.error is not None and found.error.code() in _GONE)
            self._missing[topic] = times + 1 if gone else 0
            if self._missing[topic] >= _LOOKS:
                raise BrokerError(
                    f"topic {topic} is gone; `solaris topics create` makes it, then start the roles again"
                )

    def _obey(self) -> None:
        while True:
            try:
                self._commands.get_nowait()()
            except Empty:
                return

    def _group(self, messages: Sequence[Message]) -> list[Followed]:
        grouped: dict[tuple[str, int], list[Message]] = {}
        for m in messages:
            error = m.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                if error.fatal() or error.code() in (
                    KafkaError.UNKNOWN_TOPIC_OR_PART,
                    KafkaError._UNKNOWN_TOPIC,
                    KafkaError.TOPIC_AUTHORIZATION_FAILED,
                    KafkaError._AUTO_OFFSET_RESET,
                ):
                    raise BrokerError(_lost(m.topic() or "a topic", m.partition(), error))
                log.warning("follower: %s", error)
                continue
            grouped.setdefault((m.topic(), m.partition()), []).append(m)
        out = []
        for (topic, partition), of_partition in grouped.items():
            generation = self._generations.get((topic, partition))
            if generation is None:
                continue  # removed while these records were in flight
            data = [m for m in of_partition if m.error() is None]
            out.append(
                Followed(
                    topic,
                    partition,
                    [m.offset() for m in data],
                    [m.value() for m in data],
                    [m.key() for m in data] if topic in self._keyed else [],
                    max(m.offset() + (m.error() is None) for m in of_partition),
                    of_partition[-1].error() is not None,
                    generation,
                    self._room.release,
                )
            )
        return out
