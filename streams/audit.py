"""What came out against what went in, by reading the topics back: nothing here trusts a counter.

Every impression must have been ranked exactly once, or be in the DLQ; every ranked ad must be one of its impression's;
every source and age must be founded in the changelog: a *direct* ad of age `a` needs a chunk of that user, with that
item, of event time `ts - a`, inside the TTL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from state.api import ChangelogRecord, Lookup, StoreDims, StoreSettings
from state.store import open_store
from topics import dlq
from topics.errors import InvalidEvent
from topics.events import Impression, RankedAds, decode_impression, decode_ranked_ads
from topics.ids import hash_id
from topics.kafka import KafkaSettings
from topics.packed import EmbeddingChunk, decode_embedding
from topics.tail import Record, records

MAX_EXAMPLES = 10


@dataclass(slots=True)
class Audit:
    impressions: int = 0
    """readable impressions in the topic"""
    ranked: int = 0
    lost: int = 0
    """impressions neither ranked nor in the DLQ"""
    duplicated: int = 0
    """answers beyond one per impression"""
    invented: int = 0
    """answers to impressions that are not in the topic"""
    rejected: int = 0
    """records of the topic that are in the DLQ"""
    wrong_ads: int = 0
    """answers whose ads are not exactly the impression's"""
    unfounded: int = 0
    """ads whose source and age no chunk of the changelog explains"""
    examples: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.duplicated or self.invented or self.wrong_ads or self.unfounded)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _note(self, text: str) -> None:
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(text)


def read_all(kafka: KafkaSettings, topic: str) -> list[Record]:
    """All committed records of a topic up to its present end."""
    return [r for r in records(kafka, topic, start="beginning", follow=False) if r is not None]


def audit(kafka: KafkaSettings, ttl_ms: int = StoreSettings().ttl_ms) -> Audit:
    return check(
        read_all(kafka, "impressions"),
        read_all(kafka, "ranked-ads"),
        read_all(kafka, "dlq"),
        read_all(kafka, "embeddings"),
        kafka.topic("impressions"),
        ttl_ms,
    )


def check(
    shown: Iterable[Record],
    answers: Iterable[Record],
    dead: Iterable[Record],
    changelog: Iterable[Record],
    impressions_topic: str,
    ttl_ms: int,
) -> Audit:
    out = Audit()
    rejected = {_origin(r) for r in dead}
    asked: dict[tuple[str, str], list[Impression]] = {}
    for r in shown:
        if (impressions_topic, r.partition, r.offset) in rejected:
            out.rejected += 1
            continue
        try:
            impression = decode_impression(r.value or b"")
        except InvalidEvent as e:
            out.lost += 1
            out._note(f"impressions {r.partition}@{r.offset} is unreadable ({e.reason}) and not in the DLQ")
            continue
        out.impressions += 1
        asked.setdefault((impression.user, impression.id), []).append(impression)
    founded = _chunks(changelog)
    answered: Counter[tuple[str, str]] = Counter()
    for r in answers:
        ranked = decode_ranked_ads(r.value or b"")
        out.ranked += 1
        key = (ranked.user, ranked.id)
        of_key = asked.get(key)
        if of_key is None:
            out.invented += 1
            out._note(f"ranked-ads {r.partition}@{r.offset}: no impression {ranked.id!r} of {ranked.user!r}")
            continue
        answered[key] += 1
        if not any(_same_ads(ranked, impression) for impression in of_key):
            out.wrong_ads += 1
            out._note(f"ranked-ads {r.partition}@{r.offset}: ads are not those of impression {ranked.id!r}")
        bad = _unfounded(ranked, founded, ttl_ms)
        if bad:
            out.unfounded += len(bad)
            out._note(f"ranked-ads {r.partition}@{r.offset}: {bad[0]}")
    for key, events in asked.items():
        n = answered[key]
        if n < len(events):
            out.lost += len(events) - n
            out._note(f"impression {key[1]!r} of {key[0]!r} was not ranked")
        out.duplicated += max(0, n - len(events))
    return out


def _origin(r: Record) -> tuple[str, int, int]:
    headers = {k: v or b"" for k, v in r.headers}
    return (
        headers.get(dlq.SOURCE_TOPIC, b"").decode(),
        int(headers.get(dlq.SOURCE_PARTITION, b"-1")),
        int(headers.get(dlq.SOURCE_OFFSET, b"-1")),
    )


