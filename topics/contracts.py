"""The topics, declared once as data. `solaris topics create|check|describe` and the docs read this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@dataclass(frozen=True, slots=True)
class Contract:
    name: str
    """without the prefix"""
    key: str
    value: str
    """"json <type>", "packed <type>" or "bytes" """
    retention_ms: int | None
    """None: kept by compaction"""
    writes: str
    reads: str
    aligned: bool = True
    """partitioned by user id with the same number of partitions as the other aligned topics; partition p of
    `item-counts` is what partition p's users did"""
    optional: bool = False
    """needed by some bundles only: that it is missing is no mismatch unless it is asked for by name"""
    cleanup: Literal["delete", "compact"] = "delete"
    timestamp: Literal["LogAppendTime", "CreateTime"] = "LogAppendTime"
    """Kafka retention goes by record timestamp. Replayed events are old: with their own time they would be deleted at
    once, so the broker's time is the record's and event time is a field of the value."""
    max_message_bytes: int = 8 << 20


CONTRACTS: tuple[Contract, ...] = (
    Contract("candidates", "user id", "json candidates", 12 * HOUR_MS, "retrieval", "verifier"),
    Contract("precompute", "user id", "packed precompute", 12 * HOUR_MS, "verifier", "embedder, embedder-state"),
    Contract("embeddings", "user id", "packed embedding chunk", 30 * HOUR_MS, "embedder", "stores"),
    Contract("impressions", "user id", "json impression", 12 * HOUR_MS, "ad server", "ranker, counter"),
    Contract("ranked-ads", "user id", "json ranked_ads", 3 * DAY_MS, "ranker", "ad server, monitor"),
    Contract("feedback", "user id", "json feedback", 3 * DAY_MS, "ad server", "monitor, training, counter-clicks"),
    Contract("counts", "user id", "packed count chunk", 26 * HOUR_MS, "counter", "stores", optional=True),
    Contract("item-counts", "none", "packed item deltas", 26 * HOUR_MS, "counter", "stores", optional=True),
    Contract("items", "item id", "json item", None, "catalogue", "all roles", aligned=False, cleanup="compact"),
    Contract("stats", "role", "json stats", 3 * DAY_MS, "all roles", "monitor", aligned=False),
    Contract("dlq", "as received", "bytes as received", 7 * DAY_MS, "any", "people", aligned=False),
)
BY_NAME = {c.name: c for c in CONTRACTS}
