"""The public JSON events: types, strict decoding, and the rules an event must keep.

One JSON object per record (or per line of an event log). Times are milliseconds since the epoch, UTC.
Items are strings or integers (the same id either way); user ids are strings. See docs/event-log.md.

``type`` is required in event logs; on a topic it is written too, so that a record says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

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
MIN_INT, MAX_INT = -(2**63), 2**64 - 1
MAX_FLOAT = 3.4028234663852886e38  # the largest float32: models compute in it
MAX_DETAIL_CHARS = 500


class Candidates(msgspec.Struct, tag="candidates", tag_field="type", omit_defaults=True):
    """Pairs that retrieval expects to be ranked for `user` in the next hours."""

    id: str
    user: str
    ts: int
    items: list[ItemId]
    scores: list[float] | None = None
    features: Features = {}
    item_features: Columns | None = None


class _RawCandidates(msgspec.Struct, tag="candidates", tag_field="type", gc=False):
    id: str
    user: str
    ts: int
    items: msgspec.Raw
    scores: list[float] | None = None
    features: Features = {}
    item_features: Columns | None = None


class HashedCandidates(msgspec.Struct, gc=False):
    """`Candidates` for one who needs of the items their hashes only."""

    id: str
    user: str
    ts: int
    items: npt.NDArray[np.uint64]
    scores: list[float] | None
    features: Features
    item_features: Columns | None


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
    vm_scores: list[float] | None = None
    """pCTR of the VM alone, in a share of the messages (setting ranker.vm_scores_share)"""


class Rejected(msgspec.Struct, frozen=True):
    """A record that cannot be used, as a value: what the DLQ stores beside the original bytes."""

    reason: str
    detail: str


_event_decoder = msgspec.json.Decoder(Event)
_decoders: dict[type, msgspec.json.Decoder[Any]] = {
    t: msgspec.json.Decoder(t) for t in (Candidates, Impression, Feedback, Item, RankedAds)
}
_raw_decoder = msgspec.json.Decoder(_RawCandidates)
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


def decode_candidates_hashed(
    data: bytes | bytearray | memoryview | str, hash_list: Callable[[msgspec.Raw], npt.NDArray[np.uint64] | None]
) -> Candidates | HashedCandidates:
    """As `decode_candidates`, without making ids of the items where `hash_list` (`topics.id_lists`) can do without."""
    raw: _RawCandidates = _decode(_raw_decoder, data)
    items = hash_list(raw.items)
    if items is None:
        return decode_candidates(data)
    event = HashedCandidates(raw.id, raw.user, raw.ts, items, raw.scores, raw.features, raw.item_features)
    _check_time(event.ts)
    _check_names(event.user, event.id)
    _check_aligned_floats("scores", event.scores, len(items))
    _check_features("features", event.features)
    _check_columns("item_features", event.item_features, len(items))
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


def check_key(key: bytes | None, event: Event | HashedCandidates) -> None:
    """A record's key is the user id (the item id for items), UTF-8: it decides the partition, and with it the store
    that is asked. Raises `EventRejected`."""
    want = str(event.id) if isinstance(event, Item) else event.user
    if not key:
        raise EventRejected("missing_key", f"the record has no key; expected {clip(repr(want), 80)}")
    if key != want.encode("utf-8", "surrogatepass"):
        raise EventRejected("key_mismatch", f"the key is {clip(repr(key), 80)}, the event's is {clip(repr(want), 80)}")


def clip(text: str, limit: int = MAX_DETAIL_CHARS) -> str:
    """`text`, or its beginning and its length: what was received may be long, what is said about it is not."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes | bytearray | memoryview | str) -> Any:
    if data is None or len(data) == 0:
        raise DecodeError("empty", "the record has no value")
    if len(data) > MAX_EVENT_BYTES:
        raise DecodeError("too_large", f"{len(data)} bytes, at most {MAX_EVENT_BYTES}")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as e:
        text = clip(str(e))
        if "`$.type`" in text or "field `type`" in text or text.startswith("Invalid value"):
            raise DecodeError("unknown_type", text) from None
        raise DecodeError("wrong_type", text) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as e:
        raise DecodeError("not_json", clip(str(e))) from None


def check(event: Event) -> None:
    """The rules beyond types. Raises `EventRejected` with a stable reason code.

    Most values are fine, so lists are looked at in whole by functions of C speed; only a list that fails is walked.
    """
    _check_time(event.ts)
    if isinstance(event, Item):
        _check_ids("id", (event.id,))
        _check_features("features", event.features)
        return
    _check_names(event.user, event.id)
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


def _check_time(ts: int) -> None:
    if not MIN_TS <= ts <= MAX_TS:
        raise EventRejected("time_out_of_range", f"ts = {ts} ms; expected {MIN_TS}..{MAX_TS}")


