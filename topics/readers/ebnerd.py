"""EB-NeRD (Ekstra Bladet): `behaviors.parquet`, with `history.parquet` and `articles.parquet` beside it when there.

Rows are sorted by time (an external merge sort); times have no zone in the file and are taken as UTC. Each row gives an
impression of `article_ids_inview` and a feedback event with `article_ids_clicked`, at the impression's time plus
`read_time` (the seconds the user stayed on the page, at most 10 minutes; 30 s where it is absent).
`features.history` with `history_ts` is the user's list in `history.parquet` plus the user's clicks in the log so far.
Histories are kept in a temporary file, about 100 bytes of memory a user. User attributes and the device are request
features.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from topics.errors import ContractError, DecodeError, InvalidEvent
from topics.events import Event, Features, Impression, Item, check
from topics.readers.badlines import BadLines, Progress
from topics.readers.clicks import CLICK_DELAY_MS, ClickStream
from topics.readers.sort import Timed, sorted_rows

REQUIRED = ("impression_id", "user_id", "impression_time", "article_ids_inview")
LABELS = "article_ids_clicked"
REQUEST = ("device_type", "is_sso_user", "gender", "postcode", "age", "is_subscriber")
_ITEM = ("category", "category_str", "article_type", "premium", "sentiment_label")
BATCH_ROWS = 4_096
MAX_HISTORY = 200
"""newest entries of a user's history that are kept"""


def read(path: Path, bad: BadLines, progress: Progress | None = None, run_bytes: int = 128 << 20) -> Iterator[Event]:
    """Items (when there), then impressions and feedback in event-time order. Raises `ContractError` on other files."""
    articles = path.with_name("articles.parquet")
    if articles.is_file():
        yield from _items(articles, bad)
    clicks = ClickStream()
    decode = msgspec.msgpack.decode
    with Histories(path.with_name("history.parquet")) as histories:
        for ts, number, data in sorted_rows(_timed(path, bad, progress), progress, run_bytes):
            row = decode(data)
            try:
                impression, clicked, delay_ms = parse(row, ts, histories)
                check(impression)
            except InvalidEvent as e:
                bad.add(path, number, e, repr(row))
                continue
            yield from clicks.add(impression, clicked, delay_ms)
        yield from clicks.until(None)


class Histories:
    """Newest history entries of each user, in a temporary file read by offset."""

    def __init__(self, path: Path) -> None:
        self._file = tempfile.TemporaryFile(prefix="solaris-history-")  # noqa: SIM115  (closed by __exit__)
        self._where: dict[str, tuple[int, int]] = {}
        if path.is_file():
            self._load(path)

    def __enter__(self) -> Histories:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def get(self, user: str) -> tuple[list[str], list[int]]:
        """(article ids, times in ms), oldest first."""
        where = self._where.get(user)
        if where is None:
            return [], []
        offset, n = where
        self._file.seek(offset)
        block = np.frombuffer(self._file.read(16 * n), np.int64).reshape(2, n)
        return [str(i) for i in block[0].tolist()], block[1].tolist()

    def _load(self, path: Path) -> None:
        import pyarrow.parquet as pq

        columns = ["user_id", "impression_time_fixed", "article_id_fixed"]
        with pq.ParquetFile(path) as file:
            _need(path, file.schema_arrow.names, columns)
            offset = 0
            for batch in file.iter_batches(1_024, columns=columns):
                users, times, items = (batch.column(i) for i in range(3))
                for row in range(len(batch)):
                    if not times[row].is_valid or not items[row].is_valid:
                        continue
                    ms = np.asarray(times[row].values.cast("timestamp[ms]").to_numpy(False)).astype(np.int64)
                    ids = np.asarray(items[row].values.to_numpy(False), dtype=np.float64)
                    keep = np.isfinite(ids) & (ms > 0)
                    order = np.argsort(ms[keep], kind="stable")[-MAX_HISTORY:]
                    block = np.stack([ids[keep][order].astype(np.int64), ms[keep][order]])
                    self._file.write(block.tobytes())
                    self._where[str(users[row].as_py())] = (offset, block.shape[1])
                    offset += block.nbytes


def parse(row: dict[str, Any], ts: int, histories: Histories) -> tuple[Impression, list[str] | None, int]:
    """(impression, articles clicked or None without labels, ms from impression to click). Raises `DecodeError`."""
    if row["user_id"] is None or row["impression_id"] is None or row["article_ids_inview"] is None:
        raise DecodeError("wrong_type", "user_id, impression_id or article_ids_inview is null")
    user = str(row["user_id"])
    items, times = histories.get(user)
    # an entry at or after the impression would tell the future
    known = sum(t <= ts for t in times)
    features: Features = {}
    if known:
        features["history"] = list(items[:known])
        features["history_ts"] = list(times[:known])
    for name in REQUEST:
        value = row.get(name)
        if value is not None:
            features[name] = value
    clicked = row.get(LABELS)
    read_s = row.get("read_time")
    delay = CLICK_DELAY_MS if read_s is None or not math.isfinite(read_s) else int(read_s * 1000)
    ads: list[str | int] = [str(i) for i in row["article_ids_inview"]]
    impression = Impression(str(row["impression_id"]), user, ts, ads, features=features)
    return impression, None if clicked is None else [str(i) for i in clicked], delay


def _timed(path: Path, bad: BadLines, progress: Progress | None) -> Iterator[Timed]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    encode = msgspec.msgpack.encode
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        _need(path, names, REQUIRED)
        columns = [c for c in (*REQUIRED, LABELS, "read_time", *REQUEST) if c in names]
        if progress is not None:
            progress.total = file.metadata.num_rows
        number = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            times = batch.column(columns.index("impression_time")).cast(pa.timestamp("ms"), safe=False)
            for row, ms in zip(batch.to_pylist(), times.cast(pa.int64()).to_pylist(), strict=True):
                number += 1
                del row["impression_time"]
                if ms is None:
                    bad.add(path, number, DecodeError("wrong_time", "impression_time is null"), repr(row))
                    continue
                yield ms, number, encode(row)
            if progress is not None:
                progress.done = number


def _items(path: Path, bad: BadLines) -> Iterator[Item]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        _need(path, file.schema_arrow.names, ("article_id",))
        columns = ["article_id", *(c for c in _ITEM if c in file.schema_arrow.names)]
        number = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            for row in batch.to_pylist():
                number += 1
                article = row.pop("article_id")
                if article is None:
                    bad.add(path, number, DecodeError("empty_id", "article_id is null"), repr(row))
                    continue
                yield Item(str(article), 0, {k: v for k, v in row.items() if v is not None})


def _need(path: Path, names: list[str], columns: Any) -> None:
    missing = [c for c in columns if c not in names]
    if missing:
        raise ContractError(f"{path} has no column {missing[0]!r}; an EB-NeRD file of this name has {list(columns)}")
