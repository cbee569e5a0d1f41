"""An event log as the records that go to the topics: (position, topic, key, value, event time, pairs).

The position is the record's place in the log's stream (line of a JSON Lines file, else ordinal of the event), the same
in every run over the same log, so that a replay can go on from it. A JSON Lines file without derived candidates is
passed through byte for byte, never encoded again. Its lines are checked for being JSON of one of the types with usable
ids, user, time and item list (by `topics.readers.scan`, else by a decoder); the rules of features and aligned columns
are checked too when the log is read strictly, else left to the roles, which put what they cannot use in the dead
letters. `solaris log check` checks everything.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from topics.errors import InvalidEvent
from topics.events import (
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
from topics.readers import EventLog, Progress, jsonl
from topics.replay_block import Block, Record, Totals

logger = logging.getLogger(__name__)

TOPIC_OF: dict[type, str] = {
    Candidates: "candidates",
    Impression: "impressions",
    Feedback: "feedback",
    Item: "items",
}
TOPICS = tuple(TOPIC_OF.values())
BLOCK_RECORDS = 500
SCANNED_BYTES = 32 << 20
"""smaller logs are sent before the compiled check is there"""
AHEAD_BLOCKS = 16
AHEAD_TEXTS = 4

Text = tuple[int, bytes]
"""number of the first line, and lines as `jsonl.texts` gives them"""


def records(log: EventLog, topics: Collection[str], after: int = 0, shift_ms: int = 0) -> Iterator[Record]:
    """Records of positions above `after`, in the order of the log. Times are moved by `shift_ms`; those of 0 ("always
    there", catalogue entries) are not."""
    for block in blocks(log, topics, after, shift_ms):
        yield from block


def blocks(log: EventLog, topics: Collection[str], after: int = 0, shift_ms: int = 0) -> Iterator[Block]:
    """`records`, many at a time: those of one chunk of the file, or `BLOCK_RECORDS`; a few MiB at most."""
    if log.raw:
        yield from _raw(log, topics, after, shift_ms)
        return
    block: list[Record] = []
    size = 0
    for position, event in enumerate(log.events(), 1):
        if position > after and TOPIC_OF[type(event)] in topics:
            if shift_ms:
                shift(event, shift_ms)
            value = encode(event)
            block.append(_record(position, event, value))
            size += len(value)
            if len(block) >= BLOCK_RECORDS or size >= jsonl.CHUNK_BYTES:
                yield Block.of(block)
                block, size = [], 0
    yield Block.of(block)


class Ahead:
    """An iterator over blocks that can read a few of them before they are asked for: `more`, while there is nothing
    better to do. `share` says how much of the log has been used, which is less than what has been read."""

    def __init__(self, source: Iterator[Block], progress: Progress) -> None:
        self._source, self._progress = source, progress
        self._ready: deque[tuple[Block, int]] = deque()
        self._end: BaseException | None = None
        self._before = self._after = 0

    def more(self) -> bool:
        """Reads one block. False: there is no more to read now. An error of the log is kept for its place."""
        if self._end is not None or len(self._ready) >= AHEAD_BLOCKS:
            return False
        try:
            self._ready.append((next(self._source), self._progress.done))
        except BaseException as e:
            self._end = e
        return True

    def share(self, of_block: float) -> float:
        """0..1 of the log, when so much (0..1) of the block given out last has been used."""
        used = self._before + (self._after - self._before) * of_block
        return min(1.0, used / self._progress.total) if self._progress.total else 0.0

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Block:
        if not self._ready:
            if self._end is None:
                self.more()
            if not self._ready:
                assert self._end is not None
                raise self._end
        self._before = self._after
        block, self._after = self._ready.popleft()
        return block


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


class Scanner:
    """The compiled check of `topics.readers.scan`, brought in beside the work: numba takes 0.3 s to import, and some
    seconds to compile the check when it has not been used on this machine before."""

    def __init__(self) -> None:
        self._scan: Callable[[bytes], Any] | None = None
        self._thread = threading.Thread(target=self._get, name="replay-scanner", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it can be used, or is known not to be usable here."""
        self._thread.join()

    def ahead(self, texts: Iterator[Text], progress: Progress) -> Iterator[tuple[Text, Any]]:
        """Each text with what the check found in it, or None while the check is not ready. A few texts are read and
        checked in a thread, which needs the interpreter's lock for a moment only, before they are asked for;
        `progress` says how far those given out reach."""
        waiting: deque[tuple[Text, Future[Any] | None, int]] = deque()
        pool = ThreadPoolExecutor(1, "replay-scan")
        try:
            for text in texts:
                found = pool.submit(self._scan, text[1]) if self._scan is not None else None
                waiting.append((text, found, progress.done))
                if found is None or len(waiting) > AHEAD_TEXTS:
                    yield _given(waiting, progress)
            while waiting:
                yield _given(waiting, progress)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _get(self) -> None:
        try:
            from topics.readers.scan import scan

            scan(jsonl.PAD)  # compiles
        except Exception as e:  # no place for compiled code, no processor that numba knows: the decoder does it all
            logger.info("no compiled check of lines here: %s", e)
        else:
            self._scan = scan


def _given(waiting: deque[tuple[Text, Future[Any] | None, int]], progress: Progress) -> tuple[Text, Any]:
    text, found, progress.done = waiting.popleft()
    return text, None if found is None else found.result()


_SCANNED_TOPICS = ("", *TOPICS)


def scanned(log: EventLog, first: int, text: bytes, found: Any) -> Block:
    """What `_light_records` gives for these lines, in a fraction of the time; `found` is what the check says."""
    if not found[0].all():
        return Block.of(list(_with_undecided(log, first, text, found)))
    kinds, keys, key_ends, times, pairs, begins, ends = found
    count, topics = len(kinds), _SCANNED_TOPICS
    by_kind = np.bincount(kinds, minlength=len(topics)).tolist()
    return Block(
        range(first, first + count),
        [topics[k] for k in kinds.tolist()],
        [text[a:b] for a, b in zip(keys.tolist(), key_ends.tolist(), strict=True)],
        [text[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)],
        times,
        pairs,
        Totals(
            int((ends - begins).sum()),
            int(times.max(initial=-1)),
            int(pairs.sum()),
            {topic: n for topic, n in zip(topics, by_kind, strict=True) if n},
        ),
    )


def _with_undecided(log: EventLog, number: int, text: bytes, found: Any) -> Iterator[Record]:
    for kind, key, key_end, ts, pairs, begin, end in zip(*found.tolist(), strict=True):
        line = text[begin:end]
        if kind:
            yield Record(number, _SCANNED_TOPICS[kind], text[key:key_end], line, ts, pairs)
        else:
            yield from _light_records(log, number, [line])
        number += 1


def _raw(log: EventLog, topics: Collection[str], after: int, shift_ms: int) -> Iterator[Block]:
    light = not shift_ms and not log.bad.strict
    every = set(topics) >= set(TOPICS)
    texts = _after(jsonl.texts(log.path, log.bad, log.progress), after)
    found: Iterator[tuple[Text, Any]] = ((text, None) for text in texts)
    if light and log.path.stat().st_size >= SCANNED_BYTES:
        found = Scanner().ahead(texts, log.progress)
    for (first, text), columns in found:
        if columns is not None:
            block = scanned(log, first, text, columns)
        else:
            lines = jsonl.split(text)
            block = Block.of(_light_records(log, first, lines) if light else _records(log, first, lines, shift_ms))
        yield block if every else block.only(topics)


def _after(texts: Iterator[Text], after: int) -> Iterator[Text]:
    for first, text in texts:
        if first > after:
            yield first, text
        elif first + text.count(b"\n") - 1 > after:
            yield after + 1, text.split(b"\n", after + 1 - first)[-1]


def _light_records(log: EventLog, first: int, lines: list[bytes]) -> list[Record]:
    # The hot loop of a replay at full speed: nothing is called here but the decoder.
    block: list[Record] = []
    add, decode, number = block.append, _light.decode, first - 1
    for line in lines:
        number += 1
        try:
            event = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            block += _records(log, number, [line], 0)  # for the reason
            continue
        kind = type(event)
        if kind is _Impression:
            add(Record(number, "impressions", event.user.encode(), line, event.ts, len(event.ads)))
        elif kind is _Feedback:
            add(Record(number, "feedback", event.user.encode(), line, event.ts, 0))
        elif kind is _Candidates:
            add(Record(number, "candidates", event.user.encode(), line, event.ts, len(event.items)))
        else:
            add(Record(number, "items", str(event.id).encode(), line, event.ts, 0))
    return block


def _records(log: EventLog, first: int, lines: list[bytes], shift_ms: int) -> list[Record]:
    block: list[Record] = []
    for number, line in enumerate(lines, first):
        if not line or line.isspace():
            continue
        try:
            event = decode_event(line)
        except InvalidEvent as e:
            log.bad.add(log.path, number, e, line)
            continue
        if shift_ms:
            shift(event, shift_ms)
            line = encode(event)
        block.append(_record(number, event, line))
    return block


def _record(position: int, event: Event, value: bytes) -> Record:
    if isinstance(event, Item):
        return Record(position, "items", str(event.id).encode(), value, event.ts, 0)
    if isinstance(event, Impression):
        return Record(position, "impressions", event.user.encode(), value, event.ts, len(event.ads))
    if isinstance(event, Candidates):
        return Record(position, "candidates", event.user.encode(), value, event.ts, len(event.items))
    return Record(position, "feedback", event.user.encode(), value, event.ts, 0)
