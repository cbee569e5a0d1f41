"""MovieLens `ratings.csv` as an event log, for trying things out: it has ratings, not impressions.

Each rating becomes a request for the rated film among `DISTRACTORS` others, drawn (by a hash of the row, so always the
same) from the last `POOL` ratings of the stream: popular films come more often. A rating of at least 4 is a click, 1 s
later. `movies.csv` beside it gives the items (first genre as category, genres) at time 0.
What is learnt from such a log says little about impressions on a real site.
"""

from __future__ import annotations

import csv
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path

from topics.errors import DecodeError, InvalidEvent
from topics.events import Event, Features, Impression, Item, check
from topics.ids import hash_id
from topics.readers.badlines import BadLines, Progress
from topics.readers.clicks import ClickStream
from topics.readers.jsonl import lines
from topics.readers.sort import Timed, sorted_rows

DISTRACTORS = 9
LIKED = 4.0
CLICK_DELAY_MS = 1_000
HISTORY = 50
POOL = 20_000
"""ratings the distractors are drawn from"""
MAX_USERS = 200_000


def read(path: Path, bad: BadLines, progress: Progress | None = None, run_bytes: int = 128 << 20) -> Iterator[Event]:
    movies = path.with_name("movies.csv")
    if movies.is_file():
        yield from _items(movies, bad)
    clicks = ClickStream()
    pool: deque[str] = deque(maxlen=POOL)
    seen: OrderedDict[str, deque[tuple[str, int]]] = OrderedDict()
    for ts, number, line in sorted_rows(_timed(path, bad, progress), progress, run_bytes):
        user, movie, rating, _ = line.decode().split(",")
        ads: list[str | int] = [movie]
        draw = hash_id(f"{user}/{movie}/{ts}")
        slot = draw % (DISTRACTORS + 1)
        for _attempt in range(4 * DISTRACTORS):
            if len(ads) > DISTRACTORS or not pool:
                break
            draw = hash_id(draw)
            other = pool[draw % len(pool)]
            if other not in ads:
                ads.append(other)
        slot = min(slot, len(ads) - 1)
        ads[0], ads[slot] = ads[slot], ads[0]
        past = seen.setdefault(user, deque(maxlen=HISTORY))
        features: Features = {}
        if past:
            features = {"history": [m for m, _ in past], "history_ts": [t for _, t in past]}
        liked = float(rating) >= LIKED
        impression = Impression(f"{user}-{movie}-{number}", user, ts, ads, features=features)
        try:
            check(impression)
        except InvalidEvent as e:
            bad.add(path, number, e, line)
            continue
        yield from clicks.add(impression, [movie] if liked else [], CLICK_DELAY_MS)
        pool.append(movie)
        if liked:
            past.append((movie, ts + CLICK_DELAY_MS))
        seen.move_to_end(user)
        if len(seen) > MAX_USERS:
            seen.popitem(last=False)
    yield from clicks.until(None)


def _timed(path: Path, bad: BadLines, progress: Progress | None) -> Iterator[Timed]:
    for number, raw in lines(path, bad, progress):
        if number == 1:
            continue
        line = raw.strip()
        fields = line.split(b",")
        try:
            if len(fields) != 4 or not fields[0].isdigit() or not fields[1].isdigit():
                raise ValueError
            float(fields[2])
            ts = int(fields[3]) * 1000
        except ValueError:
            bad.add(path, number, DecodeError("wrong_columns", "expected userId,movieId,rating,timestamp"), line)
            continue
        yield ts, number, line


def _items(path: Path, bad: BadLines) -> Iterator[Item]:
    for number, line in lines(path, bad):
        if number == 1:
            continue
        try:
            row = next(csv.reader([line.decode()]), [])
            if len(row) != 3:
                raise DecodeError("wrong_columns", f"{len(row)} columns, movies.csv has movieId,title,genres")
            genres = row[2].split("|")
            item = Item(row[0], 0, {"category": genres[0], "genres": list(genres)})
            check(item)
        except UnicodeDecodeError as e:
            bad.add(path, number, DecodeError("not_utf8", str(e)), line)
        except csv.Error as e:
            bad.add(path, number, DecodeError("wrong_columns", str(e)), line)
        except InvalidEvent as e:
            bad.add(path, number, e, line)
        else:
            yield item
