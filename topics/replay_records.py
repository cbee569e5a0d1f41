"""An event log as the records that go to the topics: (position, topic, key, value, event time, pairs).

The position is the record's place in the log's stream (line of a JSON Lines file, else ordinal of the event), the same
in every run over the same log, so that a replay can go on from it. A JSON Lines file without derived candidates is
passed through byte for byte; every line is decoded to be checked, never encoded again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from topics.errors import InvalidEvent
from topics.events import Candidates, Event, Features, Feedback, Impression, Item, decode_event, encode
from topics.readers import EventLog, jsonl

TOPIC_OF: dict[type, str] = {
    Candidates: "candidates",
    Impression: "impressions",
    Feedback: "feedback",
    Item: "items",
}
TOPICS = tuple(TOPIC_OF.values())


class Record(NamedTuple):
    position: int
    topic: str
    """without the prefix"""
    key: str
    value: bytes
    ts: int
    """event time, ms"""
    pairs: int


def records(log: EventLog, topics: Collection[str], after: int = 0, shift_ms: int = 0) -> Iterator[Record]:
    """Records of positions above `after`, in the order of the log. Times are moved by `shift_ms`; those of 0 ("always
    there", catalogue entries) are not."""
    if log.raw:
        yield from _raw(log, topics, after, shift_ms)
        return
    for position, event in enumerate(log.events(), 1):
        if position > after and TOPIC_OF[type(event)] in topics:
            if shift_ms:
                shift(event, shift_ms)
            yield _record(position, event, encode(event))


def first_time(log: EventLog) -> int | None:
    """Time of the first event that is not a catalogue entry."""
    return next((e.ts for e in log.events() if not isinstance(e, Item)), None)


def shift(event: Event, ms: int) -> None:
    """Moves the event's time and its `history_ts`, in place. 0 and negative entries mean "unknown" and stay."""
    if event.ts > 0:
        event.ts += ms
    if isinstance(event, Feedback):
        return
    times = event.features.get("history_ts")
    if isinstance(times, list):
        features: Features = dict(event.features)
        features["history_ts"] = [t + ms if isinstance(t, int) and t > 0 else t for t in times]
        event.features = features


def _raw(log: EventLog, topics: Collection[str], after: int, shift_ms: int) -> Iterator[Record]:
    path, bad = log.path, log.bad
    for number, line in jsonl.lines(path, bad, log.progress):
        if number <= after:
            continue
        try:
            event = decode_event(line)
        except InvalidEvent as e:
            bad.add(path, number, e, line)
            continue
        if TOPIC_OF[type(event)] not in topics:
            continue
        if shift_ms:
            shift(event, shift_ms)
            line = encode(event)
        yield _record(number, event, line)


def _record(position: int, event: Event, value: bytes) -> Record:
    if isinstance(event, Item):
        return Record(position, "items", str(event.id), value, event.ts, 0)
    if isinstance(event, Impression):
        return Record(position, "impressions", event.user, value, event.ts, len(event.ads))
    if isinstance(event, Candidates):
        return Record(position, "candidates", event.user, value, event.ts, len(event.items))
    return Record(position, "feedback", event.user, value, event.ts, 0)
