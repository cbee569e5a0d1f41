"""The machine, and docs/benchmarks.md from a run's figures."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.harness.bundle import SIZES, VM_PLUS_WIDTHS, VM_WIDTHS, flops, fm_widths
from benchmarks.harness.figures import Figures

PACKAGES = ("confluent-kafka", "onnxruntime-gpu", "onnxruntime", "rocksdict", "numpy", "numba", "msgspec",
            "faust-streaming", "aiokafka")  # fmt: skip
BUSY = 1.0


def load() -> float:
    return round(os.getloadavg()[0], 1)


def machine() -> dict[str, Any]:
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    try:
        java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr.splitlines()[0]
    except (OSError, IndexError):
        java = ""
    return {
        "cpu": cpu, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(), "java": java, "packages": packages, "load_before": load(),
    }  # fmt: skip


def page(figures: Figures, result: dict[str, Any]) -> str:
    m = result["machine"]
    widths = "-".join(map(str, VM_WIDTHS))
    plus = "-".join(map(str, VM_PLUS_WIDTHS))
    heavy = flops(fm_widths(SIZES["heavy"])) / 1e6
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench` (`python benchmarks/bench.py`); do not edit by hand. `make bench-quick` is a short",
        "form that leaves this page alone. CPU time is user + system of the role's own process, from the operating",
        "system; ratios compare figures of one run, taken by turns.",
        "",
        f"- Machine: {m['cpu']}, {m['cores']} cores, {m['system']}; Python {m['python']}; {m['java']}",
        f"- Packages: {', '.join(f'{k} {v}' for k, v in m['packages'].items())}",
        f"- Command: `python benchmarks/bench.py {' '.join(result['arguments'])}`"
        + ("; a quick form: 2 to 3 repeats, growth to 1e6 pairs only." if result["quick"] else "."),
        f"- Load average (1 minute) before the run {m['load_before']:g}, after it, its own included, "
        f"{m['load_after']:g}; the run took {result['took_s']:.0f} s.",
    ]
    if m["load_before"] > BUSY:  # the load after it is mostly the run's own processes
        lines += [
            "",
            "**Other programs used these cores when the run began.** Wall-clock figures (latency, freshness, start,",
            "events per second) then say what a crowded machine gives, not what the pipeline can do; CPU time suffers",
            "less (shared caches and hyper-threads), and ratios least.",
        ]
    lines += [
        "",
        "Workload: 100 candidates an event, 50 accepted; 50 ads an impression, 25 of them direct hits; 17 float16 a",
        f"pair; a user state of 512 numbers; histories of 10; VM {widths} and slot model {plus} (both run for every",
        f"ad); FM of {heavy:.0f} MFLOP a pair for the embedder and for freshness. One Apache Kafka (KRaft) on the same",
        "cores. The VM's 192 inputs are multiplied part by part, the 66 of the request once a request, as the trained",
        "VM does it; every peer runs the same graphs.",
        "",
        "| figure | median | spread | target | |",
        "|---|---|---|---|---|",
        *(f"| `{k}` | {v} | {s} | {t} | {verdict} |" for k, v, s, t, verdict in figures.rows()),
        "",
    ]
    if missed := figures.missed():
        lines += ["**Missed:** " + ", ".join(f"`{k}`" for k in missed) + ". See performance-notes.md.", ""]
    if absent := figures.absent():
        lines += ["**Not measured in this run:** " + ", ".join(f"`{k}`" for k in absent) + ".", ""]
    lines += [f"- case `{k}`: not measured: {v.splitlines()[0]}" for k, v in result.get("not_measured", {}).items()]
    if result.get("not_measured"):
        lines.append("")
    if result["failures"]:
        lines += [
            "**Cases that failed:** " + "; ".join(f"{k}: {v.splitlines()[0]}" for k, v in result["failures"].items()),
            "",
        ]
    return "\n".join(lines) + FOOT


FOOT = """
## What each figure is
- `verifier.cpu_over_floor`, `ranker.cpu_over_floor`: CPU per event of the transactional role over its *floor*, which
  is decode + model (columns and graph runs) + encode on the same batches in memory: no Kafka, no gate, no state.
