"""One way to talk to any broker: settings and client factories.

Any librdkafka property passes through untouched in `KafkaSettings.properties` (SASL, TLS, timeouts, ...). Properties
that carry a guarantee (`isolation.level`, `enable.idempotence`, `enable.auto.commit`) are set by the factories.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

log = logging.getLogger(__name__)

_SECRET_WORDS = ("password", "secret", "token", "key.pem", "sasl.jaas", "credential", "private")


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    bootstrap: str = "127.0.0.1:9092"
    prefix: str = "solaris."
    partitions: int = 4
    replication: int = 1
    properties: Mapping[str, Any] = field(default_factory=dict)
    """librdkafka properties, passed through to every client"""

    def topic(self, name: str) -> str:
        """Full name of a contract's topic: `topic("candidates")` -> "solaris.candidates"."""
        return self.prefix + name


def masked(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The properties with secrets replaced, fit for a log or a screen."""
    return {k: "******" if is_secret(k) else v for k, v in properties.items()}


def is_secret(key: str) -> bool:
    return any(word in key.lower() for word in _SECRET_WORDS)


def common(kafka: KafkaSettings) -> dict[str, Any]:
    return {"bootstrap.servers": kafka.bootstrap, "log.connection.close": False, **kafka.properties}


def admin(kafka: KafkaSettings) -> AdminClient:
    return AdminClient(common(kafka), logger=log)


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
        conf["transactional.id"] = transactional_id
    return Producer(conf, logger=log)


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
    return Consumer(conf, logger=log)


def _dotted(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {k.replace("_", "."): v for k, v in properties.items()}
