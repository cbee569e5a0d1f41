"""What a large service would need, from measured figures; and the queues behind it, by simulation.

    python benchmarks/scale_sim.py [--bench reports/bench.json] [--page docs/scale.md]

Prints the tables of docs/scale.md, or writes them into the page. Without `--bench` the figures of `Measured` below are
used. Times are seconds, rates per second of wall time at the daily mean unless "peak" is said.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one run of benchmarks/bench.py on two cores that broker and load shared: upper bounds of the CPU needed."""

    verifier_us: float = 177.0
    """per event of 100 candidates"""
    ranker_us: float = 138.0
    """per impression of 50 ads"""
    embedder_host_us: float = 33.0
    """per pair, beside the FM itself"""
    at: str = "2026-11-30"
    """when it was run"""
    candidates: int = 100
    ads: int = 50
    pair_bytes: int = 46
    """item hash, topic, 17 float16"""
    state_bytes: int = 1_150
    """one state chunk: 512 + 16 float16, header, id"""
    gpu_flops: float = 4e14
    """assumed, not measured: 40 % of a card of 1,000 TFLOP/s in bf16"""


@dataclass(frozen=True, slots=True)
class Service:
    users: float = 1e9
    requests_per_day: float = 1e10
    candidates: int = 500
    accepted: int = 50
    """pairs a request that the verifier lets through and that are not fresh"""
    peak: float = 2.0
    """busiest hour over the mean"""
    ttl_s: float = 6 * 3600.0
    window_s: float = 24 * 3600.0
    direct_share: float = 0.5
    """of ranked pairs"""
    utilisation: float = 0.6
    fm_flops: float = 20e6
    core_hour: float = 0.04
    gpu_hour: float = 2.5
    """prices are assumptions; put in your own"""

    @property
    def per_s(self) -> float:
        return self.requests_per_day / DAY_S


def plan(s: Service, m: Measured) -> dict[str, float]:
    """Cores, cards, bytes. Work per event is taken as proportional to its pairs, which overstates it a little."""
    rate = s.per_s
    pairs = rate * s.accepted
    verifier = rate * m.verifier_us * 1e-6 * s.candidates / m.candidates
    ranker = rate * m.ranker_us * 1e-6 * s.candidates / m.ads
    host = pairs * m.embedder_host_us * 1e-6
    gpus = pairs * s.fm_flops / m.gpu_flops
    grown = s.peak / s.utilisation
    cores = (verifier + ranker + host) * grown
    covered = rate * s.candidates * s.direct_share * 3600
    live = pairs * s.window_s
    state = live * m.pair_bytes + rate * s.window_s * m.state_bytes
    partitions = float(np.ceil(max(ranker * grown, state / 8e9)))
    return {
        "requests_per_s": rate,
        "pairs_ranked_per_s": rate * s.candidates,
        "pairs_embedded_per_s": pairs,
        "verifier_cores": verifier * grown,
        "ranker_cores": ranker * grown,
        "embedder_cores": host * grown,
        "gpus": gpus * grown,
        "partitions": partitions,
        "partitions_a_verifier_core": partitions / (verifier * grown),
        "partitions_a_ranker_core": partitions / (ranker * grown),
        "state_tb": state / 1e12,
        "candidates_gb_s": rate * s.candidates * 8 / 1e9,
        "precompute_gb_s": rate * (s.accepted * 36 + 700) / 1e9,
        "embeddings_gb_s": (pairs * m.pair_bytes + rate * m.state_bytes) / 1e9,
        "impressions_gb_s": rate * s.candidates * 20 / 1e9,
        "ranked_ads_gb_s": rate * s.candidates * 50 / 1e9,
        "cost_per_million_covered_pairs": (cores * s.core_hour + gpus * grown * s.gpu_hour) / covered * 1e6,
    }


@dataclass(frozen=True, slots=True)
class Queue:
    """A server of batches: takes what waits, up to `batch_max`, when it is free and either the batch is full or its
    oldest has waited `linger_s`; serves it in `fixed_s + n * each_s`."""

    fixed_s: float
    each_s: float
    batch_max: int
    linger_s: float = 0.0

    @property
    def capacity(self) -> float:
        """Events a second when every batch is full."""
        return self.batch_max / (self.fixed_s + self.batch_max * self.each_s)