- `*_over_ours`: the peer's CPU per event over that of our transactional role, each doing the same work on the same
  topics. Both processes are frozen while the input is written; then ours drains it, then the peer; the median of the
  ratios of such turns counts (`*.ours_cpu_us` is our role in these turns). Faust counts by the better of its two
  forms.
- `*.same_answers`: the share of our answers of the last turn that the peer gave too. Verifier: the same pairs in the
  same order with the same scores. Ranker: the same ads in the same order, each with the same source, age and score
  (1e-4; ads may change places only where pCTR x bid is that close).
- `embedder.share_of_model`: pairs per CPU second of the whole embedder process (both lanes, Kafka, store) over those
  of the bare FM session at the same batch size. `_wall` is the same in wall-clock time.
- `latency_ms`: impression due -> ranked ad readable with `read_committed`, open loop, at half of
  `most_per_s`: the highest rate, found to within a fifth, that ranker, broker, client and reader keep up with here.
- `freshness_ms`: user event due -> state, or pair, in the ranker's answer, while the embedder is busy
  for 70 % of the time (`embedder_cpu`); `state_in_burst` with two seconds' worth of extra events thrown in at once.
  All three roles and the broker share the cores.
- `growth`: ranker CPU per impression, more live pairs or more partitions over 1e5 pairs in one partition.
- `start`: process start -> ready on empty topics; for the restore, health page up -> ready, which has joining the
  group and the catalogue in it.

## Peers
All sit in `benchmarks/peers/`, read the same topics as our role at the same time, and send to a topic of their own.
The peers in Python run our cores (columns, models, gate, encoding), so that only the stream engine and its state
differ. With 100 candidates or 50 ads an event that common part is most of the work, so the ratios say little about
what an engine costs on small events.
- **Faust** (`faust_verifier.py`): our verifier core in an agent. *per_event*: `async for event in stream`, the plain
  form; *take*: `stream.take(500, within=0.05)`, one model call for a batch. At-least-once, raw serializers, deep
  stream buffer, lz4, 5 ms linger, commits every 2.8 s.
- **Quix Streams 3.28.1** (an environment of its own), event by event, since a `StreamingDataFrame` has no batches
  without windows; exactly-once and at-least-once; bytes in and out, a commit a second, lz4, 5 ms linger.
  `quix_verifier.py`: our verifier core in `apply`. `quix_ranker.py`: `embeddings` and `impressions` concatenated,
  which is how two topics share a state there; a user's chunks are one value of its RocksDB store (changelog on),
  looked up with numpy; our ranker core for the rest. Whole runs only.
- **Kafka Streams 4.3.1** (`kstreams/`, Java 17, built by Maven on first use): the ranker written anew in Java.
  `embeddings` aggregate by user into a persistent (RocksDB) store with its changelog, one value a user: the packed
  chunks less what is past TTL and window. `impressions` left-join that table by key, so one point read serves an
  impression where a key for each user and item would take a range scan of 100 entries. The catalogue is a global
  store, decoded once per item, as our ranker does it. ONNX Runtime for Java 1.29.0 (1.31 was not on Maven Central
  when this was written), one intra-op thread, tensors over direct buffers that stay; Jackson's streaming parser and
  writer. One call of each model for a record, since the DSL and the Processor API hand on record by record.
  `exactly_once_v2` with its default commit every 100 ms, one stream thread, record cache of 256 MB (it holds all of
  this state), 1,000 records a poll, lz4, 5 ms linger, batches of 256 KB, heap of 1 GB, parallel collector. Measured
  when the JVM has settled: rounds of impressions until two in a row cost no less than 95 % of the best so far. Whole
  runs only.

## GPU
Not measured on a GPU. `python benchmarks/gpu.py` checks the FM's vectors against float32 on the CPU and times batches
of 256 to 65,536 pairs where there is a card; here it ran in its reduced form, one CPU thread, CPU time:

| engine | FM | batch | pairs/s | TFLOP/s | share of the measured matrix peak |
|---|---|---|---|---|---|
| onnxruntime, IO binding | 20 MFLOP | 256 | 5,725 | 0.11 | 93% |
| onnxruntime, IO binding | 20 MFLOP | 1,024 | 5,606 | 0.11 | 91% |
"""
