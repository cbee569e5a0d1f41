"""Step 3 and 4 of the loop: results, dead letters and offsets in one transaction, then the local store.

A role has two transactional identities and uses them by turns. A transaction that begins before the last one's markers
are written is refused once and tried again by the client 20 ms later; under the other identity it is not. One begins
when the last one's commit has been answered, so records and offsets reach the broker's logs in the order of the
batches: readers of committed records see them in that order, and of a group's offsets the one that came to the log last
stands, whichever marker comes first.

Errors sort into three kinds: *retriable* ones are repeated with back-off; *abortable* ones abort the transaction and
repeat it with what is still ours; *fatal* ones (another process has taken this identity) stop the process.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import get_ident
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from streams import failpoints
from streams.deadline import Deadline
from streams.settings import Settings
from streams.step import Output, Record, Step, Work
from topics.dlq import attempt_of, dead_letter
from topics.errors import BrokerError, IdentityLost
from topics.events import Rejected
from topics.kafka import passing, producer

log = logging.getLogger(__name__)

_CALL_S = 10.0
_IDENTITIES = 2
_MARKERS_S = (0.001, 0.004, 0.008)
"""least, first and most that is waited after a transaction before the next one of the same identity begins"""
_REST = 2.0
_MAX_REST_S = 0.04
"""a few records begin no sooner after a commit than so many times what the last ones took, at most so long"""
_QUICK_S = 0.012
"""a transaction that takes no longer asks for no rest: its markers are waited for anyway"""
_REFUSED_ONCE_S = 0.02
"""a flush of `_FEW` records or less that takes as long was most likely refused once and tried again by the client"""
_FEW = 64
_BACK_OFF_S = (0.02, 0.1, 0.5, 1.0, 2.0)
# Room for the record's own overhead under the topic's and the producer's limit of 8 MiB.
_MAX_VALUE_BYTES = (8 << 20) - 65_536
_LOST = (
    KafkaError._FATAL, KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING, KafkaError.INVALID_TXN_STATE,
)  # fmt: skip
_REFUSED_BY_SIZE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD)


class Dropped(Exception):
    def __init__(self, records: int) -> None:
        super().__init__(f"{records} records dropped: their partitions are no longer ours")
        self.records = records


class Membership(Protocol):
    """The loop's place in its consumer group, as the worker may see it."""

    def group_metadata(self, refresh: bool) -> Any:
        """For `send_offsets_to_transaction`; `refresh` asks for what the group is now."""
        ...

    def commit_soon(self, positions: list[TopicPartition]) -> None:
        """Commits outside a transaction, in order and before a revoke ends."""
        ...


