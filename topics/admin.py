"""Topics against their contracts: create what is missing, compare what exists, refuse what does not match.

Nothing here alters or deletes a topic unless `alter` is called. A broker that does not report topic settings (the
embedded one) is not an error: what could not be compared is a note.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from topics import kafka as clients
from topics.contracts import CONTRACTS, Contract
from topics.errors import BrokerError, ContractError
from topics.kafka import KafkaSettings, group_name

log = logging.getLogger(__name__)

TIMEOUT_S = 15.0
SETTLE_S = 5.0
ROLES = ("verifier", "embedder", "embedder-state", "ranker", "monitor", "counter", "counter-clicks")
"""consumer groups"""
COPIES = 3
"""from so many on a record is acknowledged only when all but one of them have it: fewer could not spare one"""
OPTIONAL = ("counter", "counter-clicks")
"""groups that many installations never have: without a commit they have no lag"""


PARTITIONS = "kafka.partitions"
MIN_INSYNC = "min.insync.replicas"


@dataclass(frozen=True, slots=True)
class Mismatch:
    topic: str
    """full name; the prefix and `*` where it is about all of them"""
    what: str
    """"missing", "partitions", "kafka.partitions" (ours is not what the topics have) or the name of a topic setting"""
    declared: str
    found: str

    def __str__(self) -> str:
        if self.what == PARTITIONS:
            more = int(self.declared) > int(self.found)
            return (
                f"topics have {self.found} partitions, {PARTITIONS} is {self.declared}: set {PARTITIONS} = {self.found}"
                + (", or stop the roles and add partitions with `solaris topics create --alter`" if more else "")
            )
        if self.what == "missing":
            return f"{self.topic}: missing"
        return f"{self.topic}: {self.what} is {self.found}, the contract says {self.declared}"


@dataclass(slots=True)
class Report:
    mismatches: list[Mismatch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """what could not be compared, or differs harmlessly"""


@dataclass(slots=True)
class PartitionState:
    partition: int
    low: int
    high: int
    lag: dict[str, int]
    """role -> records not yet committed by it; a transaction's end marker counts as one"""


@dataclass(slots=True)
class TopicState:
    contract: Contract
    name: str
    exists: bool
    config: dict[str, str]
    partitions: list[PartitionState]


def partition_counts(kafka: KafkaSettings) -> dict[str, int]:
    """Full name -> number of partitions of every topic there is. Raises `BrokerError` with the reason."""
    return _Admin(kafka).partitions()


def partitions_of(kafka: KafkaSettings, contract: Contract) -> int:
    """Declared number of partitions. Topics that need not line up have one: they are small and read whole."""
    return kafka.partitions if contract.aligned else 1


def config_of(kafka: KafkaSettings, contract: Contract) -> dict[str, str]:
    """Declared topic settings, under Kafka's names."""
    config = {
        "cleanup.policy": contract.cleanup,
        "message.timestamp.type": contract.timestamp,
        "max.message.bytes": str(contract.max_message_bytes),
    }
    retention = kafka.retention_ms.get(contract.name, contract.retention_ms)
    if contract.cleanup == "delete" and retention is not None:
        config["retention.ms"] = str(retention)
    if kafka.replication >= COPIES:
        config[MIN_INSYNC] = str(COPIES - 1)
    return config


def create(kafka: KafkaSettings, names: Iterable[str] | None = None) -> list[str]:
    """Creates what is missing and returns the full names created. Existing topics are left as they are.

    Raises `BrokerError` when the broker cannot be reached or refuses.
    """
    with _Admin(kafka) as admin:
        have = admin.partitions()
        missing = [c for c in _chosen(names) if kafka.topic(c.name) not in have]
        if not missing:
            return []
        refused = admin.create(
            [NewTopic(kafka.topic(c.name), partitions_of(kafka, c), kafka.replication, config=config_of(kafka, c))
             for c in missing]
        )  # fmt: skip
        if refused:
            # An embedded broker may not know one of the settings: a topic with its defaults is better than none, and
            # `inspect` says what is missing.
            log.warning("topic settings refused, creating with the broker's defaults: %s", ", ".join(sorted(refused)))
            again = admin.create(
                [NewTopic(kafka.topic(c.name), partitions_of(kafka, c), kafka.replication)
                 for c in missing if kafka.topic(c.name) in refused]
            )  # fmt: skip
            if again:
                raise BrokerError(f"topic {sorted(again)[0]} cannot be created: {again[sorted(again)[0]]}")
        names_created = [kafka.topic(c.name) for c in missing]
        admin.wait_for({kafka.topic(c.name): partitions_of(kafka, c) for c in missing})
        return names_created


