"""One transactional producer of a replay, and the position that is committed with its records.

A session ends with its producer: after a fatal error, or when a call of the client library does not come back, the
replay opens the next one under the same transactional id and asks it how far the last one came.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from topics import kafka as clients
from topics.kafka import KafkaSettings

log = logging.getLogger(__name__)

GIVE_UP_S = 300.0
"""how long `Session.open` waits for a broker that is away"""
PATIENCE_S = 90.0
"""how long a call of an open session is repeated; more than a producer's records live in its queue (60 s)"""
STOP_S = 10.0
"""both, once the replay has been asked to stop"""
CALL_S = 10.0
HUNG_S = 10.0
"""how much longer than its own timeout a call may take"""


class Hung(Exception):
    """A call of librdkafka that ignores its timeout, as some do when the broker dies under them. Its producer is of no
    use any more, nor can it be closed."""


class Saved(msgspec.Struct, omit_defaults=True):
    """Progress as it is kept with the consumer group's offset."""

    position: int = 0
    events: int = 0
    pairs: int = 0
    shift_ms: int = 0
    done: bool = False
    run: str = ""
    """which run wrote it: the same position is reached again when a log is sent again"""


class Session:
    """`open` first, then `begin`, `put`, `commit` or `abort`, as often as needed, and `close`.

    All of them raise `KafkaException`, after they have repeated what librdkafka calls retriable for `PATIENCE_S`
    (`open` and `position`: `GIVE_UP_S`), or `Hung`.
    """

    def __init__(self, kafka: KafkaSettings, name: str, marker_topic: str, stop: threading.Event) -> None:
        """`name` is transactional id and consumer group; `marker_topic` (its partition 0) carries the position."""
        self._kafka, self._marker_topic, self._stop = kafka, marker_topic, stop
        self.producer = clients.producer(
            kafka, name, linger_ms=20, batch_size=1 << 20, queue_buffering_max_messages=500_000
        )
        self._reader = clients.consumer(kafka, name)
        self.hung = False

    def open(self) -> None:
        """Takes over the transactional id: fences whoever held it, ends its open transaction."""
        self._retry("start", lambda: self._bounded("start", lambda: self.producer.init_transactions(30), 30), GIVE_UP_S)
        self._group: Any = self._reader.consumer_group_metadata()

    def position(self) -> Saved:
        """What the last committed transaction of any run said."""
        marker = TopicPartition(self._marker_topic, 0)

        def committed() -> TopicPartition:
            (found,) = self._reader.committed([marker], timeout=30)
            if found.error is not None:
                raise KafkaException(found.error)
            return found

        found: TopicPartition = self._retry("progress", committed, GIVE_UP_S)
        if found.offset >= 0 and found.metadata:
            return msgspec.json.decode(found.metadata, type=Saved)
        return Saved()

    def begin(self) -> None:
        self.producer.begin_transaction()

    def put(self, topic: str, value: bytes, key: bytes) -> None:
        """Produces one record of the open transaction, waiting while the queue is full."""
        while True:
            try:
                self.producer.produce(topic, value, key)
                return
            except BufferError:
                self.producer.poll(0.05)

    def commit(self, saved: Saved, meanwhile: Callable[[], bool]) -> None:
        """The records and `saved`, in one transaction. While the broker is at it, `meanwhile` does a piece of other
        work, again and again until it says that there is none (False). It must not raise."""
        producer = self.producer
        metadata = msgspec.json.encode(saved).decode()
        marker = TopicPartition(self._marker_topic, 0, saved.position, metadata=metadata)

        def offsets() -> None:
            producer.send_offsets_to_transaction([marker], self._group, CALL_S)

        def commit() -> None:
            producer.commit_transaction(CALL_S)

        # The offsets go while records are still in flight: one wait less in which nothing is sent.
        self._retry("offsets", lambda: self._bounded("offsets", offsets, CALL_S, lambda: self._polled(meanwhile)))
        self._drain(meanwhile)
        self._retry("commit", lambda: self._bounded("commit", commit, CALL_S, meanwhile))

    def abort(self, timeout_s: float = 30.0) -> None:
        abort = self.producer.abort_transaction
        self._retry("abort", lambda: self._bounded("abort", lambda: abort(timeout_s), timeout_s))

    def discard(self) -> KafkaError | None:
        """After an error: the open transaction ends, so that readers need not wait for its timeout. Returns why it
        could not be ended, if so; after a fatal error this is what the error was."""
        if self.hung:
            return None
        try:
            self._bounded("abort", lambda: self.producer.abort_transaction(CALL_S), CALL_S)
        except KafkaException as e:
            error: KafkaError = e.args[0]
            log.info("the open transaction could not be aborted: %s", error.str())
            return error
        except Hung as e:
            log.info("the open transaction could not be aborted: %s", e)
        return None

    def close(self) -> None:
        self._reader.close()

    def _polled(self, meanwhile: Callable[[], bool]) -> bool:
        self.producer.poll(0)
        return meanwhile()

    def _drain(self, meanwhile: Callable[[], bool]) -> None:
        """Until every record of the transaction has an answer. Polled here rather than inside the commit, which does
        not come back while the broker is away."""
        began = time.monotonic()
        while len(self.producer):
            self.producer.poll(0 if meanwhile() else 0.1)
            if self._given_up(began, PATIENCE_S):
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer to the records sent"))

    def _given_up(self, began: float, limit_s: float) -> bool:
        return time.monotonic() - began > (STOP_S if self._stop.is_set() else limit_s)

    def _retry(self, what: str, call: Callable[[], Any], limit_s: float = PATIENCE_S) -> Any:
        began = time.monotonic()
        while True:
            try:
                return call()
            except KafkaException as e:
                error = e.args[0]
                if not clients.passing(error) or self._given_up(began, limit_s):
                    raise
                log.warning("replay: %s: %s; trying again", what, error.str())
                time.sleep(0.1)

    def _bounded(
        self,
        what: str,
        call: Callable[[], Any],
        timeout_s: float,
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> None:
        """`call`, whose own timeout is `timeout_s`, in a thread that can be left behind."""
        failed: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as e:
                failed.append(e)

        thread = threading.Thread(target=run, name=f"replay-{what}", daemon=True)
        thread.start()
        while thread.is_alive() and meanwhile():
            pass
        thread.join(timeout_s + HUNG_S)
        if thread.is_alive():
            self.hung = True
            limit = timeout_s + HUNG_S
            raise Hung(f"no answer from {self._kafka.bootstrap} to the transaction's {what} for {limit:g} s")
        if failed:
            raise failed[0]
