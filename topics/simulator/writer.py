"""Streams a simulated world to disk, window by window, with bounded memory.

Each window: run every user to its end, sort the records by their place in the log, write those before the window's end
and keep the rest (feedback to come, late events). What stays in memory is the world (about 1.5 kB a user, 0.1 kB an
item) and one window of records. The bytes do not depend on the window's length.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from topics.errors import SettingsError
from topics.simulator import kernel
from topics.simulator.config import HOUR_MS, SimulatorConfig
from topics.simulator.emit import KIND_CANDIDATES, KIND_FEEDBACK, KIND_IMPRESSION
from topics.simulator.state import RECORD, State, params
from topics.simulator.world import FORMATS, HISTORY, PRICE_SCALE, PRICE_SD, SHOWN, World, build

Array = npt.NDArray[Any]
_WINDOWS_MS = (600_000, 300_000, 120_000, 60_000, 30_000, 10_000, 5_000, 2_000, 1_000)
_WINDOW_BYTES = 32 << 20


class Summary(msgspec.Struct):
    """What a log holds."""

    items: int = 0
    candidates: int = 0
    candidate_pairs: int = 0
    impressions: int = 0
    ads: int = 0
    feedback: int = 0
    clicks: int = 0
    bytes: int = 0

    @property
    def ctr(self) -> float:
        return self.clicks / self.ads if self.ads else 0.0


@dataclass(slots=True)
class Block:
    """Whole lines in log order, and the truth of the impressions among them."""

    data: memoryview | bytes
    summary: Summary
    """of this block alone"""
    impression_user: Array = field(default_factory=lambda: np.empty(0, np.int64))
    impression_sequence: Array = field(default_factory=lambda: np.empty(0, np.int64))
    truth: Array = field(default_factory=lambda: np.empty(0, np.float32))
    """float32, end to end"""
    truth_count: Array = field(default_factory=lambda: np.empty(0, np.int64))
    """ads of each impression"""


def blocks(c: SimulatorConfig) -> Iterator[Block]:
    """The log in order. A block's data is valid until the next one is asked for."""
    world, users = build(c)
    yield _item_block(c, world)
    record_bytes = _record_bytes(c)
    window = _window_ms(c, record_bytes)
    now = int(world.born[0])
    k = _state(c, world, users, now, record_bytes)
    while now < c.end_ms:
        until = min(now + window, c.end_ms)
        _renew_items(world, k.slot_item, now)
        user = 0
        while True:
            user = kernel.run_users(k, user, until, record_bytes)
            if user == c.users:
                break
            k = _grown(k, 2 * record_bytes, c.ads)
        yield from _drain(k, until)
        now = until
    yield from _drain(k, None)


