"""The compiled check of log lines decides what ordinary programs write, and never otherwise than the decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from topics.events import MAX_ID_CHARS, MAX_ITEMS, MAX_TS
from topics.readers import EventLog
from topics.readers.badlines import Progress
from topics.readers.jsonl import PAD
from topics.readers.scan import scan
from topics.replay_records import TOPICS, Scanner, Text, _light_records, records, scanned

LINE = {
    "candidates": b'{"type":"candidates","id":"c1","user":"u1","ts":5,"features":{"history":["a"]},"items":["N7",8]}',
    "impressions": b'{"type":"impression","id":"i1","user":"u1","ts":6,"ads":["N7"],"bids":[1.5],"x":{"a":[{},[]]}}',
    "feedback": b'{"type":"feedback","id":"i1","user":"u1","ts":7,"clicked":[]}',
    "items": b'{"type":"item","id":77,"ts":0,"features":{"price":-1.5e-3,"ok":true,"none":null}}',
}


@pytest.fixture(scope="module")
def scanner() -> Scanner:
    made = Scanner()
    made.wait()
    return made


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> EventLog:
    path = tmp_path_factory.mktemp("scan") / "log.jsonl"
    path.write_bytes(b"")
    return EventLog(path, None)


def text(*lines: bytes) -> bytes:
    return b"".join(line + b"\n" for line in lines) + PAD


def decided(line: bytes) -> bool:
    return bool(scan(text(line))[0, 0])


def test_ordinary_lines_of_every_type_are_decided() -> None:
    whole = text(*LINE.values())
    found = scan(whole)
    assert [TOPICS[kind - 1] for kind in found[0]] == list(LINE)
    assert [whole[a:b] for a, b in zip(found[1], found[2], strict=True)] == [b"u1", b"u1", b"u1", b"77"]
    assert found[3].tolist() == [5, 6, 7, 0]
    assert found[4].tolist() == [2, 1, 0, 0]
    assert [whole[a:b] for a, b in zip(found[5], found[6], strict=True)] == list(LINE.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.replace(b":", b" : ").replace(b",", b" , "),
        lambda line: line + b"\r",
        lambda line: b"  " + line + b" ",
        lambda line: b"{" + line[1:-1].replace(b'"id"', b'"pad":"' + b"x" * 200 + b'","id"') + b"}",
    ],
)
def test_spaces_and_length_do_not_matter(change: Any) -> None:
    assert all(decided(change(line)) for line in LINE.values())


@pytest.mark.parametrize(
    "line",
    [
        b"", b" ", b"{}", b"[]", b"null", b'"', b'{"', b"{" * 100, b'{"type":"item","id":"a","ts":0',
        b'{"type":"item","id":"a","ts":0}}', b'{"type":"item","id":"a","ts":0},', b'{"type":"item","id":"a","ts":0 1}',
        b'{"type":"item","id":"a","ts":0,}', b'{,"type":"item","id":"a","ts":0}', b'{"type":"item""id":"a","ts":0}',
        b'{"type":"item","id":"a","ts":00}', b'{"type":"item","id":"a","ts":-0}', b'{"type":"item","id":"a","ts":1.0}',
        b'{"type":"item","id":"a","ts":1e3}', b'{"type":"item","id":"","ts":1}', b'{"type":"item","id":1.5,"ts":1}',
        b'{"type":"item","id":01,"ts":1}', b'{"type":"item","id":12345678901234567890,"ts":1}',
        b'{"type":"item","id":true,"ts":1}', b'{"type":"other","id":"a","ts":1}', b'{"id":"a","ts":1}',
        b'{"type":"item","id":"a","id":"b","ts":1}', b'{"type":"item","id":"\xc3\xa9","ts":1}',
        b'{"type":"item","id":"a\\n","ts":1}', b'{"type":"item","id":"a\x01","ts":1}',
        b'{"type":"item","id":"a","ts":1,"x":nul}', b'{"type":"item","id":"a","ts":1,"x":nulll}',
        b'{"type":"item","id":"a","ts":1,"x":1.}', b'{"type":"item","id":"a","ts":1,"x":.1}',
        b'{"type":"item","id":"a","ts":1,"x":1e}', b'{"type":"item","id":"a","ts":1,"x":-}',
        b'{"type":"item","id":"a","ts":1,"x":[1,]}', b'{"type":"item","id":"a","ts":1,"x":[,1]}',
        b'{"type":"item","id":"a","ts":1,"x":[1 2]}', b'{"type":"item","id":"a","ts":1,"x":{"a"}}',
        b'{"type":"item","id":"a","ts":1,"x":{"a":1]}', b'{"type":"item","id":"a","ts":1,"x":{1:2}}',
        b'{"type":"item","id":"a","ts":1,"x":["a""b"]}', b'{"type":"item","id":"a","ts":1,"x":"a"b}',
        b'{"type":"impression","id":1,"user":"u","ts":1,"ads":[]}',
        b'{"type":"impression","id":"i","user":"","ts":1,"ads":[]}',
        b'{"type":"impression","id":"i","user":"u","ts":1,"items":[]}',
        b'{"type":"impression","id":"i","user":"u","ts":1,"ads":[""]}',
        b'{"type":"impression","id":"i","user":"u","ts":1,"ads":[null]}',
        b'{"type":"impression","id":"i","user":"u","ts":1,"ads":["a" "b"]}',
        b'{"type":"impression","id":"i","user":"u","ts":1,"ads":["a"x,"b"]}',
        b'{"type":"impression","id":"i","user":"u","ts":1,"ads":[["a"]]}',
        b'{"type":"impression","id":"i","user":"u","ts":1,"ads":["a",]}',
        b'{"type":"impression","id":"i","user":"u","ts":1,"ads":"a"}',
        b'{"type":"impression","id":"i","user":5,"ts":1,"ads":[]}',
        b'{"type":"impression","id":"i","user":"u","ts":%d,"ads":[]}' % (MAX_TS + 1),
        b'{"type":"impression","id":"i","user":"%s","ts":1,"ads":[]}' % (b"u" * (MAX_ID_CHARS + 1)),
        b'{"type":"impression","id":"i","user":"u","ts":1,"ads":["%s"]}' % (b"u" * (MAX_ID_CHARS + 1)),
        b'{"type":"impression","id":"i","user":"u","ts":1,"ads":[%s1]}' % (b"1," * MAX_ITEMS),
    ],
)  # fmt: skip
def test_what_is_wrong_or_unusual_is_left_to_the_decoder(line: bytes) -> None:
    assert not decided(line)


def test_the_limits_themselves_are_decided() -> None:
    assert decided(b'{"type":"impression","id":"i","user":"%s","ts":%d,"ads":[]}' % (b"u" * MAX_ID_CHARS, MAX_TS))
    assert decided(b'{"type":"impression","id":"i","user":"u","ts":1,"ads":[%s1]}' % (b"1," * (MAX_ITEMS - 1)))


names = st.sampled_from(["type", "id", "user", "ts", "items", "ads", "clicked", "features", "x", "", "typ", "items2"])
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4), st.sampled_from(["u1", "N7", "a,b", "]", "{", ":", " ", "candidates", "impression"]),
)  # fmt: skip
values = st.recursive(scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(names, v, max_size=3), max_leaves=12)
ids = st.one_of(st.text(min_size=1, max_size=5), st.integers(-5, 10**19), st.sampled_from(["N1", "N,2", "]"]))


@st.composite
def written(draw: st.DrawFn) -> bytes:
    """A line that is nearly or wholly an event, written in one of many ways, and then perhaps damaged."""
    kind = draw(st.sampled_from(["candidates", "impression", "feedback", "item", "other"]))
    event: dict[str, Any] = {
        "type": kind,
        "id": draw(ids if kind == "item" else st.text(min_size=1, max_size=5)),
        "user": draw(st.text(max_size=5) | st.just("u1")),
        "ts": draw(st.integers(-2, MAX_TS + 2)),
        {"candidates": "items", "impression": "ads"}.get(kind, "clicked"): draw(st.lists(ids, max_size=6)),
    }
    event.update(draw(st.dictionaries(names, values, max_size=2)))
    pairs = draw(st.permutations(list(event.items())))
    gap = draw(st.sampled_from(["", " ", "\t", "  "]))
    ascii_only = draw(st.booleans())
    body = f"{gap},{gap}".join(
        f"{json.dumps(k, ensure_ascii=ascii_only)}{gap}:{gap}{json.dumps(v, ensure_ascii=ascii_only)}" for k, v in pairs
    )
    line = f"{gap}{{{gap}{body}{gap}}}{gap}".encode("utf-8", "surrogatepass").replace(b"\n", b" ")
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(line)))
        put = draw(st.sampled_from([b"", b"\xff", *(bytes([c]) for c in b'",[]{}: 0-e\\')]))
        line = line[:at] + put + line[at + draw(st.integers(0, 2)) :]
    return line


@given(st.lists(written() | st.binary(max_size=80).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=8))
@example([b'{"type":"impression","id":"i","user":"u","ts":1,"ads":["a",1,",",1,","]}'])
@example([b'{"type":"impression","id":"i","user":"u","ts":1,"ads":["a"]} ', b"{}"])
def test_what_is_decided_is_what_the_decoder_says(log: EventLog, lines: list[bytes]) -> None:
    expected = _light_records(log, 1, lines)
    block = scanned(log, 1, text(*lines), scan(text(*lines)))
    assert list(block) == expected
    totals = block.total()
    block.totals = None
    assert totals == block.total()
    accepted = {r.position for r in expected}
    for number, kind in enumerate(scan(text(*lines))[0], 1):
        assert not kind or number in accepted
        assert not kind or isinstance(msgspec.json.decode(lines[number - 1]), dict)


def test_a_log_gives_the_same_records_with_it_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = [b"", b"{", b'{"type":"item","id":"\xc3\xa9","ts":1}', b'{"type":"feedback"}', b" \r"]
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n".join([*LINE.values(), *strange, *(line + b"\r" for line in LINE.values())] * 50))
    plain = EventLog(path, None)
    expected = list(records(plain, TOPICS))
    assert len(expected) == 450

    monkeypatch.setattr("topics.replay_records.SCANNED_BYTES", 0)
    monkeypatch.setattr("topics.readers.jsonl.CHUNK_BYTES", 1000)
    monkeypatch.setattr(Scanner, "ahead", _ready(Scanner.ahead))
    quick = EventLog(path, None)
    assert list(records(quick, TOPICS)) == expected
    assert quick.bad == plain.bad
    assert quick.progress.done == quick.progress.total == path.stat().st_size
    assert list(records(quick, TOPICS, after=77)) == [r for r in expected if r.position > 77]


def test_progress_is_of_what_was_given_out_not_of_what_was_read_ahead(scanner: Scanner) -> None:
    progress = Progress(total=8)

    def texts() -> Iterator[Text]:
        for n in range(1, 9):
            progress.done = n
            yield n, text(LINE["items"])

    told = [(first, found is not None, progress.done) for (first, _), found in scanner.ahead(texts(), progress)]
    assert told == [(n, True, n) for n in range(1, 9)]


def _ready(ahead: Any) -> Any:
    def wait_first(self: Scanner, *args: Any) -> Any:
        self.wait()
        for lines, found in ahead(self, *args):
            assert found is not None
            yield lines, found

    return wait_first