def alter(kafka: KafkaSettings, names: Iterable[str] | None = None) -> list[str]:
    """Brings existing topics to their contracts and returns one line per change.

    Settings are set; partitions are only ever added, to the largest count among `kafka.partitions` and the topics that
    must line up: where topics have more than the setting, it is the setting that is to be changed. Adding partitions
    moves users to other partitions, away from what their stores know: do it while the roles are stopped.
    """
    done: list[str] = []
    with _Admin(kafka) as admin:
        report = _inspect(admin, kafka, names)
        have = admin.partitions()
        aligned = [kafka.topic(c.name) for c in CONTRACTS if c.aligned]
        target = max([kafka.partitions, *(have[t] for t in aligned if t in have)])
        chosen = {kafka.topic(c.name) for c in _chosen(names)}
        for topic in aligned:
            if topic in chosen and have.get(topic, target) < target:
                admin.add_partitions(topic, target)
                admin.wait_for({topic: target})
                done.append(f"{topic}: partitions {have[topic]} -> {target}")
        for m in report.mismatches:
            if m.what not in ("missing", "partitions", PARTITIONS):
                admin.set_config(m.topic, m.what, m.declared)
                done.append(f"{m.topic}: {m.what} {m.found} -> {m.declared}")
    return done


def inspect(kafka: KafkaSettings, names: Iterable[str] | None = None) -> Report:
    """Compares what exists with the contracts. Raises `BrokerError` when the broker cannot be reached."""
    with _Admin(kafka) as admin:
        return _inspect(admin, kafka, names)


def check(kafka: KafkaSettings, names: Iterable[str] | None = None) -> list[Mismatch]:
    return inspect(kafka, names).mismatches


def require(kafka: KafkaSettings, names: Iterable[str] | None = None, any_partitions: bool = False) -> None:
    """What a role calls at start. Raises `ContractError` that names both sides of every mismatch.

    `any_partitions`: for who does not care whether `kafka.partitions` is what the topics have. A role does: it divides
    its budgets by that.
    What is missing is looked for again for `SETTLE_S`: of several brokers one may not have heard yet of what was made a
    moment ago."""

    def look() -> list[Mismatch]:
        return [m for m in check(kafka, names) if not (any_partitions and m.what == PARTITIONS)]

    deadline = time.monotonic() + SETTLE_S
    found = look()
    while found and all(m.what in ("missing", "partitions") for m in found) and time.monotonic() < deadline:
        time.sleep(0.2)
        found = look()
    if found:
        lines = "\n  ".join(map(str, found))
        remedy = "\n`solaris topics create` makes what is missing; `solaris topics create --alter` changes what exists"
        if all(m.what == PARTITIONS for m in found):
            remedy = ""
        raise ContractError(f"topics at {kafka.bootstrap} do not match their contracts:\n  {lines}{remedy}")


def describe(kafka: KafkaSettings, names: Iterable[str] | None = None, settings: bool = True) -> list[TopicState]:
    """Every topic of the contracts as it is, with offsets and the lag of the roles that read it; without `settings`
    the topics' own are not asked for."""
    chosen = _chosen(names)
    with _Admin(kafka) as admin:
        have = admin.partitions()
        configs = admin.configs([kafka.topic(c.name) for c in chosen if kafka.topic(c.name) in have and settings])
    out: list[TopicState] = []
    readers = {role: clients.consumer(kafka, group_name(kafka, role)) for role in ROLES}
    try:
        for c in chosen:
            name = kafka.topic(c.name)
            parts = [TopicPartition(name, p) for p in range(have.get(name, 0))]
            state = TopicState(c, name, name in have, configs.get(name, {}), [])
            any_reader = next(iter(readers.values()))
            for tp in parts:
                low, high = clients.watermarks(any_reader, name, tp.partition, TIMEOUT_S)
                state.partitions.append(PartitionState(tp.partition, low, high, {}))
            for role, reader in readers.items():
                if parts and role in c.reads.split(", "):
                    committed = reader.committed(parts, timeout=TIMEOUT_S)
                    if role in OPTIONAL and all(tp.offset < 0 for tp in committed):
                        continue
                    for tp in committed:
                        s = state.partitions[tp.partition]
                        s.lag[role] = max(0, s.high - (tp.offset if tp.offset >= 0 else s.low))
            out.append(state)
    except KafkaException as e:
        raise BrokerError(f"offsets at {kafka.bootstrap} cannot be read: {e.args[0].str()}") from None
    finally:
        for reader in readers.values():
            reader.close()
    return out