def write_log(c: SimulatorConfig, path: Path, truth: Path | None = None) -> Summary:
    """Writes beside `path` first and renames when whole, so a log that exists is complete."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise SettingsError("simulate.out", str(path), "the name must end with .jsonl or .parquet")
    total = Summary()
    sink = _truth_sink(truth)
    part = path.with_name(path.name + ".part")
    try:
        with _log_sink(path.suffix, part) as log:
            for block in blocks(c):
                log.write(block.data)
                sink.add(block)
                _accumulate(total, block.summary)
        sink.finish()
        os.replace(part, path)
    except BaseException:
        sink.abandon()
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        raise
    return total


def _accumulate(total: Summary, more: Summary) -> None:
    for name in Summary.__struct_fields__:
        setattr(total, name, getattr(total, name) + getattr(more, name))


def _record_bytes(c: SimulatorConfig) -> int:
    """More than any record of this config can take."""
    return 512 + 40 * c.history + 24 * c.candidates + 48 * c.ads


def _window_ms(c: SimulatorConfig, record_bytes: int) -> int:
    """The longest window whose records are expected to fit `_WINDOW_BYTES`, at a busy hour."""
    records_per_ms = 3.0 * c.users * c.sessions_per_day * c.steps_per_session / (24 * HOUR_MS)
    for window in _WINDOWS_MS:
        if records_per_ms * window * record_bytes <= _WINDOW_BYTES:
            return window
    return _WINDOWS_MS[-1]


def _renew_items(world: World, slot_item: Array, now: int) -> None:
    """Puts the items born at `now` into their slots. Births are on a grid that every window divides."""
    a, b = np.searchsorted(world.born, [now, now + 1])
    slot_item[world.slot[a:b]] = np.arange(a, b, dtype=np.int32)


def _state(c: SimulatorConfig, world: World, users: Array, begin: int, record_bytes: int) -> State:
    widest = max(c.candidates, c.ads)
    return State(
        p=params(c, begin, float(world.hour_activity.mean())),
        items=world.items,
        slot_item=np.full(world.slots, -1, np.int32),
        trend=world.trend,
        trend_phase=world.trend_phase,
        hour_activity=world.hour_activity,
        users=users,
        history=np.zeros((c.users, c.history), HISTORY),
        listed=np.zeros((c.users, c.candidates), np.int32),
        stamp=np.full(len(world.items), -1, np.int64),
        stamp_now=np.zeros(1, np.int64),
        times_shown=np.zeros(len(world.items), np.int32),
        lately=np.zeros(len(world.items), np.int8),
        topic=np.repeat(np.arange(c.topics, dtype=np.int32), c.subtopics),
        log1p=np.log1p(np.arange(max(c.ads, SHOWN) + 1.0)),
        ids=np.zeros(widest, np.int32),
        scores=np.zeros(widest, np.float64),
        records=np.zeros(64, RECORD),
        data=np.empty(4 * record_bytes + (1 << 20), np.uint8),
        truth=np.empty(64 * c.ads, np.float32),
        n=np.zeros(3, np.int64),
    )


def _grown(k: State, data: int, truth: int) -> State:
    """The same with twice the room for records, `data` bytes and `truth` values at least."""
    records = np.zeros(2 * len(k.records), RECORD)
    bytes_ = np.empty(2 * len(k.data) + data, np.uint8)
    values = np.empty(2 * len(k.truth) + truth, np.float32)
    for new, old in ((records, k.records), (bytes_, k.data), (values, k.truth)):
        new[: len(old)] = old
    return k._replace(records=records, data=bytes_, truth=values)


def _drain(k: State, until: int | None) -> Iterator[Block]:
    """Yields what stands before `until` (None: all) in the log and moves the rest to the front of the buffers."""
    records = k.records[: int(k.n[0])]
    late = records["key"] >= until if until is not None else np.zeros(len(records), bool)
    ready = np.flatnonzero(~late)
    if not len(ready):
        return
    # ties go by user, then sequence, then kind: feedback has its impression's sequence and comes after it
    ready = ready[np.lexsort([records[c][ready] for c in ("kind", "sequence", "user", "ts", "key")])]
    data = _bytes_of(k, ready)
    out = records[ready]
    cands, imps, fbs = (out[out["kind"] == kind] for kind in (KIND_CANDIDATES, KIND_IMPRESSION, KIND_FEEDBACK))
    counts = imps["pairs"].astype(np.int64)
    yield Block(
        data=data.data,
        summary=Summary(
            candidates=len(cands), candidate_pairs=int(cands["pairs"].sum()), impressions=len(imps),
            ads=int(counts.sum()), feedback=len(fbs), clicks=int(fbs["pairs"].sum()), bytes=len(data),
        ),
        impression_user=imps["user"], impression_sequence=imps["sequence"],
        truth=_ragged(k.truth, imps["truth_offset"], counts), truth_count=counts,
    )  # fmt: skip
    _compact(k, np.flatnonzero(late))


def _bytes_of(k: State, which: Array) -> Array:
    data = np.empty(int(k.records["length"][which].sum()), np.uint8)
    kernel.gather(k.records, k.data, which, data)
    return data


def _ragged(values: Array, start: Array, count: Array) -> Array:
    """values[start[i] : start[i] + count[i]] end to end."""
    end = np.cumsum(count)
    return values[np.arange(int(count.sum())) + np.repeat(start - (end - count), count)]


def _compact(k: State, keep: Array) -> None:
    data, rest = _bytes_of(k, keep), k.records[keep]
    count = np.where(rest["kind"] == KIND_IMPRESSION, rest["pairs"], 0).astype(np.int64)
    truth = _ragged(k.truth, rest["truth_offset"], count)
    rest["offset"] = np.cumsum(rest["length"]) - rest["length"]
    rest["truth_offset"] = np.cumsum(count) - count
    k.records[: len(rest)], k.data[: len(data)], k.truth[: len(truth)] = rest, data, truth
    k.n[:] = len(rest), len(data), len(truth)


def _item_block(c: SimulatorConfig, world: World) -> Block:
    """Every item of the log's span, with `ts` 0: a catalogue that is known before the first event."""
    encode = msgspec.json.encode
    parts = []
    price = PRICE_SCALE * np.exp(PRICE_SD * world.items["price_level"].astype(np.float64))
    alive = np.flatnonzero(world.items["dies"] > c.start_ms - 24 * HOUR_MS)
    for i in alive.tolist():
        sub = int(world.items["sub"][i])
        features = {
            "category": f"t{sub // c.subtopics}",
            "sub_category": f"t{sub // c.subtopics}s{sub % c.subtopics}",
            "advertiser": f"v{world.advertiser[i]}",
            "format": FORMATS[world.format[i]],
            "price": round(float(price[i]), 2),
        }
        parts.append(encode({"type": "item", "id": f"a{i}", "ts": 0, "features": features}))
    data = b"\n".join(parts) + b"\n"
    return Block(data=data, summary=Summary(items=len(alive), bytes=len(data)))


