"""What is fuzzed: each target takes any bytes and may raise nothing, since what a decoder refuses is one of our errors
and is caught here. Targets also hold two readers of the same bytes against each other where there are two.

    TARGETS["events"](b'{"type": ...}')
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from models import bundle, onnxfile
from models.catalogue import Catalogue
from models.features import Encoder
from models.inputs import BatchInputs
from state import artifact, metadata, segments
from state.api import ChangelogRecord
from state.chunk import decode_chunk, parse_batch
from streams import durations, layers
from streams.decoding import hashed_candidates, keyed_events, precompute_requests
from streams.gate import Gate, GateSettings
from streams.monitor.blocks import Blocks
from streams.monitor.processes import Processes
from streams.settings import DEMO_BUNDLE, SPECS, load
from streams.step import Record
from topics import dlq, events, packed, packed_counts, replay_records, tail
from topics.contracts import BY_NAME
from topics.errors import BundleError, DecodeError, InvalidEvent, SettingsError, StoreError
from topics.events import Rejected
from topics.ids import hash_bytes
from topics.readers import BadLines, EventLog, jsonl, parquet, scan
from topics.sources import Mix

NOW_MS = 1_767_225_600_000
DECODERS = (
    events.decode_event, events.decode_candidates, events.decode_impression, events.decode_feedback,
    events.decode_item, events.decode_ranked_ads,
)  # fmt: skip


@cache
def demo() -> bundle.Bundle:
    return bundle.read_bundle(DEMO_BUNDLE)


@cache
def folder() -> Path:
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="solaris-fuzz-", dir=shared if shared.is_dir() else None))


def record(value: bytes | None, key: bytes | None = b"u1", topic: str = "candidates") -> Record:
    return Record(topic, 0, 0, key, value, NOW_MS)


def event_bytes(data: bytes) -> None:
    """All JSON decoders; an event that is taken is encoded and read again, and made into columns."""
    for decode in DECODERS:
        try:
            event = decode(data)
        except InvalidEvent as e:
            refused = e
        else:
            assert decode(events.encode(event)) == event
            continue
        assert refused.reason
        assert len(refused.detail) < 2_000
    encoder = Encoder(demo().info.spec, Catalogue(demo().info.spec))
    with contextlib.suppress(InvalidEvent):
        encoder.catalogue.update([events.decode_item(data)])
    for decode, make in (
        (events.decode_candidates, encoder.candidates),
        (hashed_candidates, encoder.candidates),
        (events.decode_impression, encoder.impressions),
    ):
        with contextlib.suppress(InvalidEvent):
            batch = make([decode(data)])  # type: ignore[operator]
            columns = BatchInputs(batch, demo().info.spec, encoder.catalogue.topic_column)
            for source in ("item_features", "request_features", "history_features", "history_age", "counters"):
                assert np.isfinite(columns.get(source, 0)).all(), source


def keyed(data: bytes) -> None:
    """Key and value of a record: one event or one dead letter, and the letter tells of the record."""
    size = data[0] if data else 0
    key, value = data[1 : 1 + size] or None, data[1 + size :] or None
    r = record(value, key)
    for decode in (events.decode_candidates, hashed_candidates, events.decode_impression):
        found, sources, dead = keyed_events([r, r], decode, 86_400_000)
        assert len(found) == len(sources)
        assert len(found) + len(dead) == 2
        for d in dead:
            letter = dlq.dead_letter(r.topic, 0, 5, r.key, r.value, d.rejected, "verifier", received=r.headers)
            back = dlq.read(0, 1, NOW_MS, *letter)
            assert (back.reason, back.source_topic, back.source_offset) == (d.rejected.reason, r.topic, 5)


def precompute(data: bytes) -> None:
    try:
        request = packed.decode_precompute(data)
    except DecodeError:
        request = None
    else:
        assert packed.encode_precompute(request)[8:] == data[8:]  # the last two of the head are reserved
        assert packed.request_pairs(data) == len(request.items)
    packed.request_pairs(data)
    spec = demo().info.spec
    encoder = Encoder(spec, Catalogue(spec))
    # With the spec and key of the record itself, so that what it holds is looked at too.
    given = encoder.spec_hash
    if request is not None and request.item_features.shape[0] == len(spec.item):
        given = request.spec
    found, _, dead = precompute_requests([record(data)], given, len(spec.item), len(spec.request))
    assert len(found) + len(dead) == 1
    if request is not None and (request.item_features.shape[0], len(request.request_features)) == (
        len(spec.item),
        len(spec.request),
    ):
        batch = encoder.from_precompute([request])
        BatchInputs(batch, spec, encoder.catalogue.topic_column).get("history_age", 0)


def embedding(data: bytes) -> None:
    """A changelog record: the decoder, the store's stricter one, and the store's compiled one agree."""
    good: bool
    try:
        chunk = packed.decode_embedding(data)
        made, end = packed.encode_embedding(chunk), packed._E.size
        assert (made[8 : end - 4], made[end:]) == (data[8 : end - 4], data[end:])  # what is left out is reserved
    except DecodeError:
        pass
    try:
        strict = decode_chunk(data)
        good = True
    except DecodeError:
        good = False
    batch = parse_batch([ChangelogRecord(7, data), ChangelogRecord(8, data)])
    assert len(batch.records) == (2 if good else 0)
    assert len(batch.rejected) == (0 if good else 2)
    if good:
        assert int(batch.users[0]) == strict.user
        assert int(batch.ts_ms[1]) == strict.ts_ms
        assert int(batch.pairs[0]) == len(strict.items)


def counts(data: bytes) -> None:
    """Records of the rolling counts: what is let through is the same record again, but for the reserved bytes."""
    with contextlib.suppress(DecodeError):
        chunk = packed_counts.encode_count(packed_counts.decode_count(data))
        assert (chunk[8:28], chunk[32:]) == (data[8:28], data[32:])
    with contextlib.suppress(DecodeError):
        deltas = packed_counts.encode_items(packed_counts.decode_items(data))
        assert (deltas[8:20], deltas[24:]) == (data[8:20], data[24:])


def headers(data: bytes) -> None:
    """Headers and offsets of dead letters that somebody else may have written, and what is shown of them."""
    parts = data.split(b"\x00")
    names = (
        dlq.REASON, dlq.DETAIL, dlq.SOURCE_TOPIC, dlq.SOURCE_PARTITION, dlq.SOURCE_OFFSET, dlq.ATTEMPT, dlq.SIZE,
        dlq.PARKED, dlq.KEY_SIZE, "other",
    )  # fmt: skip
    given = tuple((names[i % len(names)], p or None) for i, p in enumerate(parts[2:]))
    key, value = (parts[0] or None), (parts[1] if len(parts) > 1 else None)
    letter = dlq.read(0, 1, NOW_MS, key, value, given)
    assert letter.attempt >= 0
    dlq.why_not_retried(letter, 3, {"candidates"})
    dlq.back_to_source(letter)
    assert dlq.attempt_of(given) == letter.attempt
    again = dlq.dead_letter("t", 0, 1, key, value, Rejected("r", letter.detail), "verifier", letter.attempt, 0, given)
    assert dlq.read(0, 1, NOW_MS, *again).source_offset == 1
    for topic in (*BY_NAME, "unknown"):
        shown = tail.Record(topic, 0, 1, NOW_MS, key, value, given)
        msgspec.json.encode(tail.to_json(shown))
        line = tail.to_text(shown, NOW_MS)
        assert line.isprintable()
    tail.hexdump(value or b"", 64)


def shown(data: bytes) -> None:
    """What `solaris tail` makes of any value of any topic, and of its options."""
    for topic in (*BY_NAME, "unknown"):
        r = tail.Record(topic, 0, 1, NOW_MS, data[:20], data, ())
        msgspec.json.encode(tail.to_json(r))
        assert tail.to_text(r, NOW_MS).isprintable()
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(SettingsError):
        tail.parse_time(text, NOW_MS)
    with contextlib.suppress(SettingsError):
        durations.show_ms(durations.parse_ms("--ttl", text))
    with contextlib.suppress(SettingsError):
        Mix.parse(text)


def monitored(data: bytes) -> None:
    """Records of `stats`, `ranked-ads` and `feedback` as the monitor takes them, and its rows."""
    blocks, processes = Blocks(1.0, 600_000, 3_600_000), Processes(3_600_000)
    for part in data.split(b"\n")[:8]:
        processes.stats(NOW_MS, part)
        blocks.ranked(0, NOW_MS, part, NOW_MS)
        blocks.feedback(0, NOW_MS + 1, part, NOW_MS)
    for _, row in blocks.changed():
        again = Blocks(1.0, 600_000, 3_600_000)
        again.load((0, NOW_MS), row)
    blocks.total(0, NOW_MS * 2)
    blocks.expire(NOW_MS + 10_000_000)
    for _, _, row in processes.changed():
        Processes(3_600_000).load(row)
    processes.expire(NOW_MS + 10_000_000)


def committed(data: bytes) -> None:
    """What a process finds beside its offsets and in its state folder."""
    text = data.decode("utf-8", "replace")
    gate = Gate.load(GateSettings(budget_pairs_per_s=5.0), text)
    gate.decide(1, NOW_MS, np.array([0.5, math.nan, -1.0], np.float32))
    assert Gate.load(GateSettings(), gate.dump()).clock.now_ms == gate.clock.now_ms
    with contextlib.suppress(metadata.BrokenMetadata, StoreError):
        metadata.decode(data)
    segments.parse(text)
    mark = folder() / metadata.MARK
    mark.write_bytes(data)
    with contextlib.suppress(StoreError):
        metadata.check_mark(folder())
    named = folder() / "index"
    named.mkdir(exist_ok=True)
    (named / "manifest.json").write_bytes(data)
    with contextlib.suppress(StoreError):
        artifact.read(named, "manifest.json", "solaris-neighbours", 1)


def manifest(data: bytes) -> None:
    """A bundle of the demo's graphs with this manifest, or with the demo's manifest changed by it (a JSON merge)."""
    at = _bundle_folder()
    for raw in (data, _merged(data)):
        if raw is not None:
            (at / bundle.MANIFEST).write_bytes(raw)
            with contextlib.suppress(BundleError):
                bundle.read_bundle(at)


def graph(data: bytes) -> None:
    """A graph's bytes as far as we read them ourselves; then ONNX Runtime says what it says in an error of ours."""
    try:
        onnxfile.refuse_external_data(data)
    except ValueError:
        return
    if len(data) > 4096:
        return
    at = _bundle_folder()
    made = json.loads((DEMO_BUNDLE / bundle.MANIFEST).read_text())
    made["graphs"]["vm"].update(file="fuzz.onnx", bytes=len(data), sha256=bundle.hashlib.sha256(data).hexdigest())
    (at / "fuzz.onnx").write_bytes(data)
    (at / bundle.MANIFEST).write_text(json.dumps(made))
    read = bundle.read_bundle(at)
    from models.runtime import OnnxRuntime

    with contextlib.suppress(BundleError):
        OnnxRuntime(bundle.Bundle(read.path, read.manifest, {"vm": data}, read.info))


