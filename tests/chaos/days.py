"""Days of event time in minutes, without Kafka: what the embedder's and the ranker's steps, stores and indexes hold.

    python tests/chaos/days.py --days 24 --folder DIR

A simulated log goes through the roles' steps in small batches, one process a role, as fast as it can; the ranker reads
the changelog that the embedder wrote to the folder. After each day a line of JSON says, in MiB, what the process has
without mapped files (`anonymous`), what the C heap has in use and free, and what RocksDB and the caches hold. The days
after the first third must be flat, by the rule of `soak.py` with a day for its four minutes. Exits 1 when they are not.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `pipeline`, as pytest does it

import psutil
from soak import BOUNDS, slope_per_hour

from models.runtime import open_runtime
from streams.heap import bound_heaps
from streams.process import _calm_collector
from streams.roles import BaseStep, PairLane, RankerStep, StateLane, Stores, VerifierStep
from streams.settings import Settings, load
from streams.step import Output, Record
from topics.events import Candidates, Event, Impression, Item, encode
from topics.ids import hash_id
from topics.readers import open_log
from topics.simulator import preset, write

DAY_MS = 86_400_000
DAY_S = 240.0
"""of a soak, which runs at 360 times event time"""
START_MS = 1_700_006_400_000
PARTITIONS = 4
EVENTS_AT_ONCE = 3
INDEX_EVERY_MS = DAY_MS // 4
"""a minute of a soak"""
HEADER = struct.Struct("<QIQI")
"""of a changelog record in the file: events read when it was written, partition, offset, length"""
EMPTY_LOGS = {"embeddings": (0, 0), "counts": (0, 0)}
MIB = 1 << 20


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (n, ctypes.c_size_t)
        for n in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def held(stores: Stores) -> dict[str, Any]:
    """What the process holds now."""
    memory = psutil.Process().memory_info()
    out: dict[str, Any] = {"anonymous": (memory.rss - memory.shared) / MIB}
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Mallinfo
        heap = libc.mallinfo2()
        out |= {"heap_used": (heap.uordblks + heap.hblkhd) / MIB, "heap_free": heap.fordblks / MIB}
    each = [s.stats() for s in stores.by_partition.values()]
    for name in ("memtable_bytes", "block_cache_bytes", "user_cache_bytes", "disk_bytes"):
        out[name.removesuffix("_bytes")] = sum(s[name] for s in each) / MIB
    out = {k: round(v, 1) for k, v in out.items()}
    return out | {"segments": sum(s["segments"] for s in each), "files": psutil.Process().num_fds()}


def settings_of(folder: Path) -> Settings:
    return load(sets=[f"store.dir={folder / 'state'}", f"store.cache_bytes={4 << 20}"], environment={})


def record(topic: str, user: str, value: bytes) -> Record:
    return Record(topic, hash_id(user) % PARTITIONS, 0, user.encode(), value, 1 << 60)


def events(log: Path, steps: list[BaseStep]) -> Iterator[tuple[int, Event]]:
    """(events read, event) of the log but for its items, which the steps are given."""
    items: list[tuple[bytes, bytes]] = []
    for n, e in enumerate(open_log(log), 1):
        if isinstance(e, Item):
            items.append((str(e.id).encode(), encode(e)))
            continue
        for step in steps if items else []:
            step.items(*zip(*items, strict=True))
        items = []
        yield n, e


class Days:
    """Tells what is held at the end of each day."""

    def __init__(self, role: str, stores: Stores) -> None:
        self._role, self._stores = role, stores
        self._due = START_MS + DAY_MS
        self._began = time.monotonic()
        self.told: list[dict[str, Any]] = []

    def see(self, ts_ms: int) -> None:
        if ts_ms >= self._due:
            day = (self._due - START_MS) // DAY_MS
            self._due += DAY_MS
            self.told.append({"day": day, "wall_s": round(time.monotonic() - self._began), **held(self._stores)})
            print(json.dumps({"role": self._role, **self.told[-1]}), flush=True)


def embedder(log: Path, folder: Path) -> list[dict[str, Any]]:
    settings = settings_of(folder)

    def runtime() -> Any:
        return open_runtime(settings.model.bundle, "cpu", 1)

    verifier = VerifierStep(runtime(), settings)
    states, pairs = StateLane(runtime(), settings), PairLane(runtime(), settings)
    for p in range(PARTITIONS):
        verifier.open(p, None, {})
        pairs.open(p, None, EMPTY_LOGS)
    _calm_collector()
    ends = [0] * PARTITIONS
    days = Days("embedder", pairs.stores)
    batch: list[Record] = []
    with open(folder / "changelog", "wb") as changelog:

        def keep(n: int, o: Output) -> int:
            offset = ends[o.partition]
            ends[o.partition] += 1
            changelog.write(HEADER.pack(n, o.partition, offset, len(o.value)) + o.value)
            return offset

        for n, e in events(log, [verifier, states, pairs]):
            days.see(e.ts)
            if not isinstance(e, Candidates):
                continue
            batch.append(record("candidates", e.user, encode(e)))
            if len(batch) < EVENTS_AT_ONCE:
                continue
            wanted = [
                Record("precompute", o.partition, 0, o.key, o.value, 1 << 60) for o in verifier.run(batch).outputs
            ]
            batch = []
            read: dict[int, list[tuple[int, bytes]]] = {}
            for o in states.run(wanted).outputs:
                read.setdefault(o.partition, []).append((keep(n, o), o.value))
            own = pairs.run(wanted).outputs
            offsets = [keep(n, o) for o in own]
            pairs.committed(own, offsets)
            for o, offset in zip(own, offsets, strict=True):
                read.setdefault(o.partition, []).append((offset, o.value))
            for p, records in read.items():
                pairs.follow("embeddings", p, [k for k, _ in records], [v for _, v in records], ends[p])
    return days.told


def ranker(log: Path, folder: Path) -> list[dict[str, Any]]:
    settings = settings_of(folder)
    step = RankerStep(open_runtime(settings.model.bundle, "cpu", 1), settings)
    for p in range(PARTITIONS):
        step.open(p, None, EMPTY_LOGS)
        step.restored(p)
    _calm_collector()
    days = Days("ranker", step.stores)
    index_due = START_MS + INDEX_EVERY_MS
    batch: list[Record] = []
    with open(folder / "changelog", "rb") as changelog:
        head = changelog.read(HEADER.size)
        for n, e in events(log, [step]):
            days.see(e.ts)
            while head and HEADER.unpack(head)[0] <= n:
                _, p, offset, length = HEADER.unpack(head)
                step.follow("embeddings", p, [offset], [changelog.read(length)], offset + 1)
                head = changelog.read(HEADER.size)
            if e.ts >= index_due:
                index_due += INDEX_EVERY_MS
                for p, neighbours in step._neighbours.items():
                    neighbours.rebuild(step.stores.clock_ms(p))
                for neighbours in step._neighbours.values():
                    neighbours.wait()
            if isinstance(e, Impression):
                batch.append(record("impressions", e.user, encode(e)))
                if len(batch) == EVENTS_AT_ONCE:
                    step.run(batch)
                    batch = []
    return days.told


ROLES = {"embedder": embedder, "ranker": ranker}


def child(role: str, log: Path, folder: Path) -> None:
    bound_heaps()
    (folder / f"{role}.json").write_text(json.dumps(ROLES[role](log, folder)))
    os._exit(0)  # what is left of the stores is of no use


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=24.0)
    parser.add_argument("--users", type=int, default=222, help="about 27 events a day each")
    parser.add_argument("--folder", type=Path, default=None, help="kept after the run; default: a temporary one")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="solaris-days-") as temporary:
        folder = a.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.jsonl"
        write(preset("tiny").with_(users=a.users, hours=24 * a.days, start_ms=START_MS, seed=1), log)
        wrong = []
        for role in ROLES:
            process = multiprocessing.get_context("spawn").Process(target=child, args=(role, log, folder))
            process.start()
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"{role} ended with code {process.exitcode}")
            told = json.loads((folder / f"{role}.json").read_text())
            after = told[len(told) // 3 :]
            slope = slope_per_hour([DAY_S * d["day"] for d in after], [d["anonymous"] for d in after])
            share, least = BOUNDS["memory_mb"]
            bound = max(share * after[-1]["anonymous"], least)
            print(f"{role}: {slope / 3600 * DAY_S:+.2f} MiB a day from day {after[0]['day']} on, the bound is "
                  f"{bound / 3600 * DAY_S:.2f}")  # fmt: skip
            if slope > bound:
                wrong.append(role)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
