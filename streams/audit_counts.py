"""The records of the rolling counts against the events that they count, by reading the topics back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from streams.audit import MAX_EXAMPLES, read_all
from topics.errors import InvalidEvent
from topics.events import Feedback, Impression, check_key, decode_feedback, decode_impression
from topics.ids import hash_id
from topics.kafka import KafkaSettings
from topics.packed_counts import BUCKET_MS, decode_count, decode_items

_Chunk = tuple[int, int, int, bool, tuple[int, ...]]
"""partition, user hash, event time, clicked, item hashes"""
_Sum = tuple[int, int, int, bool]
"""partition, item hash, bucket, clicked"""


@dataclass(slots=True)
class CountAudit:
    events: int = 0
    """readable impressions with ads and feedback with clicks"""
    lost: int = 0
    """events without their chunk"""
    repeated: int = 0
    """chunks without their event, or beyond one for it"""
    sums_short: int = 0
    """ads and clicks that the item sums lack"""
    sums_over: int = 0
    """ads and clicks that the item sums have too many"""
    examples: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.repeated or self.sums_short or self.sums_over)


def audit_counts(kafka: KafkaSettings) -> CountAudit:
    """Every event must have exactly one chunk in its own partition, and the sums of each partition must be its events'.
    The counter must have read all of its input, and the topics must still have all that they ever had. An event too far
    ahead of its time, which the counter rejects, shows as lost."""
    chunks, sums = _expected(kafka)
    found = CountAudit(events=chunks.total())
    have_chunks, have_sums = _written(kafka)
    for what, count in (
        ("lost", chunks - have_chunks), ("repeated", have_chunks - chunks),
        ("sums_short", sums - have_sums), ("sums_over", have_sums - sums),
    ):  # fmt: skip
        setattr(found, what, count.total())
        found.examples += [f"{what}: {key}" for key in list(count)[: MAX_EXAMPLES - len(found.examples)]]
    return found


def _expected(kafka: KafkaSettings) -> tuple[Counter[_Chunk], Counter[_Sum]]:
    chunks: Counter[_Chunk] = Counter()
    sums: Counter[_Sum] = Counter()
    for r in (*read_all(kafka, "impressions"), *read_all(kafka, "feedback")):
        decode = decode_feedback if r.topic == "feedback" else decode_impression
        try:
            event: Impression | Feedback = decode(r.value or b"")
            check_key(r.key, event)
        except InvalidEvent:
            continue
        clicked = isinstance(event, Feedback)
        items = tuple(hash_id(i) for i in (event.clicked if isinstance(event, Feedback) else event.ads))
        if items:
            chunks[r.partition, hash_id(event.user), event.ts, clicked, items] += 1
        sums.update((r.partition, item, event.ts - event.ts % BUCKET_MS, clicked) for item in items)
    return chunks, sums


def _written(kafka: KafkaSettings) -> tuple[Counter[_Chunk], Counter[_Sum]]:
    chunks: Counter[_Chunk] = Counter()
    for r in read_all(kafka, "counts"):
        c = decode_count(r.value)
        chunks[r.partition, c.user, c.ts_ms, c.clicked, tuple(c.items.tolist())] += 1
    sums: Counter[_Sum] = Counter()
    for r in read_all(kafka, "item-counts"):
        d = decode_items(r.value)
        for item, shown, clicked in zip(d.items.tolist(), d.shown.tolist(), d.clicked.tolist(), strict=True):
            sums[r.partition, item, d.bucket_ms, False] += shown
            sums[r.partition, item, d.bucket_ms, True] += clicked
    return chunks, +sums
