"""Ready means: a record went in and came out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from topics.errors import BrokerError
from topics.kafka import KafkaSettings, admin, consumer, producer


def wait_ready(
    kafka: KafkaSettings,
    timeout_s: float = 60.0,
    log_tail: Callable[[], str] | None = None,
    alive: Callable[[], bool] | None = None,
) -> float:
    """Creates a topic, produces a record, reads it back, deletes the topic; returns the seconds it took.

    Raises `BrokerError` at the timeout, or as soon as `alive()` is False, with the last error and the log's tail.
    """
    began = time.monotonic()
    until = began + timeout_s
    name = f"{kafka.prefix}ready-{uuid.uuid4().hex[:12]}"
    last = "no answer yet"
    reasons: list[str] = []
    # The client's own errors ("transport failure") hide what this callback is told: authentication, certificates.
    # Its log stays silent: that nobody listens yet is what waiting is about.
    properties = {**kafka.properties, "error_cb": lambda error: reasons.append(str(error)), "log_level": 0}
    kafka = replace(kafka, properties=properties)
    while time.monotonic() < until:
        if alive is not None and not alive():
            raise BrokerError(_message(f"the broker at {kafka.bootstrap} ended while starting", last, log_tail))
        try:
            if _round_trip(kafka, name, min(8.0, max(0.5, until - time.monotonic()))):
                return time.monotonic() - began
            last = "a record was not read back in time"
        except Exception as e:  # whatever the client raises is the reason to show
            last = _best(reasons) or str(e)
            time.sleep(0.25)
    what = f"the broker at {kafka.bootstrap} was not ready in {timeout_s:g} s"
    raise BrokerError(_message(what, last, log_tail))


def _round_trip(kafka: KafkaSettings, name: str, timeout_s: float) -> bool:
    from confluent_kafka import KafkaError, KafkaException, TopicPartition
    from confluent_kafka.admin import NewTopic

    until = time.monotonic() + timeout_s
    control = admin(kafka)
    # A socket that is refused now may be open in a moment: ask cheaply before asking for anything that waits long.
    try:
        control.list_topics(timeout=1.0)
    finally:
        control.poll(0)
    future = control.create_topics(
        [NewTopic(name, num_partitions=1, replication_factor=kafka.replication)],
        operation_timeout=timeout_s,
        request_timeout=timeout_s,
    )[name]
    try:
        future.result(timeout_s)
    except KafkaException as e:
        if e.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise
    sent = uuid.uuid4().bytes
    failures: list[str] = []
    out = producer(kafka, message_timeout_ms=int(timeout_s * 1000))
    out.produce(name, value=sent, on_delivery=lambda error, _: failures.append(str(error)) if error else None)
    out.flush(timeout_s)
    if failures:
        raise BrokerError(failures[0])
    reader = consumer(kafka, f"{name}-probe")
    try:
        reader.assign([TopicPartition(name, 0, 0)])
        while time.monotonic() < until:
            message = reader.poll(0.1)
            if message is not None and message.error() is None and message.value() == sent:
                control.delete_topics([name], operation_timeout=5.0)[name].result(10.0)
                return True
    finally:
        reader.close()
    return False


def _best(reasons: list[str]) -> str:
    """The newest error that is more than "no connection", else the newest."""
    telling = [r for r in reasons if "_ALL_BROKERS_DOWN" not in r]
    return (telling or reasons or [""])[-1]


def _message(what: str, last: str, log_tail: Callable[[], str] | None) -> str:
    text = f"{what}: {last}"
    tail = log_tail() if log_tail is not None else ""
    return f"{text}\nlast lines of its log:\n{tail}" if tail else text
