"""The long run: all roles on a real Kafka at a steady rate for an hour, event time compressed so that many TTLs pass.

    python tests/chaos/soak.py                        an hour; docs/soak/soak.json and soak.png
    python tests/chaos/soak.py --minutes 5 --out DIR  a look

Every 10 s the memory, open files, threads and store size of each role are noted, and how many pairs are live. After a
warm-up (a third of the run, or three windows) each must be flat: its Theil-Sen slope (the median slope between any two
samples, which the day's rhythm in the log does not bend) times an hour stays inside its bound. Exits 1 when one does
not, when a role ended (it is started again, and judged from then on), or when an impression was not answered once. The
report is written as the run goes, every five minutes. The picture needs matplotlib (`make train-setup`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `pipeline`, as pytest does it

import psutil
from chaos_watch import Watch
from confluent_kafka import OFFSET_BEGINNING, TopicPartition
from feeder import Feeder
from pipeline import ROOT, Roles

from state.api import StoreSettings
from streams.settings import load
from topics import admin
from topics.brokers import JavaKafka
from topics.events import Impression
from topics.kafka import KafkaSettings, consumer
from topics.packed import decode_embedding
from topics.readers import open_log
from topics.simulator import preset, write

ROLES = ("verifier", "embedder", "ranker")
SPEED = 360
"""event time against wall time: the default TTL of 6 h is a minute, the window of 24 h is four"""
EVENTS_PER_USER_S = 27 / 86_400 * SPEED
"""of wall time, as the simulator's users do"""
EVERY_S = 10.0
WARM_UP, WARM_UP_S = 1 / 3, 720.0
"""a third of the run, and three windows where it is long enough for that"""
# Caches are made small so that they are full after the warm-up: a cache that fills is no leak and looks like one.
SETS = (f"store.cache_bytes={4 << 20}", "loop.session_timeout_ms=30000", "loop.transaction_timeout_ms=60000")
# A busy machine may hold the broker up for long; that is not what is looked at here.
BROKER = {
    "broker.session.timeout.ms": 300_000, "controller.quorum.request.timeout.ms": 300_000,
    "controller.quorum.fetch.timeout.ms": 300_000,
    "log.segment.bytes": 16 << 20, "log.retention.bytes": 64 << 20, "log.retention.check.interval.ms": 10_000,
    "log.cleaner.backoff.ms": 15_000,
}  # fmt: skip
BOUNDS = {"memory_mb": (0.10, 8.0), "files": (0.10, 3.0), "threads": (0.0, 1.0), "disk_mb": (0.15, 1.0)}
"""growth in an hour, of the median or at least so much"""


