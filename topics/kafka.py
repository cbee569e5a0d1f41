"""One way to talk to any broker: settings and client factories.

Any librdkafka property passes through untouched in `KafkaSettings.properties` (SASL, TLS, timeouts, ...). Properties
that carry a guarantee (`isolation.level`, `enable.idempotence`, `enable.auto.commit`) are set by the factories.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from topics.errors import SettingsError
from topics.fields import setting, table

log = logging.getLogger(__name__)


class _Quieter(logging.Filter):
    """A broker that is away makes every client say so many times a second: the same kind of line of the same client
    passes once in `EVERY_S`."""

    EVERY_S = 10.0

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        # librdkafka's lines begin "FAIL [rdkafka#producer-1] [thrd:...]": its facility and its client.
        key = " ".join(record.getMessage().split(" ", 2)[:2])
        now = record.created
        if now - self._passed.get(key, -self.EVERY_S) < self.EVERY_S:
            return False
        if len(self._passed) > 1_000:
            self._passed.clear()
        self._passed[key] = now
        return True


log.addFilter(_Quieter())

_SECRET_WORDS = (
    "password", "passphrase", "secret", "token", "key.pem", "sasl.jaas", "credential", "private", "oauthbearer.config",
)  # fmt: skip


_MOVING = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._UNKNOWN_TOPIC,
)
"""errors of a topic that is being made or moved"""


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    bootstrap: str = setting("127.0.0.1:9092", "brokers to begin with, host:port, parted by commas")
    prefix: str = setting("solaris.", "of all topics, consumer groups and transactional ids")
    partitions: int = setting(
        4,
        "partitions of the topics whose key is the user; what the topics have, once they are made",
        low=1,
        high=10_000,
    )
    replication: int = setting(1, "copies of a topic when it is made; 3 on a cluster", low=1, high=100)
    retention_ms: Mapping[str, int] = table(
        dict, "topic (without the prefix) -> how long its records are kept; topics not named keep their contract's"
    )
    properties: Mapping[str, Any] = table(
        dict, "librdkafka properties, passed through to every client", repr=False  # since some are secrets
    )  # fmt: skip

    def topic(self, name: str) -> str:
        """Full name of a contract's topic: `topic("candidates")` -> "solaris.candidates"."""
        return self.prefix + name


def group_name(kafka: KafkaSettings, role: str) -> str:
    """Consumer group of a role: `group_name(kafka, "ranker")` -> "solaris.ranker"."""
    return kafka.prefix + role


def masked(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The properties with secrets replaced, fit for a log or a screen."""
    return {k: "******" if is_secret(k) else v for k, v in properties.items()}


def is_secret(key: str) -> bool:
    return any(word in key.lower() for word in _SECRET_WORDS)


def common(kafka: KafkaSettings) -> dict[str, Any]:
    return {"bootstrap.servers": kafka.bootstrap, "log.connection.close": False, **kafka.properties}


def admin(kafka: KafkaSettings, error_cb: Callable[[KafkaError], None] | None = None) -> AdminClient:
    """`error_cb` hears what librdkafka would only log: refused connections, failed logins, wrong certificates."""
    return _client(AdminClient, common(kafka) | ({"error_cb": error_cb} if error_cb else {}))


def producer(kafka: KafkaSettings, transactional_id: str | None = None, **properties: Any) -> Producer:
    """Idempotent; transactional when an id is given. `properties` use underscores for dots."""
    conf: dict[str, Any] = {
        "linger.ms": 1,
        "compression.type": "lz4",
        "queue.buffering.max.kbytes": 131_072,
        "message.max.bytes": 8 << 20,
        **common(kafka),
        **_dotted(properties),
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
    }
    if transactional_id is not None:
        conf = {**_COORDINATOR_MEMORY, **conf, "transactional.id": transactional_id}
    return _client(Producer, conf)


_COORDINATOR_MEMORY = {"metadata.max.age.ms": 5_000, "topic.metadata.refresh.interval.ms": 5_000}
"""librdkafka remembers a group's coordinator for `metadata.max.age.ms` (15 min), also when that broker was restarted
since, and then `send_offsets_to_transaction` does not come back, whatever its timeout (librdkafka #5456, #5511)."""


def consumer(kafka: KafkaSettings, group: str, committed: bool = True, **properties: Any) -> Consumer:
    """Commits nothing by itself; reads committed records only unless `committed` is False."""
    conf: dict[str, Any] = {
        "auto.offset.reset": "earliest",
        "fetch.message.max.bytes": 8 << 20,
        "queued.max.messages.kbytes": 65_536,
        "fetch.wait.max.ms": 20,
        **common(kafka),
        **_dotted(properties),
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed" if committed else "read_uncommitted",
    }
    return _client(Consumer, conf)


def watermarks(reader: Consumer, topic: str, partition: int, timeout_s: float = 15.0) -> tuple[int, int]:
    """(first offset, end) of a partition. Waits while its leader is moving or a new topic is not known everywhere."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            low, high = reader.get_watermark_offsets(TopicPartition(topic, partition), timeout=timeout_s)
            return low, high
        except KafkaException as e:
            if e.args[0].code() not in _MOVING or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _client(kind: Any, conf: dict[str, Any]) -> Any:
    """librdkafka checks its properties here. Its message is not shown where it quotes a secret."""
    try:
        return kind(conf, logger=log)
    except (KafkaException, TypeError, ValueError) as e:
        error = e.args[0] if e.args else e
        text = error.str() if hasattr(error, "str") else str(error)
        if any(str(v) in text for k, v in conf.items() if is_secret(k) and str(v)):
            text = "a property is not accepted (the message holds a secret and is not shown)"
        # the property it is about, where the text names one
        about = sorted((k for k in conf if k in text), key=len)
        if about:
            raise SettingsError(f"kafka.properties.{about[-1]}", masked(conf)[about[-1]], text) from None
        shown = {k: v for k, v in masked(conf).items() if not callable(v)}
        raise SettingsError("kafka.properties", shown, text) from None


def _dotted(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {k.replace("_", "."): v for k, v in properties.items()}


_PASSING = (
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._WAIT_COORD,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)


def passing(error: KafkaError) -> bool:
    """Whether the same call may succeed later: what librdkafka calls retriable, and the errors of a broker that is away
    or starting, which it does not mark so in every call."""
    return not error.fatal() and (error.retriable() or error.code() in _PASSING)
