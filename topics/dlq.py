"""Dead letters: what a role writes to `solaris.dlq` for a record it cannot use, and how that is read back.

Key and value are the bytes as received. Headers say the rest (all UTF-8):

    ==========================  =================================================================================
    solaris-reason              stable code, such as ``not_json``, ``time_out_of_range``, ``key_mismatch``
    solaris-detail              one line for people, at most 500 characters
    solaris-source-topic        full name
    solaris-source-partition    number
    solaris-source-offset       number
    solaris-role                who rejected it
    solaris-time                event or wall time in ms, where the role gave one; the record's own timestamp is the
                                broker's
    solaris-attempt             retries so far; a record put back by `solaris dlq retry` carries it too
    solaris-size                full size of the value in bytes, only where it was cut
    solaris-xxh3                128-bit xxh3 of the full value, only where it was cut
    solaris-key-size            full size of the key, only where it was cut
    solaris-parked              why it will not be retried any more
    ==========================  =================================================================================

A value above `MAX_VALUE_BYTES` is cut to its first `CUT_BYTES`, so that a dead letter always fits its topic. It is more
than any valid event has, and such a letter is parked rather than retried.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from xxhash import xxh3_128_hexdigest

from topics.events import Rejected, clip

PREFIX = "solaris-"
REASON = PREFIX + "reason"
DETAIL = PREFIX + "detail"
SOURCE_TOPIC = PREFIX + "source-topic"
SOURCE_PARTITION = PREFIX + "source-partition"
SOURCE_OFFSET = PREFIX + "source-offset"
ROLE = PREFIX + "role"
TIME = PREFIX + "time"
ATTEMPT = PREFIX + "attempt"
SIZE = PREFIX + "size"
XXH3 = PREFIX + "xxh3"
KEY_SIZE = PREFIX + "key-size"
PARKED = PREFIX + "parked"

MAX_VALUE_BYTES = 4 << 20
MAX_KEY_BYTES = 64 << 10
CUT_BYTES = 64 << 10
MAX_OTHER_HEADERS = 32
MAX_HEADER_BYTES = 4 << 10

Headers = list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One record of the DLQ, read back."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    reason: str
    detail: str
    source_topic: str
    source_partition: int
    source_offset: int
    role: str
    attempt: int
    parked: str
    """empty: may be retried"""
    cut: bool
    """key or value is only the beginning of what was received"""
    size: int
    """bytes of the value as received"""
    other: tuple[tuple[str, bytes | None], ...]
    """headers of the source record that are not ours"""


def dead_letter(
    topic: str,
    partition: int,
    offset: int,
    key: bytes | None,
    value: bytes | None,
    rejected: Rejected,
    role: str,
    attempt: int = 0,
    time_ms: int | None = None,
    received: Sequence[tuple[str, bytes | None]] | None = None,
) -> tuple[bytes | None, bytes | None, Headers]:
    """(key, value, headers) of the dead letter for the record at `topic`/`partition`/`offset`.

    `attempt` is `attempt_of` the record's headers. `received` are those headers: the ones that are not ours are kept,
    within bounds, so that a retried record is what it was.
    """
    headers: Headers = [
        (REASON, _text(rejected.reason)),
        (DETAIL, _text(clip(rejected.detail).replace("\n", " "))),
        (SOURCE_TOPIC, _text(topic)),
        (SOURCE_PARTITION, b"%d" % partition),
        (SOURCE_OFFSET, b"%d" % offset),
        (ROLE, _text(role)),
        (ATTEMPT, b"%d" % attempt),
    ]
    if time_ms is not None:
        headers.append((TIME, b"%d" % time_ms))
    if value is not None and len(value) > MAX_VALUE_BYTES:
        headers += [(SIZE, b"%d" % len(value)), (XXH3, xxh3_128_hexdigest(value).encode())]
        value = value[:CUT_BYTES]
    if key is not None and len(key) > MAX_KEY_BYTES:
        headers.append((KEY_SIZE, b"%d" % len(key)))
        key = key[:MAX_KEY_BYTES]
    others = [(n, v or b"") for n, v in received or () if not n.startswith(PREFIX)]
    headers += [(n, v) for n, v in others[:MAX_OTHER_HEADERS] if len(n) + len(v) <= MAX_HEADER_BYTES]
    return key, value, headers


def attempt_of(headers: Sequence[tuple[str, bytes | None]] | None) -> int:
    """How often a record was put back from the DLQ; 0 where it never was."""
    found = 0
    for name, value in headers or ():
        if name == ATTEMPT:
            found = _number(value, 0)  # of several the last, as `read` takes it
    return found


def read(
    partition: int,
    offset: int,
    timestamp_ms: int,
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes | None]] | None,
) -> DeadLetter:
    """Never raises: a record of the DLQ that is not ours has the reason "unknown" and no source."""
    ours = {n: v for n, v in headers or () if n.startswith(PREFIX)}

    def text(name: str) -> str:
        return (ours.get(name) or b"").decode("utf-8", "replace")

    return DeadLetter(
        partition=partition,
        offset=offset,
        timestamp_ms=timestamp_ms,
        key=key,
        value=value,
        reason=text(REASON) or "unknown",
        detail=text(DETAIL),
        source_topic=text(SOURCE_TOPIC),
        source_partition=_number(ours.get(SOURCE_PARTITION), -1),
        source_offset=_number(ours.get(SOURCE_OFFSET), -1),
        role=text(ROLE),
        attempt=_number(ours.get(ATTEMPT), 0),
        parked=text(PARKED),
        cut=SIZE in ours or KEY_SIZE in ours,
        size=_number(ours.get(SIZE), len(value or b"")),
        other=tuple((n, v) for n, v in headers or () if not n.startswith(PREFIX)),
    )


def back_to_source(letter: DeadLetter) -> Headers:
    """Headers of the record that goes back to its source topic."""
    return [*((n, v or b"") for n, v in letter.other), (ATTEMPT, b"%d" % (letter.attempt + 1))]


def why_not_retried(letter: DeadLetter, max_attempts: int, sources: Set[str]) -> str:
    """Empty where the letter may go back to its source, which must be one of `sources` (full names): the headers of a
    record that somebody else wrote to the DLQ do not choose any topic they like."""
    if letter.parked:
        return letter.parked
    if not letter.source_topic:
        return "no source topic in the headers"
    if letter.source_topic not in sources:
        return "the source topic is not one of ours"
    if letter.cut:
        return f"only the beginning of {letter.size} bytes was kept"
    if letter.attempt >= max_attempts:
        return f"retried {letter.attempt} times, at most {max_attempts}"
    return ""


def _text(value: str) -> bytes:
    return value.encode("utf-8", "backslashreplace")


def _number(value: bytes | None, default: int) -> int:
    return int(value) if value is not None and value.isdigit() and len(value) < 20 else default
