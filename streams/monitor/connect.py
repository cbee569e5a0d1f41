"""The broker as Faust's client (aiokafka) wants it, and where the monitor begins to read.

`KafkaSettings.properties` are librdkafka's. Those of TLS and SASL are translated; one of them that cannot be is an
error, since going on without it would connect otherwise than the other roles do. Properties of tuning are left out.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from streams.monitor.blocks import BLOCK_MS
from topics.errors import BrokerError, SettingsError
from topics.kafka import KafkaSettings, consumer, group_name, passing

log = logging.getLogger(__name__)

TOPICS = ("stats", "ranked-ads", "feedback")
_SECURITY = ("security.", "ssl.", "sasl.", "enable.ssl", "enable.sasl", "oauthbearer", "https.")
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_TIMEOUT_S = 15.0


def broker_urls(bootstrap: str) -> str:
    """ "a:9092,b:9092" -> "kafka://a:9092;kafka://b:9092"."""
    return ";".join(f"kafka://{server.strip()}" for server in bootstrap.split(",") if server.strip())


def credentials(properties: Mapping[str, Any]) -> Any:
    """Faust's credentials from librdkafka's properties, or None for plain text. Raises `SettingsError`."""
    from faust import SASLCredentials, SSLCredentials

    wanted = {k: v for k, v in properties.items() if k.startswith(_SECURITY)}
    other = sorted(set(properties) - set(wanted))
    if other:
        log.info("the monitor's own Kafka client does not use kafka.properties %s", ", ".join(other))
    protocol = str(wanted.pop("security.protocol", "PLAINTEXT")).upper()
    if protocol not in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"):
        raise SettingsError("kafka.properties.security.protocol", protocol, "PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL")
    context = _tls(wanted) if protocol.endswith("SSL") else None
    result: Any = SSLCredentials(context) if protocol == "SSL" else None
    if protocol.startswith("SASL"):
        mechanism = str(wanted.pop("sasl.mechanism", wanted.pop("sasl.mechanisms", "GSSAPI"))).upper()
        if mechanism not in _MECHANISMS:
            raise SettingsError(
                "kafka.properties.sasl.mechanism", mechanism, f"the monitor can log in by {', '.join(_MECHANISMS)}"
            )
        result = SASLCredentials(
            username=wanted.pop("sasl.username", None), password=wanted.pop("sasl.password", None),
            ssl_context=context, mechanism=mechanism,
        )  # fmt: skip
    unused = [k for k in wanted if protocol == "SASL_SSL" or not _idle(k, protocol)]
    if unused:
        raise SettingsError(
            f"kafka.properties.{unused[0]}", "...",
            "the monitor's Kafka client has nothing like it; run the monitor with properties of its own (--config)",
        )  # fmt: skip
    return result


def _idle(key: str, protocol: str) -> bool:
    """Properties of a layer that the protocol does not use are as idle as they are in librdkafka."""
    return key.startswith(("ssl.", "enable.ssl")) != (protocol == "SSL")


def _tls(wanted: dict[str, Any]) -> ssl.SSLContext:
    """Takes what it translates out of `wanted`."""
    ca, pem = wanted.pop("ssl.ca.location", None), wanted.pop("ssl.ca.pem", None)
    certificate, key = wanted.pop("ssl.certificate.location", None), wanted.pop("ssl.key.location", None)
    password = wanted.pop("ssl.key.password", None)
    verify = str(wanted.pop("enable.ssl.certificate.verification", "true")).lower() == "true"
    names = str(wanted.pop("ssl.endpoint.identification.algorithm", "https")).lower() != "none"
    try:
        context = ssl.create_default_context(cafile=ca, cadata=pem)
        if certificate:
            context.load_cert_chain(certificate, key, password)
    except (OSError, ssl.SSLError) as e:
        where = f"{ca or 'ssl.ca.pem'}, {certificate}" if certificate else ca or "ssl.ca.pem"
        raise SettingsError("kafka.properties.ssl.*", where, f"cannot be loaded: {e}") from None
    context.check_hostname = verify and names
    if not verify:
        context.verify_mode = ssl.CERT_NONE
    return context


def rewind(kafka: KafkaSettings, keep_ms: int, feedback_window_ms: int, now_ms: int, wait_s: float) -> int:
    """Moves the monitor's group to where reading begins; returns the start of the first window that is whole (ms).

    It is one feedback window before the oldest record that the group has not read (and one block, for what was read
    but not stored yet), so that every block with a join still open is read again whole; `keep_ms` ago when the group is
    new or has been away for longer. Reading begins one block earlier: feedback may come before its ranked ads.
    Raises `BrokerError` when another monitor is still at work after `wait_s`: two would write each other's tables.
    """
    group = group_name(kafka, "monitor")
    reader = consumer(kafka, group)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return _rewind(reader, kafka, keep_ms, feedback_window_ms, now_ms)
            except KafkaException as e:
                error: KafkaError = e.args[0]
                # A monitor that was killed stays a member until its session ends.
                busy = error.code() in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION)
                if time.monotonic() > deadline or not (busy or passing(error)):
                    why = "another monitor is running, or was killed a moment ago" if busy else error.str()
                    raise BrokerError(f"offsets of group {group} at {kafka.bootstrap} cannot be set: {why}") from None
                time.sleep(1.0)
    finally:
        reader.close()


def _rewind(reader: Consumer, kafka: KafkaSettings, keep_ms: int, feedback_window_ms: int, now_ms: int) -> int:
    parts = list(_partitions(reader, kafka))
    oldest = now_ms - keep_ms
    committed = reader.committed(parts, timeout=_TIMEOUT_S)
    unread = []
    for tp in committed:
        low, high = reader.get_watermark_offsets(tp, timeout=_TIMEOUT_S)
        if low < high and 0 <= tp.offset < high:
            unread.append(TopicPartition(tp.topic, tp.partition, max(tp.offset, low)))
    new = any(tp.offset < 0 for tp in committed)
    behind = oldest if new else min([now_ms, *_times(reader, unread)])
    since = max(behind - feedback_window_ms - BLOCK_MS, oldest)
    since -= since % BLOCK_MS
    found = reader.offsets_for_times(
        [TopicPartition(t.topic, t.partition, since - BLOCK_MS) for t in parts], timeout=_TIMEOUT_S
    )
    for tp in found:
        if tp.offset < 0:  # nothing that new
            tp.offset = reader.get_watermark_offsets(tp, timeout=_TIMEOUT_S)[1]
    reader.commit(offsets=[TopicPartition(t.topic, t.partition, t.offset) for t in found], asynchronous=False)
    return since


def _partitions(reader: Consumer, kafka: KafkaSettings) -> Iterator[TopicPartition]:
    known = reader.list_topics(timeout=_TIMEOUT_S).topics
    for name in TOPICS:
        for p in known[kafka.topic(name)].partitions:
            yield TopicPartition(kafka.topic(name), p)


def _times(reader: Consumer, at: list[TopicPartition]) -> list[int]:
    """Append times of the first readable record at or after each position. A position may have none: behind it there
    may be nothing but the end markers of transactions."""
    out: list[int] = []
    reader.assign(at)
    deadline = time.monotonic() + 3.0
    try:
        while len(out) < len(at) and time.monotonic() < deadline:
            message = reader.poll(0.5)
            if message is not None and not message.error():
                out.append(int(message.timestamp()[1]))
                reader.pause([TopicPartition(str(message.topic()), int(message.partition() or 0))])
    finally:
        reader.unassign()
    return out