class Committer:
    def __init__(
        self,
        step: Step,
        settings: Settings,
        membership: Membership,
        instance: str,
        counters: Counter[str],
        interrupted: Callable[[], bool],
    ) -> None:
        self._step, self._kafka, self._loop = step, settings.kafka, settings.loop
        self._membership, self._counters, self._interrupted = membership, counters, interrupted
        self._exactly_once = settings.loop.guarantee == "exactly_once"
        self._producers: list[Producer] = []
        self._turn = 0
        self._calls: dict[int, float] = {}
        """thread -> when its present call of the client library began"""
        self._committed_s = float("-inf")
        self._ended_s = [float("-inf")] * _IDENTITIES
        """when the last transaction of each identity was committed"""
        self._took_s = 0.0
        """seconds that a commit takes, smoothed"""
        self._markers_s = _MARKERS_S[1]
        name = f"{settings.kafka.prefix}{step.role}-{instance}"
        self._ids: list[str | None] = [name, *(f"{name}+{k}" for k in range(1, _IDENTITIES))]
        if not self._exactly_once:
            self._ids = [None]
        self._input = settings.kafka.topic(step.input_topic)

    def start(self) -> None:
        """Connects; with exactly-once takes over the transactional identities, which fences a former holder."""
        timeout_ms = self._loop.transaction_timeout_ms
        extra: dict[str, Any] = {"transaction_timeout_ms": timeout_ms} if self._exactly_once else {}
        extra["delivery_report_only_error"] = self._step.pure  # the others want to know their records' offsets
        self._producers = [producer(self._kafka, name, **extra) for name in self._ids]
        if self._exactly_once:
            calls = [partial(made.init_transactions, _CALL_S) for made in self._producers]
            with ThreadPoolExecutor(len(calls), "init-transactions") as together:
                for done in [together.submit(self._retry, call, "init_transactions") for call in calls]:
                    done.result()

    def stop(self, deadline: Deadline) -> None:
        if not self._exactly_once:
            for made in self._producers:
                made.flush(deadline.left(5.0))
        self._producers = []

    @property
    def _made(self) -> Producer:
        return self._producers[self._turn]

    def commit(self, work: Work, owned: Callable[[int], bool]) -> tuple[int, int]:
        """Returns once committed and applied: how many records were, and how many of them as dead letters. Raises
        `Dropped` when none of its partitions is ours any more."""
        dead = list(work.dead)
        attempt, one_by_one = 0, False
        while True:
            mine = {p for p in work.ends if owned(p)}
            if not mine:
                raise Dropped(work.records)
            try:
                done = self._attempt(work, dead, mine, owned, attempt > 0, one_by_one)
            except KafkaException as e:
                self._after_error(e.args[0], attempt)
                attempt += 1
                continue
            if done is None:
                one_by_one = True
                continue
            outputs, offsets = done
            failpoints.hit("after_commit")
            if outputs:
                self._step.committed(outputs, offsets)
            return sum(work.counts[p] for p in mine), sum(r.partition in mine for r, _ in dead)

    def _attempt(
        self,
        work: Work,
        dead: list[tuple[Record, Rejected]],
        mine: set[int],
        owned: Callable[[int], bool],
        refresh: bool,
        one_by_one: bool,
    ) -> tuple[list[Output], list[int]] | None:
        """One transaction. None: records were refused for their size. Which ones is asked for in another attempt, with
        `one_by_one`, in which they join `dead`; then it is tried again without them."""
        made, changelog = self._made, self._step.changelog_topic
        too_large = Rejected("output_too_large", f"a result is over {_MAX_VALUE_BYTES} bytes")
        dead.extend(
            (r, too_large)
            for r, o in work.outputs
            if len(o.value) > _MAX_VALUE_BYTES and not any(r is d and why.reason == too_large.reason for d, why in dead)
        )
        given_up = {id(r) for r, why in dead if why.reason in ("output_too_large", "refused_by_broker")}
        outputs = [(r, o) for r, o in work.outputs if o.partition in mine and id(r) not in given_up]
        reports = _Reports()

        if self._exactly_once:
            self._let_markers_land()
        began_s = time.monotonic()
        if self._exactly_once:
            made.begin_transaction()
        names = {t: self._kafka.topic(t) for t in {o.topic for _, o in outputs}}
        for r, o in outputs:
            kept = o.topic == changelog
            report = reports.of(r, kept) if one_by_one else reports.stored if kept else reports.other
            try:
                made.produce(names[o.topic], o.value, o.key, o.partition, report)
            except BufferError:
                self._produce(names[o.topic], o.key, o.value, o.partition, None, report)
        for r, why in dead:
            if r.partition in mine:
                key, value, headers = dead_letter(
                    self._kafka.topic(r.topic), r.partition, r.offset, r.key, r.value, why, self._step.role,
                    attempt_of(r.headers), r.received_ms, r.headers,
                )  # fmt: skip
                self._produce(self._kafka.topic("dlq"), key, value, None, headers, reports.letter)
        flushing_s = time.monotonic()
        self._flush()
        if self._exactly_once and len(outputs) <= _FEW:
            self._learn_markers(time.monotonic() - flushing_s)
        failpoints.hit("after_produce")
        if reports.refused or reports.refused_records:
            for record, error in reports.refused_records:
                if id(record) not in given_up:
                    given_up.add(id(record))
                    dead.append((record, Rejected("refused_by_broker", error.str())))
            if self._exactly_once:
                self._retry(lambda: made.abort_transaction(_CALL_S), "abort_transaction")
            return None
        if reports.failed:
            raise KafkaException(reports.failed[0])
        self._commit_offsets(work, mine, owned, refresh)
        self._committed_s = self._ended_s[self._turn] = time.monotonic()
        self._turn = (self._turn + 1) % len(self._producers)
        self._took_s += 0.2 * (self._committed_s - began_s - self._took_s)
        stored = [o for _, o in outputs if o.topic == changelog]
        return stored, reports.places(stored)

    def _commit_offsets(self, work: Work, mine: set[int], owned: Callable[[int], bool], refresh: bool) -> None:
        # The group's metadata first, then the check: if an assignment ends after the check, the metadata is of an older
        # generation of the group and the broker refuses the offsets.
        group = self._membership.group_metadata(refresh) if self._exactly_once else None
        if not all(map(owned, mine)):
            raise KafkaException(KafkaError(KafkaError._ASSIGNMENT_LOST, "a partition was taken during the batch"))
        positions = [TopicPartition(self._input, p, work.ends[p], work.metadata[p]) for p in sorted(mine)]
        if not self._exactly_once:
            self._membership.commit_soon(positions)
            return
        made = self._made
        self._retry(lambda: made.send_offsets_to_transaction(positions, group, _CALL_S), "send_offsets")
        failpoints.hit("before_commit")
        self._retry(lambda: made.commit_transaction(_CALL_S), "commit_transaction")

    @property
    def rest_s(self) -> float:
        """How long a few records should wait for others. Small commits one after the other cost the broker most, and
        most where it has least to spare. Nothing after a pause."""
        slow_s = self._took_s - (_QUICK_S if self._exactly_once else 0.0)
        rest_s = min(_MAX_REST_S, _REST * max(0.0, slow_s))
        return max(0.0, self._committed_s + rest_s - time.monotonic())

    def _let_markers_land(self) -> None:
        """Those of this identity's last transaction: only where the one between was very short."""
        early = self._ended_s[self._turn] + self._markers_s - time.monotonic()
        if early > 0:
            time.sleep(early)

    def _learn_markers(self, flush_s: float) -> None:
        """How long that takes is the broker's to say: a little less is tried each time, much more after a refusal."""
        least, _, most = _MARKERS_S
        refused = flush_s >= _REFUSED_ONCE_S
        self._markers_s = min(most, self._markers_s * 1.5) if refused else max(least, self._markers_s * 0.999)

    def _produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition: int | None,
        headers: Any,
        report: Callable[[KafkaError | None, Message], None],
    ) -> None:
        extra: dict[str, Any] = {} if partition is None else {"partition": partition}
        if headers is not None:
            extra["headers"] = headers
        while True:
            try:
                self._made.produce(topic, value, key, on_delivery=report, **extra)
                return
            except BufferError:  # back-pressure: the queue drains as the broker acknowledges
                self._reported(lambda: self._made.poll(0.05))
                if self._interrupted():
                    raise BrokerError(f"{self._step.role}: stopped while the broker took no records") from None

    def _flush(self) -> None:
        while self._reported(lambda: self._made.flush(1.0)) > 0:
            if self._interrupted():
                raise BrokerError(f"{self._step.role}: stopped while the broker acknowledged no records")

    @staticmethod
    def _reported(call: Callable[[], int]) -> int:
        """A call that serves delivery reports. The client raises a fatal error from within it and calls reports with
        that still pending, which Python takes for an error of its own."""
        try:
            return call()
        except SystemError as e:
            if isinstance(e.__cause__, KafkaException):
                raise e.__cause__ from None
            raise

    def _after_error(self, error: KafkaError, attempt: int) -> None:
        """Aborts what has to be aborted and waits, or raises what cannot be mended."""
        if identity_lost(error):
            raise self._identity_lost(error)
        self._counters["transactions_aborted"] += 1
        log.warning("%s: batch not committed, will be repeated: %s", self._step.role, error.str())
        if self._exactly_once:
            try:
                self._retry(lambda: self._made.abort_transaction(_CALL_S), "abort_transaction")
            except KafkaException as e:
                if identity_lost(e.args[0]):
                    raise self._identity_lost(e.args[0]) from None
                if e.args[0].code() != KafkaError._STATE:  # nothing was begun: nothing to abort
                    raise
        self._wait(attempt)

    def _identity_lost(self, error: KafkaError) -> IdentityLost:
        return IdentityLost(
            f"{self._step.role}: another process took the identity {self._ids[self._turn]!r}, this one was stopped for "
            f"longer than its transaction lives, or the broker lost the answer to a commit: {error.str()}. Who takes "
            "the identity next goes on from what is committed"
        )

    def _retry(self, call: Callable[[], Any], what: str) -> None:
        attempt = 0
        while True:
            self._calls[get_ident()] = time.monotonic()
            try:
                call()
                return
            except KafkaException as e:
                error = e.args[0]
                if not passing(error) or error.txn_requires_abort():
                    raise
                self._counters["broker_retries"] += 1
                log.warning("%s: %s: %s; trying again", self._step.role, what, error.str())
                self._calls.pop(get_ident(), None)
                self._wait(attempt)
                attempt += 1
            finally:
                self._calls.pop(get_ident(), None)

    @property
    def in_call_s(self) -> float:
        """How long the present call of the client library has taken, 0 when none is going on."""
        began = list(self._calls.values())
        return time.monotonic() - min(began) if began else 0.0

    def _wait(self, attempt: int) -> None:
        if self._interrupted():
            raise BrokerError(f"{self._step.role}: stopped while the broker could not be used; nothing was committed")
        time.sleep(_BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)])


