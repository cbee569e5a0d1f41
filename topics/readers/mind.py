"""MIND `behaviors.tsv` (Microsoft News): impression id, user, time, history, shown items with labels.

The file is in no order; it is sorted by time (an external merge sort, so any size passes). Times have no zone in the
file and are taken as UTC. Each row gives an impression, whose ads are in the file's order (MIND has shuffled it), and
30 s later (the file has no click times) a feedback event with the ads labelled 1; rows without labels (MIND's test
part) give none.
`features.history` is the file's column, which MIND gives once per user, plus the user's clicks in the log so far.
A `news.tsv` in the same folder gives item events (category, subcategory) at time 0, before all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from topics.errors import DecodeError, InvalidEvent
from topics.events import Event, Features, Impression, Item, check
from topics.readers.badlines import BadLines, Progress
from topics.readers.clicks import CLICK_DELAY_MS, ClickStream
from topics.readers.jsonl import lines
from topics.readers.sort import Timed, sorted_rows

_COLUMNS = 5


def read(path: Path, bad: BadLines, progress: Progress | None = None, run_bytes: int = 128 << 20) -> Iterator[Event]:
    """Items, then impressions and feedback in event-time order."""
    news = path.with_name("news.tsv")
    if news.is_file():
        yield from _items(news, bad)
    clicks = ClickStream()
    for ts, number, line in sorted_rows(_timed(path, bad, progress), progress, run_bytes):
        try:
            impression, clicked = parse(line, ts)
            check(impression)
        except InvalidEvent as e:
            bad.add(path, number, e, line)
            continue
        yield from clicks.add(impression, clicked, CLICK_DELAY_MS)
    yield from clicks.until(None)


def parse(line: bytes, ts: int) -> tuple[Impression, list[str] | None]:
    """One row: the impression, and the ads clicked (None: no labels). Raises `DecodeError`."""
    try:
        fields = line.decode().rstrip("\r\n").split("\t")
    except UnicodeDecodeError as e:
        raise DecodeError("not_utf8", str(e)) from None
    if len(fields) != _COLUMNS:
        raise DecodeError("wrong_columns", f"{len(fields)} columns, a MIND row has {_COLUMNS}")
    row, user, _, past, shown = fields
    ads: list[str | int] = []
    clicked: list[str] = []
    labels = 0
    for entry in shown.split():
        item, dash, label = entry.rpartition("-")
        if not dash:
            ads.append(entry)
        elif label in ("0", "1") and item:
            ads.append(item)
            labels += 1
            if label == "1":
                clicked.append(item)
        else:
            raise DecodeError("wrong_label", f"shown item {entry!r}; expected ID-0, ID-1 or ID")
    if 0 < labels < len(ads):
        raise DecodeError("wrong_label", f"{labels} of {len(ads)} shown items have a label; expected all or none")
    features: Features = {"history": list(past.split())} if past else {}
    return Impression(row, user, ts, ads, features=features), clicked if labels else None


def parse_time(text: str) -> int:
    """``11/14/2019 9:05:12 AM`` -> ms. Raises `ValueError`."""
    date, clock, half = text.split()
    month, day, year = map(int, date.split("/"))
    hour, minute, second = map(int, clock.split(":"))
    if half not in ("AM", "PM") or not 1 <= hour <= 12:
        raise ValueError(text)
    hour = hour % 12 + (12 if half == "PM" else 0)
    return int(datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()) * 1000


def _timed(path: Path, bad: BadLines, progress: Progress | None) -> Iterator[Timed]:
    for number, line in lines(path, bad, progress):
        fields = line.split(b"\t", 3)
        try:
            if len(fields) < 4:
                raise DecodeError("wrong_columns", f"{len(fields)} columns, a MIND row has {_COLUMNS}")
            try:
                ts = parse_time(fields[2].decode())
            except (ValueError, OverflowError):
                raise DecodeError("wrong_time", f"{fields[2]!r}; expected MM/DD/YYYY H:MM:SS AM|PM") from None
        except DecodeError as e:
            bad.add(path, number, e, line)
            continue
        yield ts, number, line


def _items(path: Path, bad: BadLines) -> Iterator[Item]:
    for number, line in lines(path, bad):
        fields = line.decode("utf-8", "replace").split("\t")
        if len(fields) < 3:
            bad.add(path, number, DecodeError("wrong_columns", f"{len(fields)} columns, news.tsv has 8"), line)
            continue
        item = Item(fields[0], 0, {"category": fields[1], "subcategory": fields[2]})
        try:
            check(item)
        except InvalidEvent as e:
            bad.add(path, number, e, line)
            continue
        yield item
