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
        "cores.",
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
- `*_over_ours`: the peer's CPU per event over ours (transactional), each doing the same work on the same topics.
  `*.same_answers` is the share of our answers that the peer gave too, pair by pair. Faust counts by the better of
  its two forms.
- `embedder.share_of_model`: pairs per CPU second of the whole embedder process (both lanes, Kafka, store) over those
  of the bare FM session at the same batch size. `_wall` is the same in wall-clock time.
- `latency_ms`: impression due -> ranked ad readable with `read_committed`, open loop, at half of the throughput of
  the same run.
- `freshness_ms`: user event due -> state, or pair, in the ranker's answer, at 70 % of the embedder's throughput of
  this run; `state_in_burst` with two seconds' worth of extra events thrown in at once. All three roles and the broker
  share the cores.
- `growth`: ranker CPU per impression, more live pairs or more partitions over 1e5 pairs in one partition.
- `start`: process start -> ready on empty topics; for the restore, health page up -> ready, which has joining the
  group and the catalogue in it.

## Peers
- **Faust** (`benchmarks/peers/faust_verifier.py`): our verifier core in an agent. *unpacked*: one event at a time;
  *packed*: `stream.take(500, within=0.05)`. At-least-once, raw serializers, deep stream buffer, lz4, 5 ms linger,
  commits every 2.8 s.
- **Quix Streams 3.28.1** (`benchmarks/peers/quix_verifier.py`, an environment of its own): our verifier core in
  `StreamingDataFrame.apply`, event by event; exactly-once and at-least-once; bytes in and out, a commit a second, lz4,
  5 ms linger. Whole runs only. The ranker's join in Quix is not built yet.
- **Kafka Streams** (the ranker's join in Java) is not built yet; `ranker.kstreams_over_ours` has no figure.

## GPU
Not measured on a GPU. `python benchmarks/gpu.py` checks the FM's vectors against float32 on the CPU and times batches
of 256 to 65,536 pairs where there is a card; here it ran in its reduced form, one CPU thread, CPU time:

| engine | FM | batch | pairs/s | TFLOP/s | share of the measured matrix peak |
|---|---|---|---|---|---|
| onnxruntime, IO binding | 20 MFLOP | 256 | 5,725 | 0.11 | 93% |
| onnxruntime, IO binding | 20 MFLOP | 1,024 | 5,606 | 0.11 | 91% |
"""
