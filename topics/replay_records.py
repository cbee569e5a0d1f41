"""An event log as the records that go to the topics: (position, topic, key, value, event time, pairs).

The position is the record's place in the log's stream (line of a JSON Lines file, else ordinal of the event), the same
in every run over the same log, so that a replay can go on from it. A JSON Lines file without derived candidates is
passed through byte for byte, never encoded again. Its lines are checked for being JSON of one of the types with usable
ids, user, time and item list, which costs a third of decoding everything; the rules of features and aligned columns
are checked too when the log is read strictly, else left to the roles, which put what they cannot use in the dead
letters. `solaris log check` checks everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from topics.errors import InvalidEvent
from topics.events import (
    MAX_EVENT_BYTES,
    MAX_ID_CHARS,
    MAX_ITEMS,
    MAX_TS,
    MIN_TS,
    Candidates,
    Event,
    Features,
    Feedback,
    Impression,
    Item,
    decode_event,
    encode,
)
from topics.readers import EventLog, jsonl

TOPIC_OF: dict[type, str] = {
    Candidates: "candidates",
    Impression: "impressions",
    Feedback: "feedback",
    Item: "items",
}
TOPICS = tuple(TOPIC_OF.values())


class Record(msgspec.Struct, frozen=True, gc=False):
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


_Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
_Time = Annotated[int, Meta(ge=MIN_TS, le=MAX_TS)]
_Items = Annotated[list[_Id | int], Meta(max_length=MAX_ITEMS)]


class _Candidates(msgspec.Struct, tag="candidates", gc=False):
    id: _Id
    user: _Id
    ts: _Time
    items: _Items


class _Impression(msgspec.Struct, tag="impression", gc=False):
    id: _Id
    user: _Id
    ts: _Time
    ads: _Items


class _Feedback(msgspec.Struct, tag="feedback", gc=False):
    id: _Id
    user: _Id
    ts: _Time
    clicked: _Items


class _Item(msgspec.Struct, tag="item", gc=False):
    id: _Id | int
    ts: _Time


_light = msgspec.json.Decoder(_Candidates | _Impression | _Feedback | _Item)


def _light_record(number: int, line: bytes) -> Record:
    """Raises `msgspec.DecodeError` (or its kin) for a line that does not pass."""
    event = _light.decode(line)
    kind = type(event)
    if kind is _Candidates:
        return Record(number, "candidates", event.user, line, event.ts, len(event.items))
    if kind is _Impression:
        return Record(number, "impressions", event.user, line, event.ts, len(event.ads))
    if kind is _Feedback:
        return Record(number, "feedback", event.user, line, event.ts, 0)
    return Record(number, "items", str(event.id), line, event.ts, 0)


def _raw(log: EventLog, topics: Collection[str], after: int, shift_ms: int) -> Iterator[Record]:
    path, bad = log.path, log.bad
    light = not shift_ms and not bad.strict
    for number, line in jsonl.lines(path, bad, log.progress):
        if number <= after:
            continue
        if light and len(line) <= MAX_EVENT_BYTES:
            try:
                record = _light_record(number, line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # decoded whole below, for the reason
            else:
                if record.topic in topics:
                    yield record
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