def simulate(
    queue: Queue, rate: float, events: int, seed: int = 0, pause_at: float = -1, pause_s: float = 0
) -> np.ndarray:
    """Sojourn times [events] of Poisson arrivals in order. At `pause_at` the server stops for `pause_s`: a restart, or
    a rebalance."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, events))
    out = np.empty(events)
    free, first = 0.0, 0
    paused = pause_s <= 0
    while first < events:
        full = first + queue.batch_max - 1
        ready = arrivals[first] + queue.linger_s
        if full < events:
            ready = min(ready, arrivals[full])
        start = max(free, ready, arrivals[first])
        if not paused and start >= pause_at:
            free, paused = start + pause_s, True
            continue
        last = min(int(np.searchsorted(arrivals, start, side="right")), first + queue.batch_max)
        free = start + queue.fixed_s + (last - first) * queue.each_s
        out[first:last] = free - arrivals[first:last]
        first = last
    return out


def simulate_pool(queue: Queue, servers: int, skew: float, rate: float, events: int, seed: int = 0) -> np.ndarray:
    """Partitions spread over `servers`, one queue each, whose shares of the traffic follow rank ** -skew: what a hot
    partition does. Sojourn times of all."""
    share = np.arange(1, servers + 1) ** -skew
    share = share / share.sum()
    parts = [simulate(queue, rate * p, max(1, int(events * p)), seed + k) for k, p in enumerate(share)]
    return np.concatenate(parts)


def measured(path: Path) -> Measured:
    found = json.loads(path.read_text())
    m = Measured()
    v = found.get("verifier", {}).get("exactly_once", {}).get("cpu_us", m.verifier_us)
    r = found.get("ranker", {}).get("exactly_once", {}).get("cpu_us", m.ranker_us)
    e = found.get("embedder", {})
    host = max(1.0, e["cpu_us"] - e["session_cpu_us"]) if "cpu_us" in e else m.embedder_host_us
    at = found.get("machine", {}).get("at") or time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
    return replace(m, verifier_us=v, ranker_us=r, embedder_host_us=host, at=at)


def inputs(m: Measured) -> str:
    return (
        f"Run of {m.at}: verifier {m.verifier_us:.0f} us of CPU an event of {m.candidates} candidates, ranker "
        f"{m.ranker_us:.0f} us an impression of {m.ads} ads,\n"
        f"embedder {m.embedder_host_us:.0f} us a pair beside its model; {m.pair_bytes} bytes a pair, "
        f"{m.state_bytes:,} a state."
    )


def tables(m: Measured) -> tuple[str, str]:
    """What it takes; and the queues."""
    small, large = Service(), Service(fm_flops=500e6)
    a, b = plan(small, m), plan(large, m)
    lines = ["| | FM of 20 MFLOP a pair | FM of 500 MFLOP |", "|---|---|---|"]
    lines += [f"| {key.replace('_', ' ')} | {_text(a[key])} | {_text(b[key])} |" for key in a]
    needs = "\n".join(lines)
    ranker = Queue(fixed_s=0.006, each_s=m.ranker_us * 1e-6 * 10, batch_max=500)
    gpu = Queue(fixed_s=0.003, each_s=50 * 20e6 / m.gpu_flops, batch_max=320, linger_s=0.02)
    lines = ["| queue | load | p50 ms | p99 ms |", "|---|---|---|---|"]
    queues = {"ranker, 500 ads, a transaction of 6 ms a batch": ranker, "embedder, GPU, requests of 50 pairs": gpu}
    for name, queue in queues.items():
        for load in (0.3, 0.5, 0.7, 0.9):
            times = simulate(queue, load * queue.capacity, 40_000) * 1000
            p50, p99 = np.percentile(times, [50, 99])
            lines.append(f"| {name} | {load:.0%} | {p50:.1f} | {p99:.1f} |")
    times = simulate(ranker, 0.6 * ranker.capacity, 40_000, pause_at=20.0, pause_s=5.0) * 1000
    lines.append(f"| ranker at 60 %, stopped for 5 s | | {np.median(times):.1f} | {np.percentile(times, 99):.0f} |")
    for skew in (0.0, 0.1, 0.2):
        times = simulate_pool(ranker, 16, skew, 0.6 * 16 * ranker.capacity, 60_000) * 1000
        p50, p99 = np.percentile(times, [50, 99])
        lines.append(f"| 16 rankers at 60 %, traffic by rank^-{skew:g} | | {p50:.1f} | {p99:.1f} |")
    return needs, "\n".join(lines)


def fill(page: str, parts: Mapping[str, str]) -> str:
    """The page with each part between its marks, `<!-- NAME: written by ... -->` and `<!-- end of NAME -->`."""
    for name, text in parts.items():
        pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        page, n = pattern.subn(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)  # type: ignore[misc]
        if n != 1:
            raise SystemExit(f"the page has the marks of {name!r} {n} times, not once")
    return page


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", type=Path, help="figures of a run, in place of those in this file")
    parser.add_argument("--page", type=Path, help="write the tables into this page instead of printing them")
    given = parser.parse_args()
    m = measured(given.bench) if given.bench else Measured()
    needs, queues = tables(m)
    if given.page:
        parts = {"inputs": inputs(m), "needs": needs, "queues": queues}
        given.page.write_text(fill(given.page.read_text(encoding="utf-8"), parts), encoding="utf-8")
    else:
        print(inputs(m), needs, queues, sep="\n\n")


if __name__ == "__main__":
    main()
