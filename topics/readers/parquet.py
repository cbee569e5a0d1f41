"""The documented log as Parquet: one row an event, in the order of the log.

| column | type | holds |
|---|---|---|
| type | string | candidates, impression, feedback or item |
| id | string | the event's id; of an item, the item's |
| user | string, null for items | |
| ts | int64 | event time, ms |
| items | list<string> | candidates: items; impression: ads; feedback: clicked; null for items |
| scores | list<double> | candidates: scores; impression: bids; null where absent |
| converted | list<string> | feedback: converted; null where absent |
| features | string | JSON object; null where empty |
| item_features | string | JSON object of columns: item_features or, of an impression, ad_features; null where absent |

Features have no fixed schema, so they are JSON strings. `scores`, `converted`, `features` and `item_features` may be
missing as columns. Item ids are strings; integers become their decimal text, which is the same id.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from topics.errors import ContractError, DecodeError, InvalidEvent
from topics.events import Candidates, Columns, Event, Features, Feedback, Impression, Item, check, encode
from topics.readers.badlines import BadLines, Progress

REQUIRED = ("type", "id", "ts")
OPTIONAL = ("user", "items", "scores", "converted", "features", "item_features")
BATCH_ROWS = 4_096

_features = msgspec.json.Decoder(Features)
_columns = msgspec.json.Decoder(Columns)


def read(path: Path, bad: BadLines, progress: Progress | None = None) -> Iterator[Event]:
    """Events in the order of the file. Raises `ContractError` when the columns are not those of the format."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        names = set(file.schema_arrow.names)
        missing = [c for c in REQUIRED if c not in names]
        if missing:
            raise ContractError(f"{path} has no column {missing[0]!r}; an event log has {', '.join(REQUIRED)}, ...")
        columns = [c for c in (*REQUIRED, *OPTIONAL) if c in names]
        if progress is not None:
            progress.total = file.metadata.num_rows
        number = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            for row in batch.to_pylist():
                number += 1
                try:
                    event = from_row(row)
                    check(event)
                except InvalidEvent as e:
                    bad.add(path, number, e, repr(row))
                    continue
                yield event
            if progress is not None:
                progress.done = number


def from_row(row: dict[str, Any]) -> Event:
    """Raises `DecodeError`. The rules of `topics.events.check` are not yet applied."""
    kind = row["type"]
    fields: dict[str, Any] = {"id": row["id"], "ts": row["ts"]}
    features, columns = row.get("features"), row.get("item_features")
    try:
        if features is not None and kind != "feedback":
            fields["features"] = _features.decode(features)
        if kind == "item":
            return msgspec.convert(fields | {"type": kind}, Item)
        fields["user"] = row.get("user")
        items = row.get("items")
        if kind == "candidates":
            fields |= {"items": items, "scores": row.get("scores")}
            fields["item_features"] = None if columns is None else _columns.decode(columns)
            return msgspec.convert(fields | {"type": kind}, Candidates)
        if kind == "impression":
            fields |= {"ads": items, "bids": row.get("scores")}
            fields["ad_features"] = None if columns is None else _columns.decode(columns)
            return msgspec.convert(fields | {"type": kind}, Impression)
        if kind == "feedback":
            fields |= {"clicked": items, "converted": row.get("converted")}
            return msgspec.convert(fields | {"type": kind}, Feedback)
    except msgspec.ValidationError as e:
        raise DecodeError("wrong_type", str(e)) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        raise DecodeError("not_json", f"features: {e}") from None
    raise DecodeError("wrong_type", f"type is {kind!r}; expected candidates, impression, feedback or item")


def to_row(event: Event) -> dict[str, Any]:
    row: dict[str, Any] = {"id": str(event.id), "ts": event.ts}
    if isinstance(event, Feedback):
        converted = None if event.converted is None else _texts(event.converted)
        return row | {"type": "feedback", "user": event.user, "items": _texts(event.clicked), "converted": converted}
    row["features"] = encode(event.features).decode() if event.features else None
    if isinstance(event, Item):
        return row | {"type": "item"}
    if isinstance(event, Candidates):
        kind, items, scores, columns = "candidates", event.items, event.scores, event.item_features
    else:
        kind, items, scores, columns = "impression", event.ads, event.bids, event.ad_features
    return row | {
        "type": kind,
        "user": event.user,
        "items": _texts(items),
        "scores": scores,
        "item_features": None if columns is None else encode(columns).decode(),
    }


class ParquetWriter:
    """Writes events as they come; memory is one row group of `group_rows` events."""

    def __init__(self, path: Path, group_rows: int = 16_384) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        text, texts = pa.string(), pa.list_(pa.string())
        self._schema = pa.schema(
            [("type", text), ("id", text), ("user", text), ("ts", pa.int64()), ("items", texts),
             ("scores", pa.list_(pa.float64())), ("converted", texts), ("features", text), ("item_features", text)]
        )  # fmt: skip
        self._table = pa.Table
        self._file = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._group_rows = group_rows

    def write(self, event: Event) -> None:
        self._rows.append(to_row(event))
        if len(self._rows) >= self._group_rows:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        if self._rows:
            self._file.write_table(self._table.from_pylist(self._rows, schema=self._schema))
            self._rows = []


def _texts(ids: list[Any]) -> list[str]:
    return [str(i) for i in ids]
