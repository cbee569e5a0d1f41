"""Replay: an event log into its topics, paced by event time, exactly once even when interrupted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import xxhash
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from topics import kafka as clients
from topics.errors import BrokerError, SettingsError
from topics.events import MAX_TS
from topics.kafka import KafkaSettings, group_name
from topics.pacing import Pacer
from topics.readers import EventLog
from topics.replay_records import TOPICS, Record, first_time, records

log = logging.getLogger(__name__)

Speed = float | Literal["max"]
PACED_COMMIT_S = 0.05
"""a paced event is readable at most this much (and the commit itself) after it was due"""
MAX_COMMIT_S = 2.0
BATCH_BYTES = 32 << 20
POLL_EVERY = 2_000
GIVE_UP_S = 300.0
"""how long a broker may be away before the replay ends (to be resumed)"""
HUNG_S = 25.0
MAX_RETRIED = 100
_PASSING = (
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)
"""errors of a broker that is away or starting, which librdkafka does not mark as retriable in every call"""
_FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)


class Saved(msgspec.Struct, omit_defaults=True):
    """Progress as it is kept with the consumer group's offset."""

    position: int = 0
    events: int = 0
    pairs: int = 0
    shift_ms: int = 0
    done: bool = False


@dataclass(slots=True)
class ReplayState:
    """What the progress bar shows and `replay` returns."""

    events: int = 0
    """produced by this run"""
    acknowledged: int = 0
    """committed by this run: a read_committed reader sees them"""
    pairs: int = 0
    by_topic: dict[str, int] = field(default_factory=dict)
    """committed records by topic, this run"""
    resumed_events: int = 0
    """committed by earlier runs of this replay"""
    clock_ms: int = -1
    """event time reached, in the log's own time"""
    shift_ms: int = 0
    transactions: int = 0
    retried: int = 0
    """transactions sent again after the broker aborted them"""
    seconds: float = 0.0
    complete: bool = False
    read: float = 0.0
    """share of the log that was read, 0..1"""


