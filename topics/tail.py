"""Reading topics for people: a consumer without a group, and records as readable lines or JSON.

Formatting is pure; `records` is the only function that talks to a broker. Nothing is committed, so looking never moves
a role's position, and only committed records are shown.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, Message, TopicPartition

from topics import dlq, packed, packed_counts
from topics.admin import SETTLE_S, partition_counts
from topics.contracts import BY_NAME
from topics.dlq import DeadLetter
from topics.errors import BrokerError, ContractError, InvalidEvent, SettingsError
from topics.events import clip
from topics.kafka import KafkaSettings, consumer, watermarks

TIMEOUT_S = 15.0
RECENT = 10
SHOWN_ITEMS = 5


@dataclass(frozen=True, slots=True)
class Record:
    topic: str
    """contract name where it is one of ours, else the full name"""
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def partitions(kafka: KafkaSettings, topic: str) -> list[int]:
    """Of an existing topic, by its full name. Never creates one. One of ours is looked for again for a moment: of
    several brokers one may not have heard of it yet."""
    ours = topic.removeprefix(kafka.prefix) in BY_NAME
    deadline = time.monotonic() + (SETTLE_S if ours else 0.0)
    while (found := partition_counts(kafka).get(topic)) is None:
        if time.monotonic() >= deadline:
            raise ContractError(f"there is no topic {topic} at {kafka.bootstrap}; `solaris topics create` makes ours")
        time.sleep(0.2)
    return list(range(found))


def records(
    kafka: KafkaSettings,
    topic: str,
    start: str = "recent",
    user: str | None = None,
    limit: int | None = None,
    follow: bool = True,
    idle_s: float = 0.25,
) -> Iterator[Record | None]:
    """Records of a topic, by contract name or full name, in order within a partition; across partitions as they come.

    `start`: "beginning", "latest", "recent" (the last few of each partition) or a time (`parse_time`), which is
    compared with the broker's timestamps. None is yielded whenever nothing came for `idle_s`: the moment to flush.
    Without `follow` it ends where the topic ended when it was opened.
    """
    full = kafka.topic(topic) if topic in BY_NAME else topic
    name = topic if topic in BY_NAME else topic.removeprefix(kafka.prefix)
    wanted = None if user is None else user.encode("utf-8", "surrogatepass")
    parts = partitions(kafka, full)
    source = consumer(kafka, kafka.prefix + "tail", enable_partition_eof=True)
    left = limit
    try:
        source.assign(_start(source, full, parts, start))
        open_parts = set(parts)
        while follow or open_parts:
            messages = source.consume(500, timeout=idle_s)
            for message in messages:
                if at_end(message):
                    open_parts.discard(message.partition())
                    continue
                if wanted is not None and message.key() != wanted:
                    continue
                yield record_of(message, name)
                if left is not None:
                    left -= 1
                    if left <= 0:
                        return
            if not messages:
                yield None
    except KafkaException as e:
        raise BrokerError(f"{full} at {kafka.bootstrap} cannot be read: {e.args[0].str()}") from None
    finally:
        source.close()


def one(kafka: KafkaSettings, topic: str, partition: int, offset: int) -> Record | None:
    """The record at an offset, or None where there is none (deleted, a transaction marker, not yet written)."""
    full = kafka.topic(topic) if topic in BY_NAME else topic
    if partition not in partitions(kafka, full):
        return None
    source = consumer(kafka, kafka.prefix + "tail", enable_partition_eof=True, auto_offset_reset="latest")
    try:
        low, high = watermarks(source, full, partition, TIMEOUT_S)
        if not low <= offset < high:
            return None
        source.assign([TopicPartition(full, partition, offset)])
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            message = source.poll(0.5)
            if message is None:
                continue
            if at_end(message) or message.offset() != offset:
                return None
            return record_of(message, topic)
        raise BrokerError(f"{full} at {kafka.bootstrap} does not answer within {TIMEOUT_S:g} s")
    except KafkaException as e:
        raise BrokerError(f"{full} at {kafka.bootstrap} cannot be read: {e.args[0].str()}") from None
    finally:
        source.close()


def at_end(message: Message) -> bool:
    """True for the end-of-partition mark. Raises `BrokerError` for any other error that is not passing."""
    error = message.error()
    if error is None:
        return False
    if error.code() == KafkaError._PARTITION_EOF:
        return True
    raise BrokerError(f"{message.topic() or 'the topic'} cannot be read: {error.str()}")


def record_of(message: Message, name: str) -> Record:
    return Record(
        topic=name,
        partition=message.partition(),
        offset=message.offset(),
        timestamp_ms=message.timestamp()[1],
        key=message.key(),
        value=message.value(),
        headers=tuple(message.headers() or ()),
    )


def dead_letter_of(record: Record | Message) -> DeadLetter:
    r = record if isinstance(record, Record) else record_of(record, "dlq")
    return dlq.read(r.partition, r.offset, r.timestamp_ms, r.key, r.value, r.headers)


def parse_time(text: str, now_ms: int) -> int:
    """ms since the epoch from "1573700000000", "2019-11-14T03:00:00Z" or "-15m" (s, m, h, d before now)."""
    units = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
    try:
        if text.isdigit():
            return int(text)
        if text.startswith("-") and text[-1:] in units:
            return now_ms - int(float(text[1:-1]) * units[text[-1]])
        moment = datetime.fromisoformat(text)
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        remedy = "expected beginning, latest, recent, milliseconds, 2019-11-14T03:00:00Z or -15m"
        raise SettingsError("--from", text, remedy) from None


def to_json(record: Record) -> dict[str, Any]:
    """One JSON-able object: where the record is, its key, its headers, and its value decoded."""
    out: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": _readable(record.key),
    }
    if record.headers:
        out["headers"] = {name: _readable(value) for name, value in record.headers}
    try:
        out["value"] = value_of(record)
    except InvalidEvent as e:
        out["value"] = _readable(record.value)
        out["error"] = str(e)
    return out


def value_of(record: Record) -> Any:
    """The value as plain lists, numbers and strings. Raises `DecodeError` where it is not what the topic carries."""
    if record.value is None:
        return None
    kind = BY_NAME[record.topic].value if record.topic in BY_NAME else ""
    if kind == "packed precompute":
        return _precompute(packed.decode_precompute(record.value))
    if kind == "packed embedding chunk":
        return _embedding(packed.decode_embedding(record.value))
    if kind == "packed count chunk":
        return _count(packed_counts.decode_count(record.value))
    if kind == "packed item deltas":
        return _item_deltas(packed_counts.decode_items(record.value))
    if record.topic == "dlq":
        return _readable(record.value)
    try:
        return msgspec.json.decode(record.value)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError):
        return _readable(record.value)


def to_text(record: Record, now_ms: int) -> str:
    """One line: key, event time, age (since the broker took it), place, and the value in short."""
    try:
        value = value_of(record)
        short = _short(record, value)
    except InvalidEvent as e:
        value, short = None, f"unreadable ({e})"
    event_ms = value.get("ts", value.get("ts_ms")) if isinstance(value, dict) else None
    key = "-" if record.key is None else clip(str(_readable(record.key)), 40)
    when = time_text(event_ms if type(event_ms) is int else record.timestamp_ms)
    age = age_text(now_ms - record.timestamp_ms)
    return f"{printable(key):<12} {when}  {age:>7} ago  {record.partition}@{record.offset}  {printable(short)}"


def time_text(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def age_text(ms: int) -> str:
    if ms < 1_000:
        return f"{max(ms, 0)} ms"
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000)):
        if ms >= 2 * size:
            return f"{ms // size} {unit}"
    return f"{ms / 1000:.1f} s"


def printable(text: str) -> str:
    """Control characters escaped: what others wrote must not drive the reader's terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def hexdump(data: bytes, limit: int) -> str:
    """Sixteen bytes a line: offset, hex, text; at most `limit` bytes and a line that says how many are left."""
    lines = []
    for at in range(0, min(len(data), limit), 16):
        row = data[at : min(at + 16, limit)]
        text = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
        lines.append(f"{at:08x}  {row.hex(' '):<47}  {text}")
    if len(data) > limit:
        lines.append(f"... {len(data) - limit} more bytes (--raw writes them all)")
    return "\n".join(lines)