def _check_names(user: str, name: str) -> None:
    if not user:
        raise EventRejected("empty_user", "user is empty")
    if len(user) > MAX_ID_CHARS:
        raise EventRejected("id_too_long", f"user has {len(user)} characters, at most {MAX_ID_CHARS}")
    if not name:
        raise EventRejected("empty_id", "id is empty")
    if len(name) > MAX_ID_CHARS:
        raise EventRejected("id_too_long", f"id has {len(name)} characters, at most {MAX_ID_CHARS}")


def _check_ids(field: str, ids: Sequence[Any]) -> None:
    if len(ids) > MAX_ITEMS:
        raise EventRejected("too_many_items", f"{field} has {len(ids)} ids, at most {MAX_ITEMS}")
    try:
        # None empty, so none is longer than what the others leave of the total; else the longest is looked for.
        if all(ids) and (len("".join(ids)) - len(ids) < MAX_ID_CHARS or max(map(len, ids)) <= MAX_ID_CHARS):
            return
    except TypeError:  # not strings only
        pass
    for i in ids:
        if type(i) is str:
            if not i:
                raise EventRejected("empty_id", f"{field} has an empty id")
            if len(i) > MAX_ID_CHARS:
                raise EventRejected("id_too_long", f"{field} has an id of {len(i)} characters, at most {MAX_ID_CHARS}")
        elif type(i) is not int:
            raise EventRejected("wrong_type", f"{field} has {clip(repr(i), 80)}; expected ids, strings or integers")
        elif not MIN_INT <= i <= MAX_INT:
            raise EventRejected("id_out_of_range", f"{field} has an integer id of more than 64 bits")


def _check_aligned_floats(field: str, values: list[float] | None, n: int) -> None:
    if values is None:
        return
    if len(values) != n:
        raise EventRejected("not_aligned", f"{field} has {len(values)} values for {n} ids")
    if n:
        _check_values(values, field)


def _check_values(values: Sequence[Any], *where: str) -> None:
    """Numbers of a list that is not empty must be finite as the float32 they become; the rest is not looked at."""
    try:
        if type(values[0]) is str:
            "".join(values)  # strings only: nothing to check
            return
        if math.hypot(*values) <= MAX_FLOAT:  # no smaller than its largest term; NaN and infinity fail too
            return
    except (TypeError, OverflowError):  # mixed, or an integer beyond 64-bit floats
        pass
    for v in values:
        if type(v) is float or type(v) is int:
            _check_number(v, *where)


def _check_number(value: float, *where: str) -> None:
    if not -MAX_FLOAT <= value <= MAX_FLOAT:  # false for NaN
        path = ".".join(clip(name, 80) for name in where)
        raise EventRejected("not_finite", f"{path} has a number that is not finite or beyond 32-bit floats")


def _check_features(field: str, features: Features) -> None:
    if len(features) > MAX_FEATURES:
        raise EventRejected("too_many_features", f"{field} has {len(features)} entries, at most {MAX_FEATURES}")
    for name, value in features.items():
        if type(value) is list:
            if len(value) > MAX_HISTORY:
                where = f"{field}.{clip(name, 80)}"
                raise EventRejected("too_many_items", f"{where} has {len(value)} values, at most {MAX_HISTORY}")
            if name == "history":
                _check_ids(field + ".history", value)
            elif name == "history_ts":
                _check_times(field + ".history_ts", value)
            elif value:
                _check_values(value, field, name)
        elif type(value) is float or type(value) is int:
            _check_number(value, field, name)
    for name in ("history", "history_ts", "history_kind"):
        column = features.get(name)
        if column is None:
            continue
        if type(column) is not list:
            raise EventRejected("wrong_type", f"{field}.{name} is {clip(repr(column), 80)}; expected a list")
        n = len(features.get("history") or ())  # type: ignore[arg-type]
        if len(column) != n:
            raise EventRejected("not_aligned", f"{field}.{name} has {len(column)} values for {n} of history")


def _check_times(field: str, values: list[Any]) -> None:
    if set(map(type, values)) == {int} and min(values) >= -1 and max(values) <= MAX_TS:
        return
    for v in values:
        if v is not None and type(v) is not int:
            raise EventRejected("wrong_type", f"{field} has {clip(repr(v), 80)}; expected milliseconds or null")
        if v is not None and not -1 <= v <= MAX_TS:
            raise EventRejected("time_out_of_range", f"{field} has {v} ms; expected -1 (unknown) or {MIN_TS}..{MAX_TS}")


def _check_columns(field: str, columns: Columns | None, n: int) -> None:
    if columns is None:
        return
    if len(columns) > MAX_FEATURES:
        raise EventRejected("too_many_features", f"{field} has {len(columns)} columns, at most {MAX_FEATURES}")
    for name, values in columns.items():
        if len(values) != n:
            raise EventRejected("not_aligned", f"{field}.{clip(name, 80)} has {len(values)} values for {n} ids")
        if n:
            _check_values(values, field, name)