class Replay:
    """One replay of one log; `run` may be called once.

    The guarantee, for a reader with ``isolation.level = read_committed``: every usable event of the log is in its topic
    exactly once when `run` has returned with ``complete``, however often it was interrupted (Ctrl-C, kill -9, a broker
    restart) and resumed. It holds since

    1. the transactional id is made of the log's identity and the topics: a new run fences an older one that still
       lives, and ends its open transaction, before it asks how far that one came;
    2. records and the position after them (as the offset of a consumer group of the same id) are committed in one
       transaction;
    3. the stream of records is a function of the log, so a position means the same in every run;
    4. an aborted transaction is sent again from memory, unchanged; after a fatal error nothing more is sent.

    Group offsets live for the broker's `offsets.retention.minutes` (7 days) after the last run: resume within that
    time.
    """

    def __init__(
        self,
        source: EventLog,
        kafka: KafkaSettings,
        speed: Speed = "max",
        topics: Collection[str] = TOPICS,
        resume: bool = False,
        shift_to_now: bool = False,
        on_progress: Callable[[ReplayState], None] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        unknown = sorted(set(topics) - set(TOPICS))
        if unknown or not topics:
            raise SettingsError("topics", ",".join(topics), f"a replay writes some of {', '.join(TOPICS)}")
        if speed != "max" and not 0 < speed < 1e9:
            raise SettingsError("speed", speed, "a number above 0 (1 is real time) or max")
        self.source, self.kafka = source, kafka
        self.topics = tuple(t for t in TOPICS if t in topics)
        self.state = ReplayState()
        self._pacer = None if speed == "max" else Pacer(float(speed))
        self._commit_s = MAX_COMMIT_S if speed == "max" else PACED_COMMIT_S
        self._resume, self._shift_to_now = resume, shift_to_now
        self._on_progress = on_progress
        self._stop = stop or threading.Event()
        self._full = {t: kafka.topic(t) for t in self.topics}
        self.id = xxhash.xxh3_64_hexdigest(f"{source.identity()} {kafka.prefix} {','.join(self.topics)}".encode())
        self._marker = TopicPartition(self._full[self.topics[0]], 0)
        self._batch: list[Record] = []
        self._bytes = 0
        self._hung = False
        self._opened_s = 0.0
        self._saved = Saved()

    def run(self) -> ReplayState:
        """Produces until the log ends or `stop` is set; what was produced is committed either way.

        Raises `BrokerError` (the replay can be resumed), or `ContractError` at a bad line of a strict log.
        """
        started = time.monotonic()
        name = group_name(self.kafka, f"replay-{self.id}")
        self._producer: Producer = clients.producer(
            self.kafka, name, linger_ms=20, batch_size=1 << 20, queue_buffering_max_messages=500_000
        )
        reader: Consumer | None = None
        try:
            self._retry("start", lambda: self._producer.init_transactions(30))
            reader = clients.consumer(self.kafka, name)
            self._group: Any = reader.consumer_group_metadata()
            self._load(reader)
            if not (self._resume and self._saved.done):
                self._send()
            self.state.complete = self._saved.done
            self._tell()
        except KafkaException as e:
            # a call after a fatal error says "fatal"; only ending the transaction tells which
            raise self._error(self._discard() or e.args[0]) from None
        except BaseException:
            self._discard()
            raise
        finally:
            self.state.seconds = time.monotonic() - started
            if reader is not None:
                reader.close()
        return self.state

    def _send(self) -> None:
        state, pacer, stop = self.state, self._pacer, self._stop
        after = self._saved.position
        for record in records(self.source, self.topics, after, self._saved.shift_ms):
            if pacer is not None:
                self._wait(pacer, record.ts, time.monotonic())
            if stop.is_set():
                break
            self._produce(record)
            if state.events % POLL_EVERY == 0:
                self._producer.poll(0)
                self._tell()
                if time.monotonic() - self._opened_s >= self._commit_s:
                    self._commit()
            if self._bytes >= BATCH_BYTES:
                self._commit()
        else:
            self._commit(done=True)
            return
        self._commit()

    def _wait(self, pacer: Pacer, ts: int, now: float) -> None:
        """Until the event is due; what is already out becomes readable first."""
        wait = pacer.due(ts, now)
        until = now + wait
        if self._batch and now - self._opened_s >= self._commit_s:
            self._commit()
        while wait > 0 and not self._stop.is_set():
            if self._batch:
                age = now - self._opened_s
                if age >= self._commit_s or wait >= self._commit_s:
                    self._commit()
                else:
                    self._stop.wait(min(wait, self._commit_s - age))
            else:
                self._stop.wait(min(wait, 0.2))
                self._producer.poll(0)
                self._tell()
            now = time.monotonic()
            wait = until - now

    def _produce(self, record: Record) -> None:
        if not self._batch:
            self._begin()
        state = self.state
        self._batch.append(record)
        self._bytes += len(record.value)
        try:
            self._producer.produce(self._full[record.topic], record.value, record.key)
        except BufferError:
            self._put(record)
        except KafkaException as e:
            self._send_again(e)
        state.events += 1
        state.pairs += record.pairs
        if record.ts > state.clock_ms:
            state.clock_ms = record.ts

    def _send_again(self, e: KafkaException) -> None:
        """Ends a transaction that the broker will not commit and sends its records in a new one. Raises `e` itself
        when that cannot help."""
        error = e.args[0]
        if error.fatal() or not (error.txn_requires_abort() or error.code() == KafkaError._STATE):
            raise e
        self.state.retried += 1
        if self.state.retried > MAX_RETRIED:
            raise e
        log.warning("the broker aborted a transaction (%s); sending its %d records again", e, len(self._batch))
        self._retry("abort", lambda: self._producer.abort_transaction(30))
        self._begin()
        for record in self._batch:
            self._put(record)

    def _begin(self) -> None:
        self._producer.begin_transaction()
        self._opened_s = time.monotonic()

    def _put(self, record: Record) -> None:
        producer, topic = self._producer, self._full[record.topic]
        while True:
            try:
                producer.produce(topic, record.value, record.key)
                return
            except BufferError:
                producer.poll(0.05)  # back-pressure: the queue is full until the broker has taken some

    def _commit(self, done: bool = False) -> None:
        """Records, position and counts in one transaction; sent again when the broker aborts it."""
        if not self._batch and not done:
            return
        if not self._batch:
            self._begin()
        batch = self._batch
        saved = Saved(
            batch[-1].position if batch else self._saved.position,
            self._saved.events + len(batch),
            self._saved.pairs + sum(r.pairs for r in batch),
            self._saved.shift_ms,
            done,
        )
        marker = TopicPartition(self._marker.topic, 0, saved.position, metadata=msgspec.json.encode(saved).decode())
        while True:
            try:
                self._drain()
                self._retry("offsets", lambda: self._send_offsets(marker))
                self._retry("commit", lambda: self._producer.commit_transaction(5))
                break
            except KafkaException as e:
                self._send_again(e)
        self._saved = saved
        state = self.state
        state.complete = done
        state.acknowledged += len(batch)
        state.transactions += 1
        for record in batch:
            state.by_topic[record.topic] = state.by_topic.get(record.topic, 0) + 1
        self._batch, self._bytes = [], 0
        self._tell()

    def _send_offsets(self, marker: TopicPartition) -> None:
        """librdkafka's call may never come back when the broker dies under it, whatever its timeout: it gets a thread
        and `HUNG_S`, after which the replay ends, to be resumed by a new producer."""
        failed: list[BaseException] = []

        def call() -> None:
            try:
                self._producer.send_offsets_to_transaction([marker], self._group, 20)
            except BaseException as e:
                failed.append(e)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(HUNG_S)
        if thread.is_alive():
            self._hung = True
            raise BrokerError(
                f"no answer from {self.kafka.bootstrap} for {HUNG_S:g} s, replay stopped after {self._saved.events} "
                "acknowledged events; --resume goes on there"
            )
        if failed:
            raise failed[0]

    def _drain(self) -> None:
        """Until every record of the transaction has an answer. Polled here rather than inside the commit, which does
        not come back while the broker is away."""
        deadline = time.monotonic() + GIVE_UP_S
        while len(self._producer):
            self._producer.poll(0.1)
            if time.monotonic() > deadline:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"no answer for {GIVE_UP_S:g} s"))

    def _load(self, reader: Consumer) -> None:
        """How far an earlier run came, and by how much times move."""
        marker = TopicPartition(self._marker.topic, 0)
        found: list[TopicPartition] = self._retry("progress", lambda: reader.committed([marker], timeout=30))
        saved = Saved()
        if found[0].error is None and found[0].offset >= 0 and found[0].metadata:
            saved = msgspec.json.decode(found[0].metadata, type=Saved)
        if self._resume:
            self._saved = saved
            self.state.resumed_events = saved.events
        elif saved.position and not saved.done:
            log.warning("an earlier replay of this log stopped after %d events; --resume goes on there", saved.events)
        if self._saved.position == 0 and self._shift_to_now:
            first = first_time(self.source)
            self._saved.shift_ms = 0 if first is None else min(int(time.time() * 1000), MAX_TS) - first
        self.state.shift_ms = self._saved.shift_ms

    def _retry(self, what: str, call: Callable[[], Any]) -> Any:
        """Repeats a call that librdkafka calls retriable, for `GIVE_UP_S`."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            try:
                return call()
            except KafkaException as e:
                error = e.args[0]
                passing = error.retriable() or error.code() in _PASSING
                if not passing or error.fatal() or time.monotonic() > deadline:
                    raise
                log.warning("replay: %s: %s; trying again", what, error.str())
                time.sleep(0.1)

    def _error(self, error: KafkaError) -> BrokerError:
        if error.code() in _FENCED:
            return BrokerError("another replay of this log has taken over; this one has stopped")
        done = self._saved.events
        return BrokerError(
            f"replay to {self.kafka.bootstrap} stopped after {done} acknowledged events: {error.str()}; "
            "--resume goes on there"
        )

    def _discard(self) -> KafkaError | None:
        """After an error: the open transaction ends, so that readers do not wait for its timeout. Returns why it could
        not be ended, if so."""
        if not self._batch or self._hung:
            return None
        try:
            self._producer.abort_transaction(10)
        except KafkaException as e:
            error: KafkaError = e.args[0]
            log.info("the open transaction could not be aborted: %s", error.str())
            return error
        return None

    def _tell(self) -> None:
        if self._on_progress is not None:
            progress = self.source.progress
            share = progress.done / progress.total if progress.total else 0.0
            self.state.read = 1.0 if self.state.complete else share
            self._on_progress(self.state)


def replay(
    source: EventLog,
    kafka: KafkaSettings,
    speed: Speed = "max",
    topics: Collection[str] = TOPICS,
    resume: bool = False,
    shift_to_now: bool = False,
    on_progress: Callable[[ReplayState], None] | None = None,
    stop: threading.Event | None = None,
) -> ReplayState:
    """Sends the log to its topics; see `Replay` for the guarantee and the errors.

    speed: times real time, or "max". resume: go on after the last acknowledged event of an interrupted run with the
    same log and topics; else start at the beginning (a second full run writes everything again). shift_to_now: event
    times move so that the first one is now. stop: set it (from any thread or a signal handler) to end cleanly.
    """
    return Replay(source, kafka, speed, topics, resume, shift_to_now, on_progress, stop).run()