class LogSink:
    def write(self, data: memoryview | bytes) -> None: ...

    def __enter__(self) -> LogSink:
        return self

    def __exit__(self, *exc: object) -> None: ...


class _JsonLines(LogSink):
    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) :]

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def _log_sink(suffix: str, path: Path) -> LogSink:
    if suffix == ".jsonl":
        return _JsonLines(path)
    from topics.simulator.parquet import ParquetLog

    return ParquetLog(path)


class TruthSink:
    """Base: keeps nothing."""

    def add(self, block: Block) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class _NpzTruth(TruthSink):
    """`p` float32[N] and `splits` int64[B+1]: impression b of the log has p[splits[b]:splits[b+1]]. The values are
    spooled to disk, so memory stays bounded (8 bytes an impression)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spool = path.with_name(path.name + ".spool")
        self._file = open(self._spool, "w+b")  # noqa: SIM115
        self._counts: list[Array] = []

    def add(self, block: Block) -> None:
        self._file.write(block.truth.astype("<f4").tobytes())
        self._counts.append(block.truth_count)

    def finish(self) -> None:
        splits = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(self._counts))]).astype("<i8")
        self._file.seek(0)
        part = self._path.with_name(self._path.name + ".part")
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as z:
            for name, dtype, count in (("p", "<f4", int(splits[-1])), ("splits", "<i8", len(splits))):
                info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
                with z.open(info, "w", force_zip64=True) as f:
                    head = {"descr": dtype, "fortran_order": False, "shape": (count,)}
                    np.lib.format.write_array_header_1_0(f, head)
                    if name == "splits":
                        f.write(splits.tobytes())
                    else:
                        while piece := self._file.read(1 << 22):
                            f.write(piece)
        os.replace(part, self._path)
        self.abandon()

    def abandon(self) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._spool.unlink()


def _truth_sink(path: Path | None) -> TruthSink:
    if path is None:
        return TruthSink()
    if path.suffix == ".npz":
        return _NpzTruth(path)
    if path.suffix == ".parquet":
        from topics.simulator.parquet import ParquetTruth

        return ParquetTruth(path)
    raise SettingsError("simulate.truth", str(path), "the name must end with .npz or .parquet")