def _chosen(names: Iterable[str] | None) -> list[Contract]:
    if names is None:
        return list(CONTRACTS)
    wanted = set(names)
    unknown = wanted - {c.name for c in CONTRACTS}
    if unknown:
        known = ", ".join(c.name for c in CONTRACTS)
        raise ContractError(f"no contract for topic {sorted(unknown)[0]!r}; there are {known}")
    return [c for c in CONTRACTS if c.name in wanted]


def _inspect(admin: _Admin, kafka: KafkaSettings, names: Iterable[str] | None) -> Report:
    report = Report()
    chosen = _chosen(names)
    have = admin.partitions()
    present = [c for c in chosen if kafka.topic(c.name) in have]
    for c in chosen:
        if c not in present and not (c.optional and names is None):
            report.mismatches.append(Mismatch(kafka.topic(c.name), "missing", "a topic", "not there"))
    _check_alignment(report, kafka, have, present)
    configs = admin.configs([kafka.topic(c.name) for c in present])
    for c in present:
        topic, declared = kafka.topic(c.name), config_of(kafka, c)
        copies = admin.copies.get(topic, 0)
        if copies < min(COPIES, kafka.replication):
            # Not to be changed by a setting; and two copies in sync of one or two would refuse all writes.
            report.notes.append(
                f"{topic}: copies {copies}, kafka.replication = {kafka.replication}; Kafka's own "
                "kafka-reassign-partitions.sh adds copies"
            )
            declared.pop(MIN_INSYNC, None)
        _check_config(report, topic, declared, configs.get(topic, {}))
    return report


def _check_alignment(report: Report, kafka: KafkaSettings, have: dict[str, int], present: list[Contract]) -> None:
    counts = {kafka.topic(c.name): have[kafka.topic(c.name)] for c in present if c.aligned}
    if not counts:
        return
    # The commonest count is taken as meant, the setting decides a tie: then the message names the odd one out.
    values = list(counts.values())
    meant = max(set(values), key=lambda n: (values.count(n), n == kafka.partitions))
    for topic, n in counts.items():
        if n != meant:
            like = next(t for t, m in counts.items() if m == meant)
            report.mismatches.append(Mismatch(topic, "partitions", f"the same as {like}: {meant}", str(n)))
    if meant != kafka.partitions:
        report.mismatches.append(Mismatch(f"{kafka.prefix}*", PARTITIONS, str(kafka.partitions), str(meant)))


def _check_config(report: Report, topic: str, declared: dict[str, str], found: dict[str, str]) -> None:
    unknown = [name for name in declared if name not in found]
    if unknown:
        report.notes.append(f"{topic}: the broker does not report {', '.join(unknown)}; not compared")
    for name, want in declared.items():
        have = found.get(name)
        if have is None or have == want:
            continue
        if name in ("retention.ms", "max.message.bytes", MIN_INSYNC) and _at_least(have, want):
            continue  # longer, larger or safer than declared harms nobody
        if name == "cleanup.policy" and set(have.split(",")) == set(want.split(",")):
            continue
        report.mismatches.append(Mismatch(topic, name, want, have))


def _at_least(have: str, want: str) -> bool:
    try:
        return int(have) == -1 or int(have) >= int(want)
    except ValueError:
        return False