def _same_ads(ranked: RankedAds, impression: Impression) -> bool:
    return (
        ranked.ts == impression.ts
        and sorted(ranked.positions) == list(range(len(impression.ads)))
        and [impression.ads[i] for i in ranked.positions] == ranked.ads
    )


_Founded = tuple[Mapping[int, Mapping[int, set[int]]], Mapping[int, set[int]]]


def _chunks(changelog: Iterable[Record]) -> _Founded:
    """-> (user -> item -> event times of its pairs; user -> event times of its states)."""
    pairs: dict[int, dict[int, set[int]]] = {}
    states: dict[int, set[int]] = {}
    for r in changelog:
        chunk: EmbeddingChunk = decode_embedding(r.value)
        of_user = pairs.setdefault(chunk.user, {})
        for item in chunk.items.tolist():
            of_user.setdefault(item, set()).add(chunk.ts_ms)
        if len(chunk.state):
            states.setdefault(chunk.user, set()).add(chunk.ts_ms)
    return pairs, states


def _unfounded(ranked: RankedAds, founded: _Founded, ttl_ms: int) -> list[str]:
    user = hash_id(ranked.user)
    pairs, states = founded[0].get(user, {}), founded[1].get(user, set())
    any_pair = {ts for times in pairs.values() for ts in times}
    bad = []
    for ad, source, age in zip(ranked.ads, ranked.sources, ranked.ages_ms, strict=True):
        if source == "none":
            good = age is None
        elif age is None or age < 0:
            good = False
        elif source == "direct":
            good = age < ttl_ms and ranked.ts - age in pairs.get(hash_id(ad), ())
        elif source == "state":
            good = age < ttl_ms and ranked.ts - age in states
        elif source in ("topic", "aggregate"):
            good = ranked.ts - age in any_pair
        else:
            good = True  # similar: other users' aggregates, whose ages are theirs
        if not good:
            bad.append(f"ad {ad!r} says {source} of age {age}, which nothing in the changelog explains")
    return bad


def store_differences(
    folder: Path, changelog: Iterable[Record], partition: int, settings: StoreSettings, dims: StoreDims, scratch: Path
) -> list[str]:
    """Opens the store of a stopped role and one rebuilt from the changelog up to the same offset, and compares every
    look-up of every user bit by bit, at each chunk's event time and around the end of its life."""
    of_partition = [r for r in changelog if r.partition == partition]
    kept = open_store(folder, settings)
    fresh = open_store(scratch, settings)
    try:
        end = kept.position or 0
        below = [r for r in of_partition if r.offset < end]
        fresh.apply([ChangelogRecord(r.offset, r.value or b"") for r in below], next_offset=end)
        fresh.expire(kept.clock_ms)
        chunks = [decode_embedding(r.value) for r in below]
        out = []
        for model in {c.model for c in chunks}:
            questions: dict[int, set[int]] = {}
            items: dict[int, set[int]] = {}
            for c in chunks:
                if c.model == model:
                    life = (c.ts_ms, c.ts_ms + settings.ttl_ms - 1, c.ts_ms + settings.ttl_ms)
                    questions.setdefault(c.user, set()).update(life)
                    items.setdefault(c.user, set()).update(c.items.tolist())
            for user, times in questions.items():
                wanted = np.array(sorted(items[user]), np.uint64)
                for now in sorted(times):
                    a, b = (_ask(s, user, wanted, now, model, dims) for s in (kept, fresh))
                    for name in Lookup.__dataclass_fields__:
                        if getattr(a, name).tobytes() != getattr(b, name).tobytes():
                            out.append(f"partition {partition}, user {user:016x}, now {now}: {name} differs")
        return out
    finally:
        kept.close()
        fresh.close()


def _ask(store: Any, user: int, items: Any, now: int, model: int, dims: StoreDims) -> Lookup:
    found: Lookup = store.lookup(
        np.array([user], np.uint64), np.array([0, len(items)], np.int64), items, np.zeros(len(items), np.uint32),
        np.array([now], np.int64), model, dims,
    )  # fmt: skip
    return found