def _start(source: Any, topic: str, parts: list[int], start: str) -> list[TopicPartition]:
    if start in ("beginning", "latest"):
        offset = OFFSET_BEGINNING if start == "beginning" else OFFSET_END
        return [TopicPartition(topic, p, offset) for p in parts]
    if start == "recent":
        out = []
        for p in parts:
            low, high = watermarks(source, topic, p, TIMEOUT_S)
            out.append(TopicPartition(topic, p, max(low, high - RECENT)))
        return out
    at = parse_time(start, int(time.time() * 1000))
    found: list[TopicPartition] = source.offsets_for_times(
        [TopicPartition(topic, p, at) for p in parts], timeout=TIMEOUT_S
    )
    return [TopicPartition(topic, tp.partition, tp.offset if tp.offset >= 0 else OFFSET_END) for tp in found]


def _readable(data: bytes | None) -> str | dict[str, str] | None:
    """Text where it is UTF-8, else {"base64": ...}."""
    if data is None:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def _floats(values: Any) -> list[Any]:
    """Shortest decimal that a 32-bit float reads back, so that 0.3 is not 0.30000001192."""
    rows = values.tolist() if values.ndim == 1 else None
    if rows is None:
        return [_floats(row) for row in values]
    # JSON has no NaN: a value that is not finite is shown as null.
    return [float(f"{v:.6g}") if v == v and abs(v) != float("inf") else None for v in rows]


