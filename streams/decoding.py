"""Records to events: a bad record is a value with a reason, and never harms its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from streams.step import Dead, Record
from topics.errors import EventRejected, InvalidEvent
from topics.events import (
    Candidates,
    Feedback,
    HashedCandidates,
    Impression,
    Item,
    Rejected,
    check_key,
    decode_candidates_hashed,
    decode_item,
)
from topics.id_lists import hash_list
from topics.ids import hash_bytes, hash_id
from topics.packed import PrecomputeRequest, decode_precompute

E = TypeVar("E", Candidates | HashedCandidates, Impression, Feedback)


def hashed_candidates(value: bytes) -> Candidates | HashedCandidates:
    """A candidates event as the verifier needs it: its items' hashes, made from the record without the items' strings
    where they are written as usual."""
    return decode_candidates_hashed(value, hash_list)


def keyed_events(
    records: Sequence[Record], decode: Callable[[bytes], E], max_ahead_ms: int
) -> tuple[list[E], list[int], list[Dead]]:
    """-> (events, the index of each one's record, what was rejected). An event's key must be its user, and its time at
    most `max_ahead_ms` after the wall clock of the poll or, where that is later, of the broker: a host whose clock was
    set back refuses nothing for it."""
    events: list[E] = []
    sources: list[int] = []
    dead: list[Dead] = []
    for i, r in enumerate(records):
        try:
            event = decode(r.value or b"")
            check_key(r.key, event)
            now_ms = max(r.received_ms, r.appended_ms)
            if event.ts > now_ms + max_ahead_ms:
                ahead = event.ts - now_ms
                dead.append(Dead(i, Rejected("far_future", f"ts = {event.ts} is {ahead} ms ahead of the clock")))
            else:
                events.append(event)
                sources.append(i)
        except InvalidEvent as e:
            dead.append(Dead(i, Rejected(e.reason, e.detail)))
    return events, sources, dead


def catalogue_change(key: bytes | None, value: bytes | None) -> tuple[int, Item | None]:
    """(hash of the item's id, its record) of a record of `items`; a null value deletes the item. The key must be the
    item's id, for compaction goes by it. Raises `InvalidEvent`."""
    if value is None:
        if not key:
            raise EventRejected("missing_key", "a null value without a key deletes nothing")
        return hash_bytes(key), None
    item = decode_item(value)
    check_key(key, item)
    return hash_id(item.id), item


def precompute_requests(
    records: Sequence[Record], spec_hash: int, item_features: int, request_features: int
) -> tuple[list[PrecomputeRequest], list[int], list[Dead]]:
    """As `keyed_events`, for packed requests: the key's hash must be the request's user, its columns the bundle's."""
    requests: list[PrecomputeRequest] = []
    sources: list[int] = []
    dead: list[Dead] = []
    for i, r in enumerate(records):
        try:
            q = decode_precompute(r.value)
        except InvalidEvent as e:
            dead.append(Dead(i, Rejected(e.reason, e.detail)))
            continue
        if (
            q.spec != spec_hash
            or q.item_features.shape[0] != item_features
            or len(q.request_features) != request_features
        ):
            text = f"feature spec {q.spec:016x}, this bundle has {spec_hash:016x}: both roles must serve one bundle"
            dead.append(Dead(i, Rejected("wrong_spec", text)))
        elif r.key is None or hash_bytes(r.key) != q.user:
            dead.append(Dead(i, Rejected("key_mismatch", "the record's key is not the user of the request")))
        else:
            requests.append(q)
            sources.append(i)
    return requests, sources, dead