def identity_lost(error: KafkaError) -> bool:
    """Whether the producer is of no more use: fenced, forgotten, or in a state that the broker does not share (which
    way a commit went whose answer died with the broker is for its successor to see)."""
    return error.fatal() or error.code() in _LOST


class _Reports:
    """What the broker said of the records of one attempt. The callbacks are shared by all of them, one object each and
    not one per record: the offsets of a partition come in the order its records were produced in."""

    def __init__(self) -> None:
        self.offsets: dict[int, list[int]] = {}
        self.refused: list[KafkaError] = []
        self.refused_records: list[tuple[Record, KafkaError]] = []
        self.failed: list[KafkaError] = []

    def stored(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.offsets.setdefault(message.partition(), []).append(message.offset())
        else:
            self.other(error, message)

    def other(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            (self.refused if error.code() in _REFUSED_BY_SIZE else self.failed).append(error)

    def letter(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failed.append(error)

    def of(self, record: Record, kept: bool) -> Callable[[KafkaError | None, Message], None]:
        def on_delivery(error: KafkaError | None, message: Message) -> None:
            if error is not None and error.code() in _REFUSED_BY_SIZE:
                self.refused_records.append((record, error))
            elif kept:
                self.stored(error, message)
            else:
                self.other(error, message)

        return on_delivery

    def places(self, outputs: Sequence[Output]) -> list[int]:
        """The offset of each output, in order."""
        left = {p: iter(sorted(offsets)) for p, offsets in self.offsets.items()}
        return [next(left[o.partition]) for o in outputs]