def _precompute(r: packed.PrecomputeRequest) -> dict[str, Any]:
    return {
        "id": r.event_id,
        "user": f"{r.user:016x}",
        "ts": r.ts_ms,
        "spec": f"{r.spec:016x}",
        "items": [f"{i:016x}" for i in r.items.tolist()],
        "scores": _floats(r.scores),
        "item_features": _floats(r.item_features),
        "history": [f"{i:016x}" for i in r.history.tolist()],
        "history_ts": r.history_ts.tolist(),
        "history_kind": r.history_kind.tolist(),
        "request_features": _floats(r.request_features),
        "profile": _floats(r.profile),
    }


def _embedding(e: packed.EmbeddingChunk) -> dict[str, Any]:
    vectors = e.vectors.astype("f4")
    if e.scales is not None:
        vectors = vectors * e.scales[:, None]
    return {
        "id": e.event_id,
        "user": f"{e.user:016x}",
        "ts": e.ts_ms,
        "model": f"{e.model:016x}",
        "fingerprint": f"{e.fingerprint:016x}",
        "items": [f"{i:016x}" for i in e.items.tolist()],
        "topics": e.topics.tolist(),
        "vectors": _floats(vectors),
        "format": "f16" if e.scales is None else "i8",
        "state": _floats(e.state),
        "profile": _floats(e.profile),
    }


def _count(c: packed_counts.CountChunk) -> dict[str, Any]:
    return {
        "user": f"{c.user:016x}",
        "ts": c.ts_ms,
        "what": "clicked" if c.clicked else "shown",
        "items": [f"{i:016x}" for i in c.items.tolist()],
    }


def _item_deltas(d: packed_counts.ItemDeltas) -> dict[str, Any]:
    return {
        "ts": d.bucket_ms,
        "items": [f"{i:016x}" for i in d.items.tolist()],
        "shown": d.shown.tolist(),
        "clicked": d.clicked.tolist(),
    }


def _short(record: Record, value: Any) -> str:
    if record.topic == "dlq":
        letter = dead_letter_of(record)
        parked = f"  parked: {letter.parked}" if letter.parked else ""
        place = f"{letter.source_topic}/{letter.source_partition}@{letter.source_offset}"
        return clip(f"{letter.reason} from {place} by {letter.role}: {letter.detail}{parked}", 300)
    if value is None:
        return "(no value)"
    if not isinstance(value, dict):
        return clip(str(value), 200)
    make = _SHORT.get(record.topic)
    if make is not None:
        try:
            return clip(make(value), 400)
        except (KeyError, TypeError, IndexError, ValueError):
            pass  # not our shape: shown as it is
    return clip(msgspec.json.encode(value).decode(), 400)


def _some(ids: Any) -> str:
    more = f" and {len(ids) - SHOWN_ITEMS} more" if len(ids) > SHOWN_ITEMS else ""
    return " ".join(map(str, ids[:SHOWN_ITEMS])) + more


def _short_ranked(v: dict[str, Any]) -> str:
    rows = zip(v["ads"], v["scores"], v["sources"], v["ages_ms"], strict=True)
    shown = [
        f"{ad} {score:.4f} {source}" + (f" {age_text(age)}" if age is not None else "")
        for (ad, score, source, age), _ in zip(rows, range(SHOWN_ITEMS), strict=False)
    ]
    more = f" | {len(v['ads']) - SHOWN_ITEMS} more" if len(v["ads"]) > SHOWN_ITEMS else ""
    return f"{v['id']}: {' | '.join(shown)}{more}  [{v['state']}, vm {v['vm']}, fm {v['fm']}]"


def _short_embedding(v: dict[str, Any]) -> str:
    dim = len(v["vectors"][0]) if v["vectors"] else 0
    return (
        f"{v['id']}: {len(v['items'])} pairs of {dim} {v['format']}, state of {len(v['state'])},"
        f" model {v['model'][:8]}, items {_some([i[:8] for i in v['items']])}"
    )


def _short_precompute(v: dict[str, Any]) -> str:
    pairs = [f"{item[:8]} {score}" for item, score in zip(v["items"], v["scores"], strict=True)]
    return f"{v['id']}: {len(pairs)} pairs, history of {len(v['history'])}, {_some(pairs)}"


def _short_item_deltas(v: dict[str, Any]) -> str:
    each = [f"{i[:8]} +{s}/+{c}" for i, s, c in zip(v["items"], v["shown"], v["clicked"], strict=True)]
    return f"{len(each)} items, shown {sum(v['shown'])}, clicked {sum(v['clicked'])}: {_some(each)}"


_SHORT = {
    "candidates": lambda v: f"{v['id']}: {len(v['items'])} items, {_some(v['items'])}",
    "impressions": lambda v: f"{v['id']}: {len(v['ads'])} ads, {_some(v['ads'])}",
    "feedback": lambda v: f"{v['id']}: {len(v['clicked'])} clicked, {_some(v['clicked'])}",
    "ranked-ads": _short_ranked,
    "embeddings": _short_embedding,
    "precompute": _short_precompute,
    "counts": lambda v: f"{len(v['items'])} {v['what']}, items {_some([i[:8] for i in v['items']])}",
    "item-counts": _short_item_deltas,
}
