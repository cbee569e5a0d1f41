"""The transactional loop: the one place that talks to Kafka while working.

Four threads, so that polling never waits for a model and a model not for a transaction: the *poller* (the thread that
calls `Loop.run`) owns the consumer, the *follower* reads changelogs and the catalogue, the *worker* runs the step,
and `Commits` has one for the transactions. The first two meet the worker in one mailbox. When too many polled records
wait in it the poller pauses its partitions and goes on polling.

Each assignment of a partition has a generation. A revoke or loss ends it: work of an ended generation is dropped and
never committed; the broker's own check of the consumer group's generation in the transaction backs this up.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from streams import failpoints
from streams.commits import Commits
from streams.deadline import Deadline
from streams.follower import Followed, Follower
from streams.settings import Settings
from streams.step import Record, Step, Work
from streams.transactions import Committer, Dropped, identity_lost
from topics.contracts import CONTRACTS
from topics.errors import BrokerError, ContractError, IdentityLost, SolarisError
from topics.kafka import consumer, group_name

log = logging.getLogger(__name__)

POLL_S = 0.05
HUNG_S = 15.0
"""a call of the client library is given 10 s by its caller; one that takes longer than this does not come back"""
MAX_WAITING_BYTES = 128 << 20
MAX_STEP_BYTES = 32 << 20
"""bounds beside those in records: a record may have 8 MiB"""
MAX_FOLLOWED_AT_ONCE = 16
"""hand-overs of the follower taken before work goes on"""
GATHER_S = 0.004
"""how long less than a batch that the worker cannot take yet is gathered, to be handed over together: waking two
threads for each record costs the core more than it brings"""
HAND_OVER_S = 0.002
"""how long the worker, when it can take them, waits for records that are being gathered"""
_FIRST_LOOK_S = 1.0
_NEXT_LOOK_S = 0.2
_LOOK_AGAIN_S = 0.5
"""how long committed offsets are waited for at an assignment and later, and how often: a dead member's open transaction
may keep them back"""
_TRUNCATED_S = 5.0
"""how long a log that ends before what is committed is not believed"""
ROOM_S = 0.5
"""how long a full queue is waited for before its partitions are paused: after pause and resume the client may take a
second to fetch again"""


@dataclass(frozen=True, slots=True)
class _Polled:
    records: list[Record]
    generations: dict[int, int]
    size: int
    """bytes of the values"""


@dataclass(frozen=True, slots=True)
class _Opened:
    partition: int
    generation: int
    metadata: str | None


@dataclass(frozen=True, slots=True)
class _Closed:
    partitions: list[int]
    done: threading.Event


@dataclass(frozen=True, slots=True)
class _Committed:
    """The transaction in flight has ended: what waited for it may go on."""


def _place(tp: TopicPartition) -> TopicPartition:
    """Without the metadata."""
    return TopicPartition(tp.topic, tp.partition, tp.offset)


_COMMITTED = _Committed()
_Mail = _Polled | _Opened | _Closed | _Committed | Followed | None


class Loop:
    """Runs one `Step` until `stop` is called. `run` returns normally after a clean stop and raises on anything that
    this process cannot go on from: lost identity (fenced), a failing core, a contract broken under it."""

    def __init__(self, step: Step, settings: Settings, instance: str = "", clock: Callable[[], float] = time.time):
        self.step, self.settings, self.instance = step, settings, instance
        self.counters: Counter[str] = Counter()
        self.heartbeat = time.monotonic()
        """last sign of life of the worker"""
        self._clock = clock
        self._mail: SimpleQueue[_Mail] = SimpleQueue()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._owned: dict[int, int] = {}
        self._leaving: set[int] = set()
        """being revoked: the batch in flight may finish, nothing new is begun"""
        self._next: dict[int, int] = {}
        """partition -> offset after the last record polled, or the committed one"""
        self._open: set[int] = set()
        self._ready: set[int] = set()
        self._restoring: dict[int, float] = {}
        """partition -> when its restore began"""
        self._behind: dict[int, set[str]] = {}
        """partition -> followed topics not yet read to their end"""
        self._unheard: set[tuple[str, int]] = set()
        """partitions of broadcasts not yet read to their end"""
        self._to_resume: SimpleQueue[int] = SimpleQueue()
        self._waiting = 0
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._generation = 0
        self._unsettled: set[int] = set()
        """assigned, but what is committed of them is not known yet"""
        self._look_again = self._sure = self._settle_by = Deadline(0.0)
        self._member: str | None = None
        """the name under which the group gave us what we hold"""
        self._stale: set[int] = set()
        """held under a name that the group has forgotten; `_stale_since_s` says since when"""
        self._stale_since_s = 0.0
        self._idle = threading.Event()
        """set while the worker has nothing to do but to wait for records"""
        self._gathering = False
        """the poller has records and waits for more, since the worker could not take them yet"""
        self._room = threading.Event()
        """set when the worker has taken from the queue"""
        self._held_back = False
        self._joined = False
        self._items_left: set[int] = set()
        self._postponed: list[_Opened] = []
        self._topic = settings.kafka.topic(step.input_topic)
        self._follows = {settings.kafka.topic(t): t for t in step.follows}
        self._broadcasts = {settings.kafka.topic(t): t for t in step.broadcasts}
        self._items_topic = settings.kafka.topic("items")
        self._consumer: Consumer = self._make_consumer()
        role = step.role.partition("-")[0]
        writes = [settings.kafka.topic(c.name) for c in CONTRACTS if c.writes == role or c.name == "dlq"]
        items = [self._items_topic] if step.reads_items else []
        watched = dict.fromkeys([self._topic, *self._follows, *self._broadcasts, *items, *writes])
        self._follower = Follower(settings.kafka, step.role, self._mail.put, tuple(watched), (self._items_topic,))
        self._worker = threading.Thread(target=self._work, name=f"{step.role}-worker", daemon=True)
        self._group_metadata: Any = None
        self._metadata_fresh = threading.Event()
        self._to_commit: SimpleQueue[list[TopicPartition]] = SimpleQueue()
        self._committer = Committer(step, settings, self, instance, self.counters, self._interrupted)
        self._commits = Commits(step.role, self._commit, lambda: self._mail.put(_COMMITTED))

    # -- state seen from outside -------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """In the group, catalogue loaded, and every partition held is restored."""
        return self._joined and not self._items_left and set(self._owned) <= self._ready

    @property
    def hung(self) -> bool:
        """A call of the client library has not come back for `HUNG_S`: seen when a broker dies under
        `send_offsets_to_transaction`. Only ending the process helps; its successor ends the transaction."""
        return self._committer.in_call_s > HUNG_S

    @property
    def partitions(self) -> list[int]:
        return sorted(self._owned)

    def stop(self) -> None:
        self._stop.set()

    def totals(self) -> dict[str, int]:
        while True:
            try:
                return {**self.step.totals(), **{f"loop_{k}": v for k, v in self.counters.items()}}
            except RuntimeError as e:  # the worker counted something for the first time: once more
                if "changed size" not in str(e):
                    raise

    # -- the worker's view of the group (`transactions.Membership`) ----------------------------------------------------
    # The client serialises calls on one consumer, and the poller is always in one: the worker asks through it.

    def group_metadata(self, refresh: bool) -> Any:
        if refresh:
            self._metadata_fresh.clear()
        while not self._metadata_fresh.wait(0.2):
            if self._stop.is_set() and not self._leaving:
                raise BrokerError(f"{self.step.role}: stopped before the batch was committed")
        return self._group_metadata

    def commit_soon(self, positions: list[TopicPartition]) -> None:
        self._to_commit.put(positions)

    # -- poller ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        worker = self._worker
        try:
            self._committer.start()
            self._load_whole()
            self._follower.start()
            self._commits.start()
            worker.start()
            self._consumer.subscribe(
                [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
            while not self._stop.is_set():
                self._poll()
        finally:
            self._shut_down(worker)
        failure = self._follower.error or self._failure  # the worker's may be that it was stopped for the follower's
        if isinstance(failure, KafkaException):
            error = failure.args[0]
            kind = IdentityLost if identity_lost(error) else BrokerError
            raise kind(f"{self.step.role}: {error.str()}") from failure
        if failure is not None:
            raise failure

    def _poll(self) -> None:
        self._settle()
        self._resume_restored()
        self._serve_worker()
        if self._stale and time.monotonic() - self._stale_since_s > self.settings.loop.session_timeout_ms / 1000:
            raise self._renamed()
        if not self._held_back and self._full and not self._wait_for_room():
            self._hold_back()
        held = dict(self._owned)  # a revoke or an assignment is served inside the calls below
        first = self._consumer.poll(POLL_S)
        if self._follower.error is not None:
            self._stop.set()
        if first is None:
            return
        loop = self.settings.loop
        if 0 < self._waiting < loop.batch_records and not self._idle.is_set():
            self._gathering = True
            self._idle.wait(GATHER_S)
        messages = [first, *self._consumer.consume(loop.batch_records - 1, 0)] if loop.batch_records > 1 else [first]
        now_ms = int(self._clock() * 1000)
        records = [self._record(m, now_ms) for m in messages if self._usable(m)]
        if not records:
            self._gathering = False
            return
        size = sum(len(r.value or b"") for r in records)
        held = {p: generation for p, generation in held.items() if self._owned.get(p) == generation}
        for r in records:
            if r.partition in held and r.partition in self._ready:
                self._next[r.partition] = r.offset + 1
        with self._lock:
            self._waiting += len(records)
            self._waiting_bytes += size
        self._mail.put(_Polled(records, held, size))
        self._gathering = False

    def _serve_worker(self, synchronous: bool = False) -> None:
        if not self._metadata_fresh.is_set():
            self._group_metadata = self._consumer.consumer_group_metadata()
            self._check_name()  # after it: a name that still stands now stood then
            self._metadata_fresh.set()
        newest: dict[int, TopicPartition] = {}
        while True:
            try:
                newest.update((tp.partition, tp) for tp in self._to_commit.get_nowait())
            except Empty:
                break
        if newest:
            self._consumer.commit(offsets=list(newest.values()), asynchronous=not synchronous)

    def _check_name(self) -> None:
        """What we hold is ours under the name that the group knew us by. A process that was frozen may join again
        under a new one and hear only later, or not at all, that its partitions were another's meanwhile; the broker
        would take their offsets from the new name, so nothing is committed for them from here on."""
        if self._owned and self._consumer.memberid() != self._member:
            log.warning("%s: the group knows this process by another name now; %s may be another's",
                        self.step.role, sorted(self._owned))  # fmt: skip
            self.counters["partitions_lost"] += len(self._owned)
            self._stale.update(self._owned)
            self._owned.clear()
            self._unsettled.clear()
            self._stale_since_s = time.monotonic()

    def _renamed(self) -> IdentityLost:
        return IdentityLost(
            f"{self.step.role}: partitions {sorted(self._stale)} of {self._topic} were kept although the group had "
            "forgotten this member and may have given them to another; they are to be read from what is committed"
        )

    def _record(self, m: Message, now_ms: int) -> Record:
        key = m.key()
        value = m.value()
        offset, partition = m.offset(), m.partition()
        kind, appended_ms = m.timestamp()
        assert offset is not None
        assert partition is not None
        return Record(
            self.step.input_topic, partition, offset, key if isinstance(key, bytes) else None,
            value if isinstance(value, bytes) else None, now_ms, tuple(m.headers() or ()),
            appended_ms if kind == TIMESTAMP_LOG_APPEND_TIME else -1,
        )  # fmt: skip

    def _usable(self, m: Message) -> bool:
        error = m.error()
        if error is None:
            return True
        if error.fatal() or error.code() in (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID):
            raise IdentityLost(f"{self.step.role}: {self._topic}: {error.str()}") from None
        if error.code() in (
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            KafkaError._UNKNOWN_TOPIC,
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
        ):
            raise BrokerError(f"{self.step.role}: {self._topic}: {error.str()}") from None
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION):
            # The next assignment says how much is gone, and goes on with what is left.
            raise IdentityLost(f"{self.step.role}: {self._topic} {m.partition()}: {error.str()}") from None
        self.counters["poll_errors"] += 1
        log.warning("%s: %s", self.step.role, error)
        return False

    @property
    def _full(self) -> bool:
        loop = self.settings.loop
        return self._waiting >= loop.batch_records * loop.queue_batches or self._waiting_bytes >= MAX_WAITING_BYTES

    def _wait_for_room(self) -> bool:
        """Whether the worker takes something from the full queue within `ROOM_S`."""
        deadline = Deadline(ROOM_S)
        while self._full:
            if deadline.over or self._stop.is_set():
                return False
            self._serve_worker()
            self._room.wait(0.005)
            self._room.clear()
        return True

    def _hold_back(self) -> None:
        held = [TopicPartition(self._topic, p) for p in self._owned if p in self._ready]
        self._consumer.pause(held)
        self._held_back = True
        self.counters["pauses"] += 1

    def _resume_restored(self) -> None:
        resume = []
        while True:
            try:
                resume.append(self._to_resume.get_nowait())
            except Empty:
                break
        self._ready.update(p for p in resume if p in self._owned)
        loop = self.settings.loop
        if self._held_back:
            half = loop.batch_records * loop.queue_batches // 2
            if self._waiting > half or self._waiting_bytes > MAX_WAITING_BYTES // 2:
                return
            self._held_back = False
            resume = [p for p in self._owned if p in self._ready]
        resume = [p for p in resume if p in self._owned]
        if resume:
            self._resume(resume)

    def _resume(self, partitions: list[int]) -> None:
        """... and seeks to where each one is: by itself the client fetches a resumed partition only at its next look,
        up to a second later."""
        self._consumer.resume([TopicPartition(self._topic, p) for p in partitions])
        for p in partitions:
            with contextlib.suppress(KafkaException):  # then it fetches in its own time
                self._consumer.seek(TopicPartition(self._topic, p, self._next.get(p, OFFSET_BEGINNING)))

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._joined = True
        self._metadata_fresh.clear()
        self._check_name()
        if self._stale:
            raise self._renamed()
        self._member = consumer.memberid()
        if not partitions:
            return
        failpoints.hit("in_assign")
        n = self.settings.kafka.partitions
        if any(t.partition >= n for t in partitions):
            raise ContractError(
                f"{self._topic} was given partitions beyond the {n} of kafka.partitions while {self.step.role} ran: "
                "users that move with them are separated from their state. Give all topics of the flow the same number "
                "(`solaris topics create --alter`), set kafka.partitions to it and start the roles again"
            )
        for tp in partitions:
            self._generation += 1
            self._owned[tp.partition] = self._generation
            self._next.pop(tp.partition, None)
        log.info("%s: assigned %s", self.step.role, sorted(t.partition for t in partitions))
        committed = self._committed(partitions, _FIRST_LOOK_S, sure=False)
        if committed is not None:
            consumer.incremental_assign([_place(tp) for tp in committed])
            consumer.pause(partitions)  # until the worker has opened and restored them
            self._begin(committed)
            return
        # What is held already is not kept waiting for what comes.
        consumer.incremental_assign([TopicPartition(t.topic, t.partition, OFFSET_BEGINNING) for t in partitions])
        consumer.pause(partitions)
        self._unsettled.update(t.partition for t in partitions)
        self._look_again, self._sure = Deadline(_LOOK_AGAIN_S), Deadline(_TRUNCATED_S)
        self._settle_by = Deadline(self.settings.loop.transaction_timeout_ms / 1000 + 30)

    def _begin(self, committed: list[TopicPartition]) -> None:
        """The worker opens these partitions, from their committed offsets and metadata."""
        for tp in committed:
            self._next[tp.partition] = tp.offset
            self._mail.put(_Opened(tp.partition, self._owned[tp.partition], tp.metadata))

    def _settle(self) -> None:
        """Asks again for the offsets that were not known when their partitions were assigned."""
        if not self._unsettled or not self._look_again.over:
            return
        unsettled = [TopicPartition(self._topic, p) for p in sorted(self._unsettled)]
        committed = self._committed(unsettled, _NEXT_LOOK_S, self._sure.over)
        self._look_again = Deadline(_LOOK_AGAIN_S)
        if committed is None:
            if self._settle_by.over:
                raise BrokerError(
                    f"{self.step.role}: the broker did not tell the committed offsets of {self._topic} "
                    f"{sorted(self._unsettled)} for {self.settings.loop.transaction_timeout_ms / 1000 + 30:g} s"
                )
            return
        for tp in committed:
            try:
                self._consumer.seek(_place(tp))
            except KafkaException:  # not yet begun to read, though paused
                self._consumer.incremental_unassign([_place(tp)])
                self._consumer.incremental_assign([_place(tp)])
                self._consumer.pause([_place(tp)])
        self._unsettled.clear()
        self._begin(committed)

    def _committed(self, partitions: list[TopicPartition], timeout_s: float, sure: bool) -> list[TopicPartition] | None:
        """Where to go on, with the metadata of what is committed. None: not known yet. A former owner's open
        transaction makes the broker hold offsets back until it ends, at the latest by its timeout; and a log that ends
        before what is committed is believed only when `sure`: a broker that is no longer the leader may say so."""
        try:
            found = self._consumer.committed(partitions, timeout=timeout_s)
            for tp in found:
                if tp.error is not None:
                    raise KafkaException(tp.error)
            ends = [self._consumer.get_watermark_offsets(tp, timeout=max(1.0, timeout_s)) for tp in found]
        except KafkaException as e:
            self.counters["broker_retries"] += 1
            log.warning("%s: committed offsets: %s; trying again", self.step.role, e.args[0])
            return None
        if not sure and any(tp.offset > end for tp, (_, end) in zip(found, ends, strict=True)):
            return None
        for tp, (first, end) in zip(found, ends, strict=True):
            if 0 <= tp.offset < first:
                self.counters["input_deleted"] += first - tp.offset
                log.error(
                    "%s: %s %d: %d records were deleted by the topic's retention before they were read; going on at "
                    "offset %d. Keep the topic longer (kafka.retention_ms.%s) or add processes",
                    self.step.role, self._topic, tp.partition, first - tp.offset, first, self.step.input_topic,
                )  # fmt: skip
            elif tp.offset > end:
                self.counters["input_truncated"] += tp.offset - end
                log.error(
                    "%s: %s %d: its broker lost records: it ends at %d, before the committed offset %d; going on at "
                    "its end. More copies would have kept them (kafka.replication)",
                    self.step.role, self._topic, tp.partition, end, tp.offset,
                )  # fmt: skip
            tp.offset = min(max(first, tp.offset), end)
        return found

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Ends their generations, lets the worker finish or drop its batch inside the deadline, closes the stores."""
        self._check_name()
        self._give_up(partitions, "revoked")
        consumer.incremental_unassign(partitions)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.counters["partitions_lost"] += len(partitions)
        self._give_up(partitions, "lost")
        consumer.incremental_unassign(partitions)

    def _give_up(self, partitions: list[TopicPartition], why: str) -> None:
        failpoints.hit("in_revoke")
        deadline = Deadline(self.settings.loop.shutdown_deadline_s)
        numbers = [t.partition for t in partitions]
        if why == "lost":
            for p in numbers:
                self._owned.pop(p, None)
        self._leaving.update(numbers)
        done = threading.Event()
        self._mail.put(_Closed(numbers, done))
        finished = False
        while not finished and self._worker.is_alive() and not deadline.over:
            finished = done.wait(deadline.left(0.02))
            self._serve_worker()
        finished = finished or not self._worker.is_alive()
        if why == "revoked":
            with contextlib.suppress(KafkaException):  # at worst these records are done again, as at_least_once says
                self._serve_worker(synchronous=True)
        for p in numbers:
            self._owned.pop(p, None)
            self._next.pop(p, None)
            self._ready.discard(p)
            self._leaving.discard(p)
            self._stale.discard(p)
            self._unsettled.discard(p)
        if not finished:
            self.counters["revoke_deadline_missed"] += 1
            log.error("%s: batch not finished %ss after partitions %s were %s; it will not be committed",
                      self.step.role, self.settings.loop.shutdown_deadline_s, numbers, why)  # fmt: skip
        log.info("%s: %s %s", self.step.role, why, sorted(numbers))

    def _shut_down(self, worker: threading.Thread) -> None:
        self._stop.set()
        deadline = Deadline(self.settings.loop.shutdown_deadline_s)
        # Closing leaves the group through `_on_revoke`, for which the worker must still be there.
        with contextlib.suppress(KafkaException, RuntimeError):
            if worker.is_alive():
                self._consumer.close()
        self._mail.put(None)
        if worker.is_alive():
            worker.join(deadline.left() + 1.0)
        with contextlib.suppress(KafkaException, RuntimeError):
            self._consumer.close()
        self._follower.stop(deadline.left() + 1.0)
        self._committer.stop(deadline)
        if worker.is_alive():
            log.error("%s: the worker did not end inside the deadline; its batch is not committed", self.step.role)

    def _make_consumer(self) -> Consumer:
        loop = self.settings.loop
        properties: dict[str, Any] = {
            "auto_offset_reset": "error",
            "partition_assignment_strategy": "cooperative-sticky",
            "session_timeout_ms": loop.session_timeout_ms,
            "heartbeat_interval_ms": max(300, loop.session_timeout_ms // 5),
            "max_poll_interval_ms": max(300_000, loop.session_timeout_ms),
        }
        if self.instance:
            properties["group_instance_id"] = f"{self.step.role}-{self.instance}"
        return consumer(self.settings.kafka, group_name(self.settings.kafka, self.step.role), **properties)

    def _load_whole(self) -> None:
        """Follows the catalogue and the broadcasts from their beginning; work starts when the catalogue's present end
        is reached."""
        if self.step.reads_items:
            self._items_left = set(range(self._follower.partitions(self._items_topic)))
        self._unheard = {(t, p) for t in self._broadcasts for p in range(self._follower.partitions(t))}
        for topic, p in (*((self._items_topic, p) for p in sorted(self._items_left)), *sorted(self._unheard)):
            self._follower.add(topic, p, None, 0)

    # -- worker ------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                self.heartbeat = time.monotonic()
                if not self._turn():
                    return
        except BaseException as e:
            self._failure = e
            if not isinstance(e, SolarisError | KafkaException):
                log.exception("%s: worker stopped", self.step.role)
        finally:
            self._stop.set()
            self._commits.stop()
            self._close_all()

    def _turn(self) -> bool:
        """Takes what is in the mailbox, in the order: revokes, changelog, assignments, work. False: time to end."""
        self._begin_unrestored()
        self._commits.check()
        if not self._commits.busy:
            self._idle.set()
        try:
            mail = self._mail.get(timeout=0.5)
        except Empty:
            self.step.idle()
            return True
        polled: list[_Polled] = []
        records = size = followed = 0
        linger = Deadline(self.step.linger_s)
        while True:
            if mail is None:
                return False
            if isinstance(mail, _Polled):
                polled.append(mail)
                records += len(mail.records)
                size += mail.size
            elif isinstance(mail, Followed):
                followed += 1
                self._take_followed(mail)
            elif isinstance(mail, _Opened):
                self._take_opened(mail)
            elif isinstance(mail, _Closed):
                self._take_closed(mail)
            enough = records >= self.settings.loop.batch_records or size >= MAX_STEP_BYTES
            if enough or followed >= MAX_FOLLOWED_AT_ONCE:
                break
            wait = 0.0
            if polled and self._commits.busy:
                wait = 0.5  # a few records gain nothing by being first in the queue for the next transaction
            elif polled:
                self._idle.set()
                wait = 0.0 if self.step.enough(records, size) else linger.left()
                if self._gathering:
                    wait = max(wait, HAND_OVER_S)
                if self.step.pure:
                    wait = max(wait, self._committer.rest_s)
            try:
                mail = self._mail.get(timeout=wait) if wait > 0 else self._mail.get_nowait()
            except Empty:
                break
        if polled:
            self._idle.clear()
        self._run_step(polled)
        self.step.idle()
        return True

    def _begin_unrestored(self) -> None:
        """A restore that takes too long does not hold up work for ever; the step knows that it still goes on."""
        limit = self.step.restore_deadline_s
        if limit > 0:
            for p, since in self._restoring.items():
                if p not in self._ready and time.monotonic() - since > limit:
                    log.warning("%s: partition %d works while its restore goes on", self.step.role, p)
                    self._to_resume.put(p)

    def _take_opened(self, mail: _Opened) -> None:
        if self._items_left:
            self._postponed.append(mail)
            return
        p = mail.partition
        if self._owned.get(p) != mail.generation:
            return
        bounds = {name: self._follower.bounds(topic, p) for topic, name in self._follows.items()}
        starts = self.step.open(p, mail.metadata, bounds)
        self._open.add(p)
        self._restoring[p] = time.monotonic()
        for topic, name in self._follows.items():
            self._behind.setdefault(p, set()).add(topic)
            self._follower.add(topic, p, starts[name], mail.generation)
        self._resume_if_restored()

    def _take_followed(self, mail: Followed) -> None:
        try:
            if mail.topic == self._items_topic:
                if mail.values:
                    self.step.items(mail.keys, mail.values)
                if mail.caught_up and mail.partition in self._items_left:
                    self._items_left.discard(mail.partition)
                    if not self._items_left:
                        postponed, self._postponed = self._postponed, []
                        for opened in postponed:
                            self._take_opened(opened)
            elif (broadcast := self._broadcasts.get(mail.topic)) is not None:
                self.step.hear(broadcast, mail.partition, mail.offsets, mail.values, mail.next_offset)
                if mail.caught_up and (mail.topic, mail.partition) in self._unheard:
                    self._unheard.discard((mail.topic, mail.partition))
                    if not self._unheard:
                        self.step.heard()
                        self._resume_if_restored()
            elif mail.partition in self._open and self._owned.get(mail.partition) == mail.generation:
                failpoints.hit("in_restore")
                name = self._follows[mail.topic]
                self.step.follow(name, mail.partition, mail.offsets, mail.values, mail.next_offset)
                behind = self._behind.get(mail.partition, set())
                if mail.caught_up and mail.topic in behind:
                    behind.discard(mail.topic)
                    if not behind:
                        self.step.restored(mail.partition)
                        self._resume_if_restored()
        finally:
            mail.done()

    def _resume_if_restored(self) -> None:
        """Lets work begin on the partitions of which nothing is left to read."""
        if self._unheard:
            return
        for p in [p for p in self._restoring if not self._behind.get(p)]:
            del self._restoring[p]
            self._to_resume.put(p)

    def _take_closed(self, mail: _Closed) -> None:
        self._postponed = [o for o in self._postponed if o.partition not in mail.partitions]
        self._commits.drain()
        for p in mail.partitions:
            self._close(p)
        mail.done.set()

    def _close(self, partition: int) -> None:
        if partition in self._open:
            self._open.discard(partition)
            self._restoring.pop(partition, None)
            self._behind.pop(partition, None)
            for topic in self._follows:
                self._follower.remove(topic, partition)
            self.step.close(partition)

    def _close_all(self) -> None:
        for p in list(self._open):
            with contextlib.suppress(SolarisError, KafkaException):
                self._close(p)
        while True:  # a revoke that waits must not wait for a worker that is gone
            try:
                mail = self._mail.get_nowait()
            except Empty:
                return
            if isinstance(mail, _Closed):
                mail.done.set()
            elif isinstance(mail, Followed):
                mail.done()

    def _run_step(self, polled: Sequence[_Polled]) -> None:
        """One step of the guarantee. In this order, so that a crash anywhere repeats or finishes the step:

        1. take the polled records whose assignment still stands;
        2. decode them, run the core (inside `Step.run`; what is unreadable comes back as `Dead`);
        3. begin a transaction, produce results and DLQ records, send the offsets, commit;
        4. apply to the local store what was produced to its changelog, with the offsets it got.

        With ``at_least_once`` 3 is: produce, wait for the acknowledgements, commit the offsets. 3 and 4 of a step that
        is `pure` go on beside the next one's 1 and 2 (`Commits`).

        A step whose core has a batch size of its own (`Step.parts`) does 2 to 4 part by part.
        """
        if not polled:
            return
        taken = sum(len(m.records) for m in polled)
        try:
            records = []
            for m in polled:
                standing = self._standing(m.generations)
                records += [r for r in m.records if r.partition in standing]
            self._count_dropped(taken - len(records))
            owned = dict(self._owned)
            held = {p: owned[p] for p in {r.partition for r in records} if p in owned}
            for part in self.step.parts(records) if records else ():
                if self._stop.is_set() and not self._leaving:
                    return  # what is left was not committed: its next owner does it
                standing = self._standing(held)
                left = [r for r in part if r.partition in standing]
                self._count_dropped(len(part) - len(left))
                if left:
                    self.heartbeat = time.monotonic()
                    result = self.step.run(left)
                    failpoints.hit("after_core")
                    work = Work.of(left, result, held, self.step.metadata)
                    if self.step.pure:
                        self._commits.put(work)
                    else:
                        self._commit(work)
        finally:
            with self._lock:
                self._waiting -= taken
                self._waiting_bytes -= sum(m.size for m in polled)
            self._room.set()

    def _commit(self, work: Work) -> None:
        try:
            records, dead = self._committer.commit(work, lambda p: self._owned.get(p) == work.generations[p])
        except Dropped as dropped:
            self._count_dropped(dropped.records)
            return
        self._count_dropped(work.records - records)
        self.counters["steps"] += 1
        self.counters["records"] += records
        self.counters["dead"] += dead
        failpoints.hit("after_apply")

    def _count_dropped(self, records: int) -> None:
        if records:
            with self._lock:
                self.counters["dropped_generation"] += records

    def _standing(self, generations: dict[int, int]) -> set[int]:
        """Those of these partitions that are ours by the same assignment still, opened and not about to be given up."""
        return {
            p for p, generation in generations.items()
            if self._owned.get(p) == generation and p in self._open and p not in self._leaving
        }  # fmt: skip

    def _interrupted(self) -> bool:
        """Whether a broker call that keeps failing should be given up: a stop was asked for. Asked again and again
        while the broker is away, which is a sign of life."""
        self.heartbeat = time.monotonic()
        return self._stop.is_set()
