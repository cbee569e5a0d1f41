"""The public JSON events: types, strict decoding, and the rules an event must keep.

One JSON object per record (or per line of an event log). Times are milliseconds since the epoch, UTC.
Items are strings or integers (the same id either way); user ids are strings. See docs/event-log.md.

``type`` is required in event logs; on a topic it is written too, so that a record says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from topics.errors import DecodeError, EventRejected
from topics.ids import ItemId

Scalar = str | int | float | bool | None
FeatureValue = Scalar | list[Scalar]
Features = dict[str, FeatureValue]
"""Request or item features. Reserved request keys: ``history`` (item ids, oldest first, the triggering event
last), ``history_ts`` (ms, aligned with it), ``history_kind`` (small int or name per entry, aligned)."""
Columns = dict[str, list[Scalar]]
"""Features of the ids of one event, as columns aligned with them."""

MAX_ITEMS = 10_000
MAX_HISTORY = 10_000
MAX_ID_CHARS = 1_024
MAX_FEATURES = 256
MAX_EVENT_BYTES = 4 << 20
MIN_TS = 0
MAX_TS = 4_102_444_800_000  # 2100-01-01


class Candidates(msgspec.Struct, tag="candidates", tag_field="type", omit_defaults=True):
    """Pairs that retrieval expects to be ranked for `user` in the next hours."""

    id: str
    user: str
    ts: int
    items: list[ItemId]
    scores: list[float] | None = None
    features: Features = {}
    item_features: Columns | None = None


class Impression(msgspec.Struct, tag="impression", tag_field="type", omit_defaults=True):
    """A request to rank `ads` for `user`; in a log, in the order they were shown."""

    id: str
    user: str
    ts: int
    ads: list[ItemId]
    bids: list[float] | None = None
    features: Features = {}
    ad_features: Columns | None = None


class Feedback(msgspec.Struct, tag="feedback", tag_field="type", omit_defaults=True):
    """What came of impression `id`: the ads clicked and, where known, converted."""

    id: str
    user: str
    ts: int
    clicked: list[ItemId]
    converted: list[ItemId] | None = None


class Item(msgspec.Struct, tag="item", tag_field="type", omit_defaults=True):
    """Catalogue entry; a later one of the same id replaces it."""

    id: ItemId
    ts: int
    features: Features = {}


Event = Candidates | Impression | Feedback | Item


class RankedAds(msgspec.Struct, tag="ranked_ads", tag_field="type"):
    """Answer to impression `id`: columns aligned with `ads`, best first (pCTR x bid, ties in the order received)."""

    id: str
    user: str
    ts: int
    """event time of the impression, ms"""
    ads: list[ItemId]
    positions: list[int]
    """index of each ad in the impression's list (an id may occur twice)"""
    scores: list[float]
    """pCTR"""
    sources: list[str]
    """best slot filled: direct, topic, state, aggregate, similar, none"""
    ages_ms: list[int | None]
    """age of that slot's newest data at `ts`; null for none"""
    vm: str
    fm: str
    state: str
    """"live", or "restoring" when the store had not caught up with its changelog at start"""
    received_ms: int
    """wall clock when the ranker polled the impression"""
    ranked_ms: int
    """wall clock when the ranking was ready"""
    slots: dict[str, list[int | None]] | None = None
    """age in ms of every slot of every ad, null where empty (setting ranker.explain)"""


class Rejected(msgspec.Struct, frozen=True):
    """A record that cannot be used, as a value: what the DLQ stores beside the original bytes."""

    reason: str
    detail: str


_event_decoder = msgspec.json.Decoder(Event)
_decoders: dict[type, msgspec.json.Decoder[Any]] = {
    t: msgspec.json.Decoder(t) for t in (Candidates, Impression, Feedback, Item, RankedAds)
}
_encoder = msgspec.json.Encoder()
encode = _encoder.encode


def decode_event(data: bytes | bytearray | memoryview | str) -> Event:
    """One event of any type, decoded and checked. Raises `DecodeError` or `EventRejected`."""
    event: Event = _decode(_event_decoder, data)
    check(event)
    return event


def decode_candidates(data: bytes | bytearray | memoryview | str) -> Candidates:
    event: Candidates = _decode(_decoders[Candidates], data)
    check(event)
    return event


def decode_impression(data: bytes | bytearray | memoryview | str) -> Impression:
    event: Impression = _decode(_decoders[Impression], data)
    check(event)
    return event


def decode_feedback(data: bytes | bytearray | memoryview | str) -> Feedback:
    event: Feedback = _decode(_decoders[Feedback], data)
    check(event)
    return event


def decode_item(data: bytes | bytearray | memoryview | str) -> Item:
    event: Item = _decode(_decoders[Item], data)
    check(event)
    return event