def settings(data: bytes) -> None:
    """A settings file, flags, and variables of the environment."""
    file = folder() / "solaris.toml"
    file.write_bytes(data)
    with contextlib.suppress(SettingsError):
        load(file, environment={})
    lines = data.decode("utf-8", "replace").split("\n")[:10]
    with contextlib.suppress(SettingsError):
        load(sets=lines, environment={"SOLARIS_CONFIG": "/dev/null"})
    pairs = (line.partition("=") for line in lines)
    with contextlib.suppress(SettingsError):
        layers.from_environment({f"SOLARIS_{k}": v for k, _, v in pairs}, SPECS)


def log_lines(data: bytes) -> None:
    """The lines of each text format: every one an event that keeps the rules, or a bad line."""
    for name in ("log.jsonl", "behaviors.tsv", "ratings.csv"):
        at = folder() / name.partition(".")[0]
        at.mkdir(exist_ok=True)
        (at / name).write_bytes(data)
        if name == "behaviors.tsv":
            (at / "news.tsv").write_bytes(data)
        if name == "ratings.csv":
            (at / "movies.csv").write_bytes(data)
        log = EventLog(at / name, "off", BadLines())
        for event in log.events():
            events.check(event)


def compressed(data: bytes) -> None:
    """Compressed logs that are cut off or none."""
    for name in ("log.jsonl.gz", "log.jsonl.zst"):
        (folder() / name).write_bytes(data)
        log = EventLog(folder() / name, "off", BadLines())
        for event in log.events():
            events.check(event)


