"""Replay: an event log into its topics, paced by event time, exactly once even when interrupted."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import xxhash
from confluent_kafka import KafkaError, KafkaException

from topics.errors import BrokerError, SettingsError
from topics.events import MAX_TS
from topics.kafka import KafkaSettings, group_name, passing
from topics.pacing import Pacer
from topics.readers import EventLog
from topics.replay_block import Block
from topics.replay_records import TOPICS, Ahead, blocks, first_time
from topics.replay_session import Hung, Saved, Session

log = logging.getLogger(__name__)

Speed = float | Literal["max"]
PACED_COMMIT_S = 0.05
"""a paced event is readable at most this much (and the commit itself) after it was due"""
MAX_COMMIT_S = 2.0
BATCH_BYTES = 64 << 20
TELL_S = 0.1
MAX_RETRIED = 100
MAX_SESSIONS = 10
"""producers that one run may use up"""
_FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)


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
    """transactions sent again: the broker aborted them, or their producer was lost"""
    seconds: float = 0.0
    complete: bool = False
    read: float = 0.0
    """share of the log that was sent, 0..1"""


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
    4. an aborted transaction is sent again from memory, unchanged;
    5. a producer that failed for good (the broker died under it) is replaced by a new one of the same id, which asks
       for the position as in 1: the last transaction is sent again only if it was not committed. A replay that has
       been fenced by another one sends nothing more.

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
        self._run = uuid.uuid4().hex[:8]
        self._sessions = 0
        self._batch: list[Block] = []
        """blocks of the open transaction"""
        self._bytes = 0
        self._opened_s = 0.0
        self._told_s = 0.0
        self._blocks: Ahead | None = None
        self._of_block = 0.0
        """how much of the block under way has been sent, 0..1"""
        self._stored = Saved()
        """what the broker holds; another run's until the first commit"""
        self._saved = Saved()
        """how far this run is committed"""

    def run(self) -> ReplayState:
        """Produces until the log ends or `stop` is set; what was produced is committed either way.

        Raises `BrokerError` (the replay can be resumed), or `ContractError` at a bad line of a strict log.
        """
        started = time.monotonic()
        self._session = self._new_session()
        try:
            self._session.open()
            self._load(self._session.position())
            if not (self._resume and self._saved.done):
                self._send()
            self.state.complete = self._saved.done
            self._tell()
        except (KafkaException, Hung) as e:
            raise self._error(e) from None
        except BaseException:
            if self._batch:
                self._session.discard()
            raise
        finally:
            self.state.seconds = time.monotonic() - started
            self._session.close()
        return self.state

    def _new_session(self) -> Session:
        self._sessions += 1
        name = group_name(self.kafka, f"replay-{self.id}")
        return Session(self.kafka, name, self._full[self.topics[0]], self._stop)

    def _load(self, stored: Saved) -> None:
        """How far an earlier run came, and by how much times move."""
        self._stored = stored
        if self._resume:
            self._saved = msgspec.structs.replace(stored)
            self.state.resumed_events = stored.events
        elif stored.position and not stored.done:
            log.warning("an earlier replay of this log stopped after %d events; --resume goes on there", stored.events)
        if self._saved.position == 0 and self._shift_to_now:
            first = first_time(self.source)
            self._saved.shift_ms = 0 if first is None else min(int(time.time() * 1000), MAX_TS) - first
        self.state.shift_ms = self._saved.shift_ms

    def _send(self) -> None:
        found = blocks(self.source, self.topics, self._saved.position, self._saved.shift_ms)
        self._blocks = Ahead(found, self.source.progress)
        for block in self._blocks:
            if self._stop.is_set():
                break
            self._of_block = 0.0
            if self._pacer is None:
                self._produce(block)
                self._of_block = 1.0
            elif not self._paced(self._pacer, block):
                break
            now = time.monotonic()
            if self._bytes >= BATCH_BYTES or now - self._opened_s >= self._commit_s:
                self._commit()
            elif now - self._told_s >= TELL_S:
                self._tell()
        else:
            self._commit(done=True)
            return
        self._commit()

    def _paced(self, pacer: Pacer, block: Block) -> bool:
        """One record after the other, each when it is due. False: asked to stop."""
        for n, record in enumerate(block):
            self._of_block = n / len(block)
            now = time.monotonic()
            if now - self._told_s >= TELL_S:
                self._tell()
            self._wait(pacer, record.ts, now)
            if self._stop.is_set():
                return False
            self._produce(Block.of([record]))
            if self._bytes >= BATCH_BYTES:
                self._commit()
        self._of_block = 1.0
        return True

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
                self._session.producer.poll(0)
                self._tell()
            now = time.monotonic()
            wait = until - now

    def _produce(self, block: Block) -> None:
        if not block:
            return
        state, batch = self.state, self._batch
        if not batch:
            self._begin()
        batch.append(block)
        total = block.total()
        state.events += len(block)
        state.pairs += total.pairs
        state.clock_ms = max(state.clock_ms, total.newest_ms)
        self._bytes += total.bytes
        try:
            self._put(block)
        except (KafkaException, Hung) as e:
            self._again(e)

    def _put(self, block: Block) -> None:
        full, session = self._full, self._session
        produce = session.producer.produce
        for topic, value, key in zip(block.topics, block.values, block.keys, strict=True):
            try:
                produce(full[topic], value, key)
            except BufferError:
                session.put(full[topic], value, key)  # back-pressure
        session.producer.poll(0)

    def _begin(self) -> None:
        self._opened_s = time.monotonic()
        try:
            self._session.begin()
        except KafkaException as e:
            self._again(e)

    def _commit(self, done: bool = False) -> None:
        """Records, position and counts in one transaction; sent again until it is committed."""
        batch = self._batch
        if not batch and not done:
            return
        if not batch:
            self._begin()
        events = sum(map(len, batch))
        saved = Saved(
            batch[-1].positions[-1] if batch else self._saved.position,
            self._saved.events + events,
            self._saved.pairs + sum(block.total().pairs for block in batch),
            self._saved.shift_ms,
            done,
            self._run,
        )
        while True:
            try:
                self._session.commit(saved, self._blocks.more if self._blocks else lambda: False)
                break
            except (KafkaException, Hung) as e:
                if self._again(e, saved):
                    break
        self._saved = self._stored = saved
        state = self.state
        state.complete = done
        state.acknowledged += events
        state.transactions += 1
        for block in batch:
            for topic, n in block.total().by_topic.items():
                state.by_topic[topic] = state.by_topic.get(topic, 0) + n
        self._batch, self._bytes = [], 0
        self._tell()

    def _again(self, e: KafkaException | Hung, saved: Saved | None = None) -> bool:
        """Sends the records of a failed transaction in a new one; with a new producer when this one is lost.

        True: there was no need, since the transaction that was to commit `saved` is committed. Raises `e` when trying
        again cannot help, or has not helped.
        """
        while True:
            self.state.retried += 1
            if self.state.retried > MAX_RETRIED:
                raise e
            try:
                if isinstance(e, KafkaException) and _abortable(e):
                    log.warning(
                        "the broker aborted a transaction (%s); sending its %d records again",
                        e,
                        sum(map(len, self._batch)),
                    )
                    self._session.abort()
                elif self._replace(e, saved):
                    return True
                self._session.begin()
                for block in self._batch:
                    self._put(block)
                return False
            except (KafkaException, Hung) as another:
                e = another

    def _replace(self, e: KafkaException | Hung, saved: Saved | None) -> bool:
        """A new producer. True: the old one had committed `saved`. Raises `e` when there may not be another one."""
        if isinstance(e, KafkaException):
            # a call after a fatal error says "fatal"; only ending the transaction tells which
            why = self._session.discard() or e.args[0]
            if why.code() in _FENCED or e.args[0].code() in _FENCED:
                raise KafkaException(why)
        if self._stop.is_set() or self._sessions >= MAX_SESSIONS:
            raise e
        log.warning("%s; going on with a new producer after %d acknowledged events", _text(e), self._saved.events)
        self._session.close()
        self._session = self._new_session()
        try:
            self._session.open()
            found = self._session.position()
        except KafkaException as another:
            if passing(another.args[0]):  # it was repeated for long enough
                raise self._error(another) from None
            raise
        if found == saved:
            return True
        if found != self._stored:
            raise BrokerError(_TAKEN_OVER)
        return False

    def _error(self, e: KafkaException | Hung) -> BrokerError:
        why = self._session.discard() if self._batch else None
        code = None if isinstance(e, Hung) else e.args[0].code()
        if code in _FENCED or (why is not None and why.code() in _FENCED):
            return BrokerError(_TAKEN_OVER)
        done = self._saved.events
        return BrokerError(
            f"replay to {self.kafka.bootstrap} stopped after {done} acknowledged events: {_text(e)}; "
            "--resume goes on there"
        )

    def _tell(self) -> None:
        self._told_s = time.monotonic()
        if self._on_progress is not None:
            share = self._blocks.share(self._of_block) if self._blocks is not None else 0.0
            self.state.read = 1.0 if self.state.complete else share
            self._on_progress(self.state)


_TAKEN_OVER = "another replay of this log has taken over; this one has stopped"


def _abortable(e: KafkaException) -> bool:
    error = e.args[0]
    return not error.fatal() and (error.txn_requires_abort() or error.code() == KafkaError._STATE)


def _text(e: KafkaException | Hung) -> str:
    return str(e) if isinstance(e, Hung) else str(e.args[0].str())


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
