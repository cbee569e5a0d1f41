"""Dead letters: what is written can be read back, always fits, and says what may be retried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from topics import dlq
from topics.contracts import BY_NAME
from topics.dlq import attempt_of, back_to_source, dead_letter, read, why_not_retried
from topics.events import Rejected

ANY = st.none() | st.binary(max_size=50)
HEADERS = st.lists(st.tuples(st.text(max_size=10), ANY), max_size=40)


@given(ANY, ANY, st.text(max_size=900), st.integers(0, 9), st.none() | st.integers(0, 2**62), HEADERS)
def test_round_trip(
    key: bytes | None, value: bytes | None, detail: str, attempt: int, time_ms: int | None, received: dlq.Headers
) -> None:
    out = dead_letter("s.impressions", 3, 9, key, value, Rejected("why", detail), "ranker", attempt, time_ms, received)
    letter = read(0, 1, 2, *out)
    assert (letter.key, letter.value, letter.size, letter.cut) == (key, value, len(value or b""), False)
    assert (letter.source_topic, letter.source_partition, letter.source_offset) == ("s.impressions", 3, 9)
    assert (letter.reason, letter.role, letter.attempt, letter.parked) == ("why", "ranker", attempt, "")
    assert len(letter.detail) < 600
    assert "\n" not in letter.detail
    back = back_to_source(letter)
    assert attempt_of(back) == attempt + 1
    assert len(back) <= dlq.MAX_OTHER_HEADERS + 1
    again = dead_letter("s.impressions", 3, 10, key, value, Rejected("why", ""), "ranker", attempt_of(back), None, back)
    assert read(0, 1, 2, *again).attempt == attempt + 1
    assert read(0, 1, 2, *again).other == letter.other


@pytest.mark.parametrize("size", [dlq.MAX_VALUE_BYTES + 1, 8 << 20, 20 << 20])
def test_a_letter_always_fits_its_topic(size: int) -> None:
    value = bytes(range(256)) * (size // 256 + 1)
    received = [("h" * 3000, b"v" * 1000)] * 50 + [("big", b"x" * 100_000)]
    key, kept, headers = dead_letter(
        "t", 0, 0, b"k" * size, value, Rejected("r" * 9, "d" * size), "ranker", 0, 1, received
    )
    total = len(key or b"") + len(kept or b"") + sum(len(n) + len(v) for n, v in headers)
    assert total < BY_NAME["dlq"].max_message_bytes // 4
    letter = read(0, 0, 0, key, kept, headers)
    assert letter.cut
    assert letter.size == len(value)
    assert kept == value[: dlq.CUT_BYTES]
    assert dict(headers)[dlq.XXH3].decode() == xxh3_128_hexdigest(value)
    assert "only the beginning" in why_not_retried(letter, 3, {"t"})


def test_the_largest_whole_value_fits_too() -> None:
    value = b"x" * dlq.MAX_VALUE_BYTES
    key, kept, headers = dead_letter("t", 0, 0, b"k" * dlq.MAX_KEY_BYTES, value, Rejected("r", ""), "x")
    assert kept is value
    assert len(key or b"") + len(kept) + sum(len(n) + len(v) for n, v in headers) < BY_NAME["dlq"].max_message_bytes


@given(HEADERS, st.dictionaries(st.sampled_from([dlq.REASON, dlq.ATTEMPT, dlq.SIZE, dlq.SOURCE_OFFSET]), ANY))
def test_reading_never_raises(headers: dlq.Headers, ours: dict[str, bytes | None]) -> None:
    letter = read(0, 0, 0, None, None, [*headers, *ours.items()])
    assert letter.attempt >= 0
    assert attempt_of([*headers, *ours.items()]) >= 0
    assert read(0, 0, 0, None, None, None).reason == "unknown"


@pytest.mark.parametrize(
    ("attempt", "topic", "why"),
    [
        (0, "t", ""),
        (2, "t", ""),
        (3, "t", "retried 3 times, at most 3"),
        (0, "other", "not one of ours"),
        (0, "", "no source"),
    ],
)
def test_what_may_be_retried(attempt: int, topic: str, why: str) -> None:
    letter = read(0, 0, 0, *dead_letter(topic, 0, 0, None, b"", Rejected("r", ""), "x", attempt))
    assert why in why_not_retried(letter, 3, {"t"})
    assert bool(why) == bool(why_not_retried(letter, 3, {"t"}))


def test_a_parked_letter_stays_parked() -> None:
    key, value, headers = dead_letter("t", 0, 0, None, b"", Rejected("r", ""), "x")
    assert why_not_retried(read(0, 0, 0, key, value, [*headers, (dlq.PARKED, b"because")]), 3, {"t"}) == "because"