def decode_ranked_ads(data: bytes | bytearray | memoryview | str) -> RankedAds:
    """Our own output: decoded strictly, without the rules of input events."""
    return _decode(_decoders[RankedAds], data)


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes | bytearray | memoryview | str) -> Any:
    if data is None or len(data) == 0:
        raise DecodeError("empty", "the record has no value")
    if len(data) > MAX_EVENT_BYTES:
        raise DecodeError("too_large", f"{len(data)} bytes, at most {MAX_EVENT_BYTES}")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as e:
        raise DecodeError("wrong_type", str(e)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise DecodeError("not_json", str(e)) from None


def check(event: Event) -> None:
    """The rules beyond types. Raises `EventRejected` with a stable reason code."""
    if not MIN_TS <= event.ts <= MAX_TS:
        raise EventRejected("time_out_of_range", f"ts = {event.ts} ms; expected {MIN_TS}..{MAX_TS}")
    if isinstance(event, Item):
        _check_ids("id", (event.id,))
        _check_features("features", event.features)
        return
    if not event.user:
        raise EventRejected("empty_user", "user is empty")
    if len(event.user) > MAX_ID_CHARS:
        raise EventRejected("id_too_long", f"user has {len(event.user)} characters, at most {MAX_ID_CHARS}")
    if not event.id:
        raise EventRejected("empty_id", "id is empty")
    if len(event.id) > MAX_ID_CHARS:
        raise EventRejected("id_too_long", f"id has {len(event.id)} characters, at most {MAX_ID_CHARS}")
    if isinstance(event, Candidates):
        _check_ids("items", event.items)
        _check_aligned_floats("scores", event.scores, len(event.items))
        _check_features("features", event.features)
        _check_columns("item_features", event.item_features, len(event.items))
    elif isinstance(event, Impression):
        _check_ids("ads", event.ads)
        _check_aligned_floats("bids", event.bids, len(event.ads))
        _check_features("features", event.features)
        _check_columns("ad_features", event.ad_features, len(event.ads))
    else:
        _check_ids("clicked", event.clicked)
        if event.converted is not None:
            _check_ids("converted", event.converted)


def _check_ids(field: str, ids: Sequence[ItemId]) -> None:
    if len(ids) > MAX_ITEMS:
        raise EventRejected("too_many_items", f"{field} has {len(ids)} ids, at most {MAX_ITEMS}")
    for i in ids:
        if type(i) is str:
            if not i:
                raise EventRejected("empty_id", f"{field} has an empty id")
            if len(i) > MAX_ID_CHARS:
                raise EventRejected("id_too_long", f"{field} has an id of {len(i)} characters, at most {MAX_ID_CHARS}")


def _check_aligned_floats(field: str, values: list[float] | None, n: int) -> None:
    if values is None:
        return
    if len(values) != n:
        raise EventRejected("not_aligned", f"{field} has {len(values)} values for {n} ids")
    if not all(map(math.isfinite, values)):
        raise EventRejected("not_finite", f"{field} has a value that is not finite")


def _check_features(field: str, features: Features) -> None:
    if len(features) > MAX_FEATURES:
        raise EventRejected("too_many_features", f"{field} has {len(features)} entries, at most {MAX_FEATURES}")
    for name, value in features.items():
        if type(value) is list:
            if len(value) > MAX_HISTORY:
                raise EventRejected("too_many_items", f"{field}.{name} has {len(value)} values, at most {MAX_HISTORY}")
            if name == "history":
                for v in value:
                    if type(v) is not str and type(v) is not int:
                        raise EventRejected("wrong_type", f"{field}.history has {v!r}; expected item ids")
        elif type(value) is float and not math.isfinite(value):
            raise EventRejected("not_finite", f"{field}.{name} is not finite")
        elif name in ("history", "history_ts", "history_kind"):
            raise EventRejected("wrong_type", f"{field}.{name} is {value!r}; expected a list")
    history = features.get("history")
    for name in ("history_ts", "history_kind"):
        column = features.get(name)
        if column is not None:
            n = len(history) if isinstance(history, list) else 0
            if not isinstance(column, list) or len(column) != n:
                m = len(column) if isinstance(column, list) else "no"
                raise EventRejected("not_aligned", f"{field}.{name} has {m} values for {n} of history")


def _check_columns(field: str, columns: Columns | None, n: int) -> None:
    if columns is None:
        return
    if len(columns) > MAX_FEATURES:
        raise EventRejected("too_many_features", f"{field} has {len(columns)} columns, at most {MAX_FEATURES}")
    for name, values in columns.items():
        if len(values) != n:
            raise EventRejected("not_aligned", f"{field}.{name} has {len(values)} values for {n} ids")
        for v in values:
            if type(v) is float and not math.isfinite(v):
                raise EventRejected("not_finite", f"{field}.{name} has a value that is not finite")