class _Admin:
    """An admin client whose failures are `BrokerError`s with librdkafka's reason: login, certificate, address."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._reasons: list[str] = []
        self._refused = False
        """a login or certificate was refused, and will be again"""
        self._client: AdminClient = clients.admin(kafka, error_cb=self._heard)
        self.copies: dict[str, int] = {}
        """topic -> copies of the partition that has fewest, as `partitions` found them last"""

    def __enter__(self) -> _Admin:
        return self

    def __exit__(self, *_: object) -> None:
        # AdminClient has no close; its threads end with the last reference.
        del self._client

    def _heard(self, error: KafkaError) -> None:
        self._refused |= error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL)
        text = re.sub(r" \(after \d+ms in state \w+\)|, \d+ identical error\(s\) suppressed", "", error.str())
        text = re.sub(r"^\S+/\w+: ", "", text)  # librdkafka's name of the broker
        if "certificate verify failed" in text:
            text += "; so it is when the broker's certificate has expired or names another host"
        if error.code() != KafkaError._ALL_BROKERS_DOWN and text not in self._reasons:
            self._reasons.append(text)

    def partitions(self) -> dict[str, int]:
        """topic -> number of partitions. The whole list is asked for: naming a topic could create it."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                found = self._client.list_topics(timeout=1.0).topics
                break
            except KafkaException as e:
                self._client.poll(0)
                if self._refused or time.monotonic() > deadline:
                    reason = "; ".join(self._reasons[-2:]) or e.args[0].str()
                    raise BrokerError(
                        f"no answer from kafka.bootstrap = {self._kafka.bootstrap}: {reason}"
                        + ("" if self._refused else "; `solaris up` starts a broker, KAFKA_BOOTSTRAP names another one")
                    ) from None
        there = {name: t.partitions for name, t in found.items() if t.error is None and t.partitions}
        self.copies = {name: min(len(p.replicas) for p in parts.values()) for name, parts in there.items()}
        return {name: len(parts) for name, parts in there.items()}

    def create(self, topics: list[NewTopic]) -> dict[str, str]:
        """Returns topic -> reason for topics refused over their settings. A topic that appeared meanwhile is fine."""
        refused: dict[str, str] = {}
        for name, future in self._client.create_topics(topics, request_timeout=TIMEOUT_S).items():
            try:
                future.result()
            except KafkaException as e:
                error: KafkaError = e.args[0]
                if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                    continue
                if error.code() in (KafkaError.INVALID_CONFIG, KafkaError.INVALID_REQUEST):
                    refused[name] = error.str()
                    continue
                raise BrokerError(f"topic {name} cannot be created: {error.str()}") from None
        return refused

    def wait_for(self, counts: dict[str, int]) -> None:
        """Until the metadata shows the topics with so many partitions: the controller answers before brokers know."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            have = self.partitions()
            late = [topic for topic, n in counts.items() if have.get(topic, 0) < n]
            if not late:
                return
            if time.monotonic() > deadline:
                raise BrokerError(f"made, but not shown by the broker within {TIMEOUT_S:g} s: {', '.join(late)}")
            time.sleep(0.05)

    def configs(self, topics: list[str]) -> dict[str, dict[str, str]]:
        """topic -> settings the broker reports; empty where it reports none."""
        if not topics:
            return {}
        out: dict[str, dict[str, str]] = {}
        resources = [ConfigResource(ResourceType.TOPIC, t) for t in topics]
        try:
            futures: dict[Any, Any] = self._client.describe_configs(resources, request_timeout=TIMEOUT_S)
        except KafkaException as e:
            log.info("the broker does not describe topic settings: %s", e)
            return out
        refused: dict[str, list[str]] = {}
        for resource, future in futures.items():
            try:
                entries = future.result()
            except KafkaException as e:
                refused.setdefault(e.args[0].str(), []).append(resource.name)
                continue
            out[resource.name] = {name: entry.value for name, entry in entries.items() if entry.value is not None}
        for why, which in refused.items():
            log.info("settings not compared, the broker does not describe them: %s (%s)", ", ".join(which), why)
        return out

    def add_partitions(self, topic: str, total: int) -> None:
        self._done(self._client.create_partitions([NewPartitions(topic, total)])[topic], f"partitions of {topic}")

    def set_config(self, topic: str, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        self._done(self._client.incremental_alter_configs([resource])[resource], f"{name} of {topic}")

    @staticmethod
    def _done(future: Any, what: str) -> None:
        try:
            future.result()
        except KafkaException as e:
            raise BrokerError(f"{what} cannot be changed: {e.args[0].str()}") from None
