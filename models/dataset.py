"""An event log as columns: impressions with their labels, candidates events, and the catalogue."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from models.api import F32, I64, U64, Feature, FeatureSpec, PairBatch
from models.catalogue import Catalogue
from models.features import Encoder, concat
from state.counts import CountSettings
from state.counts_offline import OfflineCounts
from topics.errors import ContractError
from topics.events import Candidates, Event, FeatureValue, Feedback, Impression, Item
from topics.ids import ItemId, hash_ids

CHUNK = 4096
"""events encoded at a time"""
INFERRED_FROM = 20_000
MAX_FEATURES = 32
RESERVED = ("history", "history_ts", "history_kind")
TOPIC_NAMES = ("category", "topic", "genre")


@dataclass(slots=True)
class AdEvents:
    """Ads of E events, each at its own event time, in the order of the log: what rolling counts count."""

    users: U64
    """[E]"""
    ts_ms: I64
    """[E]"""
    splits: I64
    """[E+1]"""
    items: U64

    @classmethod
    def of(cls, events: Sequence[tuple[str, int, list[ItemId]]]) -> AdEvents:
        """From (user, event time, items) of each event."""
        splits = np.zeros(len(events) + 1, np.int64)
        np.cumsum([len(items) for _, _, items in events], out=splits[1:])
        items = np.empty(int(splits[-1]), np.uint64)
        for k, (_, _, ids) in enumerate(events):
            items[splits[k] : splits[k + 1]] = hash_ids(ids)
        users = hash_ids([user for user, _, _ in events])
        return cls(users, np.array([ts for _, ts, _ in events], np.int64), splits, items)


@dataclass(slots=True)
class Dataset:
    spec: FeatureSpec
    catalogue: Catalogue
    impressions: PairBatch
    """in event-time order"""
    clicked: F32
    """[N] 1 where the pair was clicked"""
    converted: F32
    """[N] 1 where it converted"""
    candidates: PairBatch
    """in event-time order"""
    digest: str
    """sha256 of the file, for the manifest"""
    without_feedback: int
    """impressions left out because the log says nothing of what came of them"""
    shown: AdEvents
    """every impression of the log, those left out among them"""
    clicks: AdEvents
    """every feedback"""


def load(
    path: Path | str, spec: FeatureSpec | None = None, history_length: int = 20, topic: str | None = None
) -> Dataset:
    """Reads a log of `topics.readers` whole. Without a `spec` one is inferred from its first events; `topic` names
    another item category as the topic.

    All items are taken into the catalogue before impressions are encoded, as the roles do at start. Raises
    `ContractError` when the log has no impression with feedback.
    """
    from topics.readers import open_log

    events = list(open_log(path))
    if spec is None:
        spec = infer_spec(events, history_length)
    if topic is not None:
        spec = msgspec.structs.replace(spec, topic=topic)
    return build(events, spec, _digest(Path(path)))


def build(events: Iterable[Event], spec: FeatureSpec, digest: str = "") -> Dataset:
    """The columns of the events of one log."""
    shown: list[Impression] = []
    offered: list[Candidates] = []
    items: list[Item] = []
    clicks: list[tuple[str, int, list[ItemId]]] = []
    outcome: dict[str, Feedback] = {}
    for event in events:
        if isinstance(event, Impression):
            shown.append(event)
        elif isinstance(event, Candidates):
            offered.append(event)
        elif isinstance(event, Feedback):
            outcome[event.id] = event
            clicks.append((event.user, event.ts, event.clicked))
        else:
            items.append(event)
    catalogue = Catalogue(spec)
    catalogue.update(items)
    encoder = Encoder(spec, catalogue)
    known = [e for e in shown if e.id in outcome and e.ads]
    if not known:
        raise ContractError(f"no impression of the log has feedback ({len(shown)} impressions): nothing to learn from")
    known.sort(key=lambda e: e.ts)
    offered.sort(key=lambda e: e.ts)
    impressions = concat([encoder.impressions(known[i : i + CHUNK]) for i in range(0, len(known), CHUNK)])
    clicked = np.zeros(impressions.pairs, np.float32)
    converted = np.zeros(impressions.pairs, np.float32)
    for k, event in enumerate(known):
        pairs = slice(int(impressions.splits[k]), int(impressions.splits[k + 1]))
        feedback = outcome[event.id]
        if feedback.clicked:
            clicked[pairs] = np.isin(impressions.items[pairs], hash_ids(feedback.clicked))
        if feedback.converted:
            converted[pairs] = np.isin(impressions.items[pairs], hash_ids(feedback.converted))
    candidates = concat([encoder.candidates(offered[i : i + CHUNK]) for i in range(0, max(len(offered), 1), CHUNK)])
    return Dataset(
        spec, catalogue, impressions, clicked, converted, candidates, digest, len(shown) - len(known),
        AdEvents.of([(e.user, e.ts, e.ads) for e in shown]), AdEvents.of(clicks),
    )  # fmt: skip


def counted(
    shown: Sequence[tuple[str, int, list[ItemId]]],
    clicks: Sequence[tuple[str, int, list[ItemId]]],
    settings: CountSettings = CountSettings(),
) -> OfflineCounts:
    """Rolling counts of impressions and feedback, given as (user, event time, items) each."""
    counts = OfflineCounts(settings)
    for events, add in ((shown, counts.shown), (clicks, counts.clicked)):
        e = AdEvents.of(events)
        add(e.users, e.ts_ms, e.splits, e.items)
    return counts


def infer_spec(events: Iterable[Event], history_length: int = 20) -> FeatureSpec:
    """Features by what their values are: any string makes a category, else a number. The topic is the item category
    named category, topic or genre, else the one with the most values that still has under 2,000."""
    request: dict[str, list[FeatureValue]] = {}
    item: dict[str, list[FeatureValue]] = {}
    seen = Counter[str]()
    for event in events:
        kind = type(event).__name__
        if seen[kind] >= INFERRED_FROM:
            continue
        seen[kind] += 1
        if isinstance(event, Item):
            for name, value in event.features.items():
                item.setdefault(name, []).append(value)
        elif isinstance(event, Impression):
            for name, value in event.features.items():
                if name not in RESERVED:
                    request.setdefault(name, []).append(value)
            for name, column in (event.ad_features or {}).items():
                item.setdefault(name, []).extend(column)
    spec_item = _features(item)
    categories = [f.name for f in spec_item if f.kind == "category"]
    topic = next((n for n in TOPIC_NAMES if n in categories), None)
    if topic is None and categories:
        sizes = {n: len({str(v) for v in item[n]}) for n in categories}
        fit = [n for n in categories if 2 <= sizes[n] < 2000]
        topic = max(fit, key=lambda n: (sizes[n], n), default=None)
    return FeatureSpec(request=_features(request), item=spec_item, history_length=history_length, topic=topic)


def _features(values: dict[str, list[FeatureValue]]) -> tuple[Feature, ...]:
    out = []
    for name in sorted(values):
        kinds = {type(v) for v in values[name] if v is not None}
        if not kinds or list in kinds:
            continue
        out.append(Feature(name, "category" if str in kinds else "number"))
    return tuple(out[:MAX_FEATURES])


def request_pairs(batch: PairBatch, start: int, stop: int) -> npt.NDArray[np.bool_]:
    """[N] pairs of requests `start:stop`."""
    keep = np.zeros(batch.pairs, bool)
    keep[int(batch.splits[start]) : int(batch.splits[stop])] = True
    return keep


def _digest(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
