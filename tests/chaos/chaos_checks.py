"""What must be true after a chaos run, found by reading everything back."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import msgspec
from confluent_kafka import KafkaException

from state.api import StoreDims, StoreSettings
from streams.audit import read_all, store_differences
from topics.kafka import KafkaSettings, admin, group_name
from topics.packed import decode_embedding, decode_precompute
from topics.tail import Record

GROUPS = {"verifier": "candidates", "embedder-state": "precompute", "embedder": "precompute", "ranker": "impressions"}
"""loop -> its input topic"""


def unowned(kafka: KafkaSettings, timeout_s: float) -> list[str]:
    """Partitions that have no owner, or two, in the group of any role; waits until there are none."""
    deadline = time.monotonic() + timeout_s
    client = admin(kafka)
    while True:
        problems = []
        for role, topic in GROUPS.items():
            try:
                name = group_name(kafka, role)
                members = client.describe_consumer_groups([name], request_timeout=10)[name].result().members
            except KafkaException as e:
                problems.append(f"{role}: {e.args[0].str()}")
                continue
            owners = Counter(
                tp.partition
                for m in members
                for tp in (m.assignment.topic_partitions if m.assignment else ())
                if tp.topic == kafka.topic(topic)
            )
            problems += [f"{role} {p}: {owners[p]} owners" for p in range(kafka.partitions) if owners[p] != 1]
        if not problems or time.monotonic() > deadline:
            return problems
        time.sleep(0.5)


def pairs_embedded(changelog: list[Record]) -> int:
    """FM calls whose results are committed: pairs over all chunks."""
    return sum(len(decode_embedding(r.value).items) for r in changelog)


def pairs_computed(kafka: KafkaSettings) -> int:
    """FM calls as the embedders themselves counted them, each start's last word (up to a second before its end)."""
    last: dict[tuple[int, int], int] = {}
    for r in read_all(kafka, "stats"):
        said = msgspec.json.decode(r.value or b"{}")
        if said.get("role") == "embedder":
            start = said["pid"], said["started_ms"]
            last[start] = max(last.get(start, 0), said["counters"].get("embedder_pairs_embedded", 0))
    return sum(last.values())


def repeated_or_lost(candidates: list[Record], requests: list[Record], changelog: list[Record]) -> dict[str, int]:
    """Between our own roles, exactly once too: one request per candidates event at most, one state chunk for each
    request, one pair chunk at most. A former owner's write would show here."""
    asked = Counter((q.user, q.event_id) for q in (decode_precompute(r.value) for r in requests))
    states: Counter[tuple[int, str]] = Counter()
    pairs: Counter[tuple[int, str]] = Counter()
    for r in changelog:
        chunk = decode_embedding(r.value)
        (states if len(chunk.state) else pairs)[chunk.user, chunk.event_id] += 1
    offered = len(candidates)
    return {
        "requests_repeated": sum(asked.values()) - len(asked),
        "requests_lost": max(0, offered - len(asked)),
        "states_repeated": sum(states.values()) - len(states),
        "states_lost": len(asked.keys() - states.keys()),
        "states_invented": len(states.keys() - asked.keys()),
        "pair_chunks_repeated": sum(pairs.values()) - len(pairs),
        "pair_chunks_invented": len(pairs.keys() - asked.keys()),
    }


def differences(
    state: Path, changelog: list[Record], settings: StoreSettings, dims: StoreDims, scratch: Path
) -> list[str]:
    """All stores found below `state/<role>/<partition>` against the changelog."""
    out = []
    for folder in sorted(p.parent for p in state.glob("*/*/CURRENT")):
        name = f"{folder.parent.name}/{folder.name}"
        rebuilt = scratch / folder.parent.name / folder.name
        partition = int(folder.name.partition(".")[0])
        out += [f"{name}: {d}" for d in store_differences(folder, changelog, partition, settings, dims, rebuilt)]
    return out
