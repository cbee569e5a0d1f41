"""Figures of the embedding store, beside a per-pair baseline in the same run.

    python benchmarks/state.py [--quick] [--json] [--dir DIR]

Every operation runs on one thread. Rates are per second of that thread's CPU time ("per core"), so that other work on
the machine does not count; percentiles of single look-ups are given in wall time and in CPU time. Users are drawn by
Zipf's law, in batches as the ranker makes them. The baseline keeps one RocksDB key per (user, item) with the same
vectors, tuned for point look-ups, and reads an impression's 50 pairs with one `multi_get`: it gives vectors only, no
aggregates and no state.

`--quick` (under 45 s) does 1M pairs of 17 numbers and a small restore; without it 10M pairs and 64 numbers too.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Python puts this folder first, where this very file hides the package of the same name.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
import psutil  # noqa: E402
from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, Rdict, WriteBatch  # noqa: E402

from state.api import ChangelogRecord, StoreDims, StoreSettings  # noqa: E402
from state.store import RocksStore, open_store  # noqa: E402
from topics.packed import EmbeddingChunk, encode_embedding  # noqa: E402

T0 = 1_573_700_000_000
HOUR = 3_600_000
MODEL = 5
ADS = 50
PAIRS_PER_CHUNK = 30
CHUNKS_PER_USER = 4
STATE, PROFILE = 16, 16
TOPICS = 20
APPLY_BATCH = 200
"""chunks a WriteBatch"""
REQUESTS = 100
"""requests a look-up"""
ZIPF = 1.05
CPU = time.thread_time


@dataclass
class Case:
    pairs: int
    dim: int
    settings: StoreSettings

    @property
    def users(self) -> int:
        return self.pairs // (PAIRS_PER_CHUNK * CHUNKS_PER_USER)

    @property
    def dims(self) -> StoreDims:
        return StoreDims(self.dim, STATE, PROFILE)


class Source:
    """Chunks of a case, made on the fly: user u's items are u * 1009 + 0..149, so that impressions can hit them."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        self.pool = self.rng.standard_normal((4096, PAIRS_PER_CHUNK, case.dim)).astype(np.float16)
        self.offset = 0

    def users(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Spread like hashes."""
        return (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)

    def items(self, ids: npt.NDArray[np.int64], index: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return (ids * 1009 + index).astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)

    def chunk(self, user: int, quarter: int, ts_ms: int) -> ChangelogRecord:
        index = np.arange(quarter * PAIRS_PER_CHUNK, (quarter + 1) * PAIRS_PER_CHUNK)
        items = np.sort(self.items(np.full(PAIRS_PER_CHUNK, user), index))
        self.offset += 1
        v = self.pool[self.offset % len(self.pool)]
        state = v[0, :1].repeat(STATE)
        value = encode_embedding(
            EmbeddingChunk(
                int(self.users(np.array([user]))[0]), ts_ms, MODEL, self.offset, items,
                (items % np.uint64(TOPICS)).astype(np.uint32), v, None, state, state, f"c{self.offset}",
            )
        )  # fmt: skip
        return ChangelogRecord(self.offset - 1, value)

    def batches(self, size: int) -> Any:
        """All chunks, a quarter of each user's at a time, spread over 6 hours."""
        span = 6 * HOUR - 1
        total = self.case.users * CHUNKS_PER_USER
        batch: list[ChangelogRecord] = []
        for quarter in range(CHUNKS_PER_USER):
            for user in self.rng.permutation(self.case.users).tolist():
                batch.append(self.chunk(user, quarter, T0 + span * self.offset // total))
                if len(batch) == size:
                    yield batch
                    batch = []
        if batch:
            yield batch

    def question(self, requests: int, zipf: npt.NDArray[np.float64]) -> dict[str, Any]:
        """`requests` impressions of 50 ads, half of them live pairs of the user."""
        return self.question_of(np.searchsorted(zipf, self.rng.random(requests)).astype(np.int64))

    def question_of(self, ids: npt.NDArray[np.int64]) -> dict[str, Any]:
        requests = len(ids)
        index = self.rng.integers(0, PAIRS_PER_CHUNK * CHUNKS_PER_USER * 2, (requests, ADS))
        items = self.items(np.repeat(ids, ADS), index.ravel())
        return {
            "users": self.users(ids),
            "splits": np.arange(requests + 1, dtype=np.int64) * ADS,
            "items": items,
            "topics": (items % np.uint64(TOPICS)).astype(np.uint32),
            "now_ms": np.full(requests, T0 + 6 * HOUR - 1, np.int64),
            "model": MODEL,
            "dims": self.case.dims,
        }


def zipf_cdf(users: int) -> npt.NDArray[np.float64]:
    weights = 1.0 / np.arange(1, users + 1) ** ZIPF
    return np.cumsum(weights) / weights.sum()


def fill(store: RocksStore, source: Source) -> dict[str, float]:
    spent, chunks, payload = 0.0, 0, 0
    for batch in source.batches(APPLY_BATCH):
        began = CPU()
        store.apply(batch)
        spent += CPU() - began
        chunks += len(batch)
        payload += sum(len(r.value) for r in batch)
    return {"apply_pairs_per_s": chunks * PAIRS_PER_CHUNK / spent, "payload_bytes": payload}


def measure_lookups(
    store: RocksStore, base: MultiGet | None, source: Source, rounds: int, requests: int = REQUESTS
) -> tuple[dict[str, float], float]:
    """Zipf look-ups after as many to warm the caches, and the baseline's: short slices by turns, so that whatever
    else the machine does meets both; medians over the slices."""
    zipf = zipf_cdf(source.case.users)
    for q in [source.question(requests, zipf) for _ in range(max(40_000, 3 * source.case.users) // requests)]:
        store.lookup(**q)
    if base is not None:
        for q in [source.question(1, zipf) for _ in range(1000)]:
            base.lookup(q, source.case.dim)
    before = store.stats()
    ours, theirs = [], []
    hits, n = 0, 0
    for _ in range(rounds):
        questions = [source.question(requests, zipf) for _ in range(max(1, 4000 // requests))]
        began = CPU()
        for q in questions:
            out = store.lookup(**q)
        ours.append((CPU() - began) / (len(questions) * requests))
        hits += int((out.ts_ms >= 0).sum())
        n += len(questions) * requests
        if base is not None:
            questions = [source.question(1, zipf) for _ in range(400)]
            began = CPU()
            for q in questions:
                base.lookup(q, source.case.dim)
            theirs.append((CPU() - began) / len(questions))
    loads = store.stats()["user_cache_misses"] - before["user_cache_misses"]
    each = float(np.median(ours))
    figures = {
        "pairs_per_s": ADS / each,
        "us_per_request": 1e6 * each,
        "direct_share": hits / (rounds * requests * ADS),
        "cache_hit_share": 1 - loads / n,
    }
    return figures, ADS / float(np.median(theirs)) if theirs else 0.0


def measure_single(store: RocksStore, source: Source, n: int) -> dict[str, float]:
    zipf = zipf_cdf(source.case.users)
    questions = [source.question(1, zipf) for _ in range(n)]
    for q in questions:
        store.lookup(**q)
    times = np.empty((2, n))
    for i, q in enumerate(questions):
        wall, cpu = time.perf_counter(), CPU()
        store.lookup(**q)
        times[1, i] = CPU() - cpu
        times[0, i] = time.perf_counter() - wall
    return {
        f"p{p:g}_{name}us": float(1e6 * np.percentile(row, p))
        for name, row in zip(("", "cpu_"), times, strict=True)
        for p in (50, 99, 99.9)
    }


def measure_uncached(store: RocksStore, source: Source, n: int = 3000) -> float:
    """CPU us a request where every user must be read from disk (from the system's page cache, mostly)."""
    ids = source.rng.permutation(source.case.users)[:n].astype(np.int64)
    questions = [source.question_of(ids[i : i + REQUESTS]) for i in range(0, len(ids), REQUESTS)]
    store._cache.clear(complete=False)
    began = CPU()
    for q in questions:
        store.lookup(**q)
    return 1e6 * (CPU() - began) / len(ids)


class MultiGet:
    """The baseline: one key per pair, `multi_get` of an impression's pairs."""

    def __init__(self, path: Path, cache_bytes: int) -> None:
        o = Options(raw_mode=True)
        o.create_if_missing(True)
        b = BlockBasedOptions()
        b.set_block_cache(Cache(cache_bytes))
        b.set_bloom_filter(10, False)
        o.set_block_based_table_factory(b)
        o.set_compression_type(DBCompressionType.none())
        self.db = Rdict(str(path), o)

    def fill(self, source: Source) -> float:
        spent, pairs = 0.0, 0
        key = struct.Struct(">QQ")
        for batch in source.batches(APPLY_BATCH):
            began = CPU()
            write = WriteBatch(raw_mode=True)
            for r in batch:
                user = int.from_bytes(r.value[8:16], "little")
                ts = r.value[16:24]
                items = np.frombuffer(r.value, "<u8", PAIRS_PER_CHUNK, 56).tolist()
                at = 56 + 12 * PAIRS_PER_CHUNK
                width = 2 * source.case.dim
                for i, item in enumerate(items):
                    write[key.pack(user, item)] = ts + r.value[at + i * width : at + (i + 1) * width]
            self.db.write(write)
            spent += CPU() - began
            pairs += len(batch) * PAIRS_PER_CHUNK
        self.db.flush()
        return pairs / spent

    def lookup(self, q: dict[str, Any], dim: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        users = np.repeat(q["users"], ADS)
        keys = np.stack([users, q["items"]], 1).astype(">u8").tobytes()
        values = self.db[[keys[16 * i : 16 * i + 16] for i in range(len(users))]]
        empty = b"\xff" * 8 + bytes(2 * dim)
        raw = np.frombuffer(b"".join([v or empty for v in values]), np.uint8).reshape(len(users), 8 + 2 * dim)
        return raw[:, 8:].copy().view(np.float16).astype(np.float32), raw[:, :8].copy().view(np.int64)[:, 0]


def measure_restore(path: Path, case: Case, chunks: int) -> float:
    """Pairs per second of applying a changelog that lies ready in memory, in batches of 2000 records."""
    source = Source(case, seed=9)
    log = []
    for batch in source.batches(1000):
        log.append(batch)
        if sum(map(len, log)) >= chunks:
            break
    store = open_store(path, case.settings)
    began = CPU()
    for batch in log:
        store.apply(batch)
    spent = CPU() - began
    store.close()
    return sum(map(len, log)) * PAIRS_PER_CHUNK / spent


def settle(store: RocksStore) -> None:
    """Everything in tables, nothing in memory: the state in which bytes on disk are compared."""
    store.flush()
    store.expire(store.clock_ms)
    time.sleep(0.5)


def run(case: Case, base_dir: Path, quick: bool, baseline: bool) -> dict[str, Any]:
    rss = psutil.Process()
    source = Source(case)
    path = base_dir / f"store-{case.pairs}-{case.dim}"
    rss_before = rss.memory_info().rss
    store = open_store(path, case.settings)
    result: dict[str, Any] = {"pairs": case.pairs, "dim": case.dim, "users": case.users}
    result |= fill(store, source)
    settle(store)
    base = None
    if baseline:
        base = MultiGet(base_dir / "pairs", case.settings.cache_bytes)
        result["multiget_fill_pairs_per_s"] = base.fill(Source(case))
    rounds = 15 if quick else 40
    result["lookup"], multiget = measure_lookups(store, base, source, rounds)
    if base is not None:
        result["multiget"] = {"pairs_per_s": multiget}
        base.db.close()
        shutil.rmtree(base_dir / "pairs")
    result["lookup_batches_of_10"], _ = measure_lookups(store, None, source, rounds, requests=10)
    result["single"] = measure_single(store, source, 3000 if quick else 10_000)
    stats = store.stats()
    result["uncached_us_per_request"] = measure_uncached(store, source)
    result["disk_ratio"] = stats["disk_bytes"] / result["payload_bytes"]
    result["cache_bytes"] = case.settings.cache_bytes
    result["held_bytes"] = store._cache.nbytes + stats["block_cache_bytes"] + stats["memtable_bytes"]
    result["rss_growth_bytes"] = rss.memory_info().rss - rss_before
    store.close()
    del store
    gc.collect()
    reopened, cpu = time.perf_counter(), CPU()
    open_store(path, case.settings).close()
    result["reopen_s"], result["reopen_cpu_s"] = time.perf_counter() - reopened, CPU() - cpu
    result["restore_pairs_per_s"] = measure_restore(base_dir / "restore", case, 20_000 if quick else 60_000)
    shutil.rmtree(base_dir / "restore")
    shutil.rmtree(path)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="1M pairs of 17 numbers only, under 45 s")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dir", type=Path, help="where the stores are made (default: a temporary directory)")
    args = parser.parse_args()
    settings = StoreSettings(cache_bytes=1 << 30)
    cases = [Case(1_000_000, 17, settings)]
    if not args.quick:
        cases += [Case(1_000_000, 64, settings), Case(10_000_000, 17, settings)]
    results = []
    with tempfile.TemporaryDirectory(dir=args.dir) as tmp:
        for i, case in enumerate(cases):
            results.append(run(case, Path(tmp), args.quick, baseline=i < 2))
            if not args.json:
                show(results[-1])
    first = results[0]
    summary: dict[str, Any] = {
        "lookup_pairs_per_s": first["lookup"]["pairs_per_s"],
        "lookup_ratio_vs_multiget": first["lookup"]["pairs_per_s"] / first["multiget"]["pairs_per_s"],
        "lookup_single_p99_us": first["single"]["p99_us"],
        "lookup_single_p99_cpu_us": first["single"]["p99_cpu_us"],
        "apply_pairs_per_s": first["apply_pairs_per_s"],
        "restore_pairs_per_s": first["restore_pairs_per_s"],
        "disk_ratio": first["disk_ratio"],
    }
    if not args.quick:
        summary["cost_10m_vs_1m"] = results[2]["lookup"]["us_per_request"] / first["lookup"]["us_per_request"]
        summary["apply_cost_10m_vs_1m"] = first["apply_pairs_per_s"] / results[2]["apply_pairs_per_s"]
    summary["runs"] = results
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        for key, value in summary.items():
            if key != "runs":
                print(f"{key:28} {value:14,.2f}")


def show(r: dict[str, Any]) -> None:
    print(f"{r['pairs']:,} pairs of {r['dim']} numbers, {r['users']:,} users, cache {r['cache_bytes'] >> 20} MiB")
    print(json.dumps({k: v for k, v in r.items() if k not in ("pairs", "dim", "users")}, indent=1))


if __name__ == "__main__":
    main()