def disk_bytes(folder: Path) -> int:
    """Of all files below; those that go while they are counted are none."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


class LivePairs:
    """Pairs and states of the changelog inside the TTL and the window, by the newest event time seen."""

    def __init__(self, kafka: KafkaSettings, settings: StoreSettings) -> None:
        self._source = consumer(kafka, f"{kafka.prefix}soak")
        topic = kafka.topic("embeddings")
        self._source.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in range(kafka.partitions)])
        self._settings = settings
        self._held: deque[tuple[int, int]] = deque()
        self.clock_ms = 0
        self.chunks = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-pairs", daemon=True)
        self._thread.start()

    def count(self) -> tuple[int, int]:
        """-> (live for the TTL, live for the window)"""
        with self._lock:
            while self._held and self._held[0][0] + self._settings.window_ms <= self.clock_ms:
                self._held.popleft()
            ttl = sum(n for ts, n in self._held if ts + self._settings.ttl_ms > self.clock_ms)
            return ttl, sum(n for _, n in self._held)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10.0)
        self._source.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for m in self._source.consume(500, 0.2):
                if m.error() is None:
                    chunk = decode_embedding(m.value())
                    with self._lock:
                        self.chunks += 1
                        self.clock_ms = max(self.clock_ms, chunk.ts_ms)
                        self._held.append((chunk.ts_ms, len(chunk.items)))


def sample(roles: Roles, broker: JavaKafka, live: LivePairs, watch: Watch, began: float) -> dict[str, Any]:
    out: dict[str, Any] = {"t_s": round(time.monotonic() - began, 1)}
    for role in ROLES:
        process = psutil.Process(roles.processes[role].pid)
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess), process.oneshot():
            memory = process.memory_info()
            out[role] = {
                # without mapped files: how much of a library is resident is the system's choice
                "memory_mb": round((memory.rss - memory.shared) / (1 << 20), 2),
                "files": process.num_fds(),
                "threads": process.num_threads(),
                "disk_mb": round(disk_bytes(roles.folder / "state" / role) / (1 << 20), 3),
                "cpu_s": round(sum(process.cpu_times()[:2]), 1),
            }
    out["broker_disk_mb"] = round(disk_bytes(broker.data_dir) / (1 << 20), 1)
    out["live_pairs_ttl"], out["live_pairs_window"] = live.count()
    out["event_time_ms"], out["chunks"], out["answers"] = live.clock_ms, live.chunks, watch.count
    return out


def warm_up_s(span_s: float) -> float:
    return max(span_s * WARM_UP, min(WARM_UP_S, span_s * 0.6))


def slope_per_hour(times_s: list[float], values: list[float]) -> float:
    """Theil-Sen."""
    pairs = combinations(zip(times_s, values, strict=True), 2)
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs if x2 > x1]
    return median(slopes) * 3600


def judge(samples: list[dict[str, Any]], restarts: dict[str, float]) -> tuple[list[dict[str, Any]], list[str]]:
    """-> (a line per role and measure, what is not flat). `restarts`: role -> when it began, where not at 0."""
    lines, wrong = [], []
    for role in ROLES:
        began = restarts.get(role, 0.0)
        begin = began + warm_up_s(samples[-1]["t_s"] - began)
        after = [s for s in samples if s["t_s"] >= begin and role in s]
        if len(after) < 3:
            continue
        times = [s["t_s"] for s in after]
        for name, (share, least) in BOUNDS.items():
            values = [float(s[role][name]) for s in after]
            middle, slope = median(values), slope_per_hour(times, values)
            bound = max(share * middle, least)
            flat = slope <= bound
            lines.append(
                {"role": role, "measure": name, "median": round(middle, 2), "lowest": min(values),
                 "highest": max(values), "slope_per_hour": round(slope, 3), "bound_per_hour": round(bound, 2),
                 "from_s": after[0]["t_s"], "flat": flat}
            )  # fmt: skip
            if not flat:
                wrong.append(f"{role} {name}: {slope:+.2f} an hour, the bound is {bound:.2f}")
    return lines, wrong


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    samples = report["samples"]
    minutes = [s["t_s"] / 60 for s in samples]
    titles = {"memory_mb": "memory without mapped files, MiB", "disk_mb": "stores on disk, MiB", "files": "open files",
              "threads": "threads"}  # fmt: skip
    figure, axes = plt.subplots(5, 1, figsize=(8, 10), sharex=True, layout="constrained")
    for axis, (name, title) in zip(axes, titles.items(), strict=False):
        for role in ROLES:
            axis.plot(minutes, [s[role][name] if role in s else None for s in samples], linewidth=1.1, label=role)
        axis.set_title(title, loc="left", fontsize=9)
    axes[4].plot(minutes, [s["live_pairs_window"] for s in samples], linewidth=1.1, label="in the window")
    axes[4].plot(minutes, [s["live_pairs_ttl"] for s in samples], linewidth=1.1, label="in the TTL")
    axes[4].set_title("live pairs in the changelog", loc="left", fontsize=9)
    axes[4].set_xlabel(f"minutes ({SPEED} times as many of event time); grey: warm-up, not judged", fontsize=8)
    for axis in axes:
        axis.axvspan(0, warm_up_s(samples[-1]["t_s"]) / 60, color="0.93", zorder=0)
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, minutes[-1])
        axis.tick_params(labelsize=8)
        axis.grid(color="0.88", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 0.97), ncols=3, frameon=False)
    figure.savefig(path, dpi=90)


def run(folder: Path, minutes: float, rate: float, seed: int, out: Path) -> list[str]:
    """Returns what is wrong."""
    hours = minutes / 60 * SPEED
    start_ms = (int(time.time() * 1000) // 3_600_000) * 3_600_000 - int(hours * 3_600_000)
    users = max(10, round(rate / EVENTS_PER_USER_S))
    log = folder / "log.jsonl"
    write(preset("tiny").with_(users=users, hours=hours, start_ms=start_ms, seed=seed), log)
    events = impressions = 0
    for e in open_log(log):
        events += 1
        impressions += isinstance(e, Impression)
    settings = load(environment={})
    print(f"{events} events of {users} users, {events / minutes / 60:.1f} a second for {minutes:g} minutes", flush=True)
    samples: list[dict[str, Any]] = []
    restarts: dict[str, float] = {}
    wrong: list[str] = []

    def tell(ended: bool) -> list[str]:
        lines, not_flat = judge(samples, restarts)
        span_ms = samples[-1]["event_time_ms"] - start_ms
        report = {
            "minutes": round(samples[-1]["t_s"] / 60, 1), "whole": ended, "speed": SPEED, "users": users,
            "events_per_s": round(events / minutes / 60, 1), "answers": samples[-1]["answers"],
            "chunks": samples[-1]["chunks"], "ttls_passed": round(span_ms / settings.store.ttl_ms, 1),
            "windows_passed": round(span_ms / settings.store.window_ms, 1), "restarts": restarts, "judged": lines,
            "wrong": [*wrong, *not_flat], "samples": samples,
        }  # fmt: skip
        save(report, out)
        return [*wrong, *not_flat]

    with JavaKafka(folder / "kafka", properties={k: str(v) for k, v in BROKER.items()}, tied=True) as broker:
        kafka = KafkaSettings(bootstrap=broker.bootstrap, prefix="soak.")
        admin.create(kafka)
        with Roles(kafka, folder / "roles", settings.model.bundle, SETS) as roles:
            roles.start_all()
            roles.wait_ready()
            live, watch = LivePairs(kafka, settings.store), Watch(kafka)
            feeder = Feeder(log, kafka)
            began = time.monotonic()
            feeder.start(SPEED)
            due = began
            while feeder.going:
                for role, process in list(roles.processes.items()):
                    if (code := process.poll()) is not None:
                        restarts[role] = round(time.monotonic() - began, 1)
                        wrong.append(f"{role} ended with code {code} after {restarts[role]} s")
                        roles.start(role)
                samples.append(sample(roles, broker, live, watch, began))
                if len(samples) % 30 == 0:
                    print(json.dumps(samples[-1]), flush=True)
                    tell(ended=False)
                due += EVERY_S
                time.sleep(max(0.0, due - time.monotonic()))
            if feeder.error is not None:
                wrong.append(f"the replay did not end: {feeder.error}")
            deadline = time.monotonic() + 300
            while watch.count < impressions and time.monotonic() < deadline:
                time.sleep(0.5)
            samples[-1]["answers"] = watch.count
            codes = roles.stop()
            if watch.count != impressions:
                wrong.append(f"{impressions} impressions, {watch.count} answers")
            wrong += [f"{n} ended with code {c}" for n, c in codes.items() if c != 0]
            live.close()
            watch.close()
    return tell(ended=True)


def save(report: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(s) for s in report["samples"])
    head = json.dumps({k: v for k, v in report.items() if k != "samples"}, indent=1)[:-2]
    (out / "soak.json").write_text(f'{head},\n "samples": [\n{lines}\n]}}\n')
    draw(report, out / "soak.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=25.0, help="events a second of wall time, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "soak", help="folder of soak.json and soak.png")
    parser.add_argument("--folder", type=Path, default=None, help="kept after the run; default: a temporary one")
    parser.add_argument("--again", type=Path, help="no run: judge and draw the report in this folder again, into --out")
    a = parser.parse_args()
    if a.again is not None:
        report = json.loads((a.again / "soak.json").read_text())
        report["judged"], not_flat = judge(report["samples"], report["restarts"])
        report["wrong"] = [*(w for w in report["wrong"] if "the bound is" not in w), *not_flat]
        save(report, a.out)
        print("\n".join(report["wrong"]))
        return 1 if report["wrong"] else 0
    folder = a.folder or Path(tempfile.mkdtemp(prefix="solaris-soak-"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wrong = run(folder, a.minutes, a.rate, a.seed, a.out)
    for w in wrong:
        print(f"soak: {w}", file=sys.stderr)
    if a.folder is None and not wrong:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"soak: {'flat' if not wrong else f'{len(wrong)} things are wrong'}; report in {a.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