def rows(data: bytes) -> None:
    """A row of a Parquet log, as JSON."""
    try:
        row = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return
    if not isinstance(row, dict):
        return
    # What the file's schema makes sure of.
    row = {k: v if isinstance(v, str) else None for k, v in row.items()} | {
        "ts": row.get("ts") if type(row.get("ts")) is int and abs(row["ts"]) < 2**63 else 0,
        "items": row["items"] if isinstance(row.get("items"), list) else None,
        "scores": row["scores"] if isinstance(row.get("scores"), list) else None,
    }
    row = {"type": None, "id": None} | row
    with contextlib.suppress(InvalidEvent):
        events.check(parquet.from_row(row))


def scanned(data: bytes) -> None:
    """The compiled check of log lines: what it decides, the decoder accepts with the same result."""
    lines = [line for line in data.split(b"\n") if len(line) < 4096]
    text = b"".join(line + b"\n" for line in lines)
    if not lines:
        return
    found = scan.scan(text + jsonl.PAD)
    assert found.shape == (7, len(lines))
    for n, line in enumerate(lines):
        assert text[found[5, n] : found[6, n]] == line
        if found[0, n] == scan.UNDECIDED:
            continue
        event = replay_records._light.decode(line)
        assert type(event).__name__.strip("_") == ("Candidates", "Impression", "Feedback", "Item")[found[0, n] - 1]
        key = str(event.id) if found[0, n] == scan.ITEM else event.user
        assert text[found[1, n] : found[2, n]] == key.encode()
        assert hash_bytes(text[found[1, n] : found[2, n]])
        assert found[3, n] == event.ts
        offered = {scan.CANDIDATES: "items", scan.IMPRESSION: "ads"}.get(int(found[0, n]))
        assert found[4, n] == (len(getattr(event, offered)) if offered else 0)


def _bundle_folder() -> Path:
    at = folder() / "bundle"
    if not at.exists():
        shutil.copytree(DEMO_BUNDLE, at)
    return at


def _merged(data: bytes) -> bytes | None:
    try:
        change = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return json.dumps(_merge(json.loads((DEMO_BUNDLE / bundle.MANIFEST).read_text()), change)).encode()


def _merge(base: Any, change: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {**base, **{k: _merge(base.get(k), v) for k, v in change.items()}}


TARGETS: dict[str, Callable[[bytes], None]] = {
    "events": event_bytes,
    "keyed": keyed,
    "precompute": precompute,
    "embedding": embedding,
    "counts": counts,
    "headers": headers,
    "shown": shown,
    "monitored": monitored,
    "committed": committed,
    "manifest": manifest,
    "graph": graph,
    "settings": settings,
    "log_lines": log_lines,
    "compressed": compressed,
    "rows": rows,
    "scanned": scanned,
}
