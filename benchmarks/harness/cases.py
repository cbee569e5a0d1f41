"""The cases of a run, each on topics of its own. Every ratio compares figures of one run, taken by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.harness import peers
from benchmarks.harness.cluster import BenchError, Role, Topics
from benchmarks.harness.events import LIVE_PER_USER, Workload
from benchmarks.harness.floors import ACCEPTED
from benchmarks.harness.freshness import WARM_UP_S as LOADED_S
from benchmarks.harness.freshness import freshness
from benchmarks.harness.latency import WARM_UP_S, Latency, rank_latency
from benchmarks.harness.run import BATCH_PAIRS, UNCAPPED, US, USERS, Run, rates

LOAD = 0.7
"""of the embedder, while freshness is measured"""
TRIAL_S = 5.0

# -- verifier ------------------------------------------------------------------------------------------------------


def verifier(run: Run) -> None:
    topics, records = run.topics("verifier"), run.candidates
    ratios, floors = [], []
    for guarantee in ("exactly_once", "at_least_once"):
        with run.role("verifier", topics, [f"loop.guarantee={guarantee}", *UNCAPPED], name=guarantee) as role:
            role.wait_ready()
            # Once unmeasured: the first case of a run meets a broker that still compiles itself, on these cores.
            role.drain_records(lambda: topics.send("candidates", records), len(records))
            samples = []
            for _ in range(run.repeats):
                s = role.drain_records(lambda: topics.send("candidates", records), len(records))
                samples.append(s)
                if guarantee == "exactly_once":
                    floors.append(run.floors.verifier(records) * US)
                    ratios.append(s.cpu_s / len(records) * US / floors[-1])
        rates(run, f"verifier.{guarantee}", samples, len(records), "event")
    run.figures.add("verifier.floor.cpu_us", floors, "us/event")
    run.figures.add("verifier.cpu_over_floor", ratios)


# -- embedder ------------------------------------------------------------------------------------------------------


def embedder(run: Run) -> None:
    topics = run.topics("embedder", partitions=1)
    n = 120 if run.quick else 400
    records = run.workload.requests(n * run.repeats + 50, ACCEPTED, 500)
    shares, walls, samples, bare = [], [], [], []
    with run.role("embedder", topics, [f"embedder.batch_pairs={BATCH_PAIRS}"], size="heavy") as role:
        role.wait_ready()
        both = _lanes(role, 50)
        role.drain(lambda: topics.send("precompute", records[:50]), both)
        for k in range(run.repeats):
            part = records[50 + k * n : 50 + (k + 1) * n]
            before = run.heavy.session(part, BATCH_PAIRS)
            least_s = 0.95 * before[1] * n * ACCEPTED  # it cannot be done sooner than the model alone
            s = role.drain(lambda part=part: topics.send("precompute", part), _lanes(role, n), least_s)  # type: ignore[misc]
            after = run.heavy.session(part, BATCH_PAIRS)
            cpu, wall = (statistics.mean(x) for x in zip(before, after, strict=True))
            samples.append(s)
            bare.append(cpu * US)
            shares.append(cpu * n * ACCEPTED / s.cpu_s)
            walls.append(wall * n * ACCEPTED / s.wall_s)
    pairs = n * ACCEPTED
    run.figures.add("embedder.cpu_us", [s.cpu_s / pairs * US for s in samples], "us/pair")
    run.figures.add("embedder.session_cpu_us", bare, "us/pair")
    run.figures.add("embedder.pairs_per_s", [pairs / s.wall_s for s in samples], "pairs/s wall")
    run.figures.add("embedder.share_of_model", shares, note="by CPU time, both lanes of the process counted")
    run.figures.add("embedder.share_of_model_wall", walls)
    run.embedder_events_per_s = run.figures["embedder.pairs_per_s"] / ACCEPTED


def _lanes(role: Role, n: int) -> Callable[[], bool]:
    lanes = ("embedder_", "embedder_state_")
    want = {p: role.records(p) + n for p in lanes}

    def done() -> bool:
        counters = role.status().get("counters", {})
        return all(counters.get(f"{p}loop_records", 0) >= w for p, w in want.items())

    return done


# -- ranker --------------------------------------------------------------------------------------------------------


def ranker(run: Run) -> None:
    topics, records = run.topics("ranker"), run.drained
    run.warm(topics)
    ratios, floors = [], []
    for guarantee in ("exactly_once", "at_least_once"):
        with run.role("ranker", topics, [f"loop.guarantee={guarantee}"], name=guarantee) as role:
            role.wait_ready()
            role.drain_records(lambda: topics.send("impressions", records[:500]), 500)
            samples = []
            for _ in range(run.repeats):
                s = role.drain_records(lambda: topics.send("impressions", records), len(records))
                samples.append(s)
                if guarantee == "exactly_once":
                    floors.append(run.floors.ranker(records) * US)
                    ratios.append(s.cpu_s / len(records) * US / floors[-1])
            rates(run, f"ranker.{guarantee}", samples, len(records), "impression")
            most = _most(run, topics, run.figures[f"ranker.{guarantee}.per_s"] / 2)
            run.figures.add(f"latency_ms.{guarantee}.most_per_s", most, "impressions/s", "kept up, one by one")
            _latency(run, f"latency_ms.{guarantee}", _sustained(run, topics, most / 2))
    run.figures.add("ranker.floor.cpu_us", floors, "us/impression")
    run.figures.add("ranker.cpu_over_floor", ratios)
    per_cpu = [US / v for v in run.figures.by_key["ranker.exactly_once.cpu_us"].values]
    run.figures.add("ranker.impressions_per_cpu_s", per_cpu, "impressions/CPU s")


def _most(run: Run, topics: Topics, rate: float) -> float:
    """The highest rate, to a fifth, at which no queue grows: each impression sent and answered by itself, client,
    broker and reader on the same cores. From `rate` upwards, or downwards where that is too much."""
    seconds = 2.0 if run.quick else 4.0
    limit = len(run.impressions) / (seconds + WARM_UP_S) * 0.99
    kept_up, step = 0.0, 1.2
    for _ in range(8):
        rate = min(rate, limit)
        try:
            fits = not rank_latency(topics.kafka, run.impressions, rate, seconds).growing
        except BenchError:
            fits = False
        run.say(f"  {rate:,.0f} impressions/s: {'kept up' if fits else 'a queue grows'}")
        if fits:
            kept_up = rate
        if (fits and (step < 1 or rate == limit)) or (not fits and kept_up):
            break
        if not fits:
            step = 1 / 1.2
            time.sleep(2.0)
        rate *= step
    return kept_up or rate


def _sustained(run: Run, topics: Topics, rate: float) -> list[Latency]:
    """Three stretches at `rate`, after one that is not counted: the broker's JVM compiles what a load of this kind
    needs. At half of the rate and so on, where clients and broker on the same cores leave too little for that: until
    no queue grows."""
    seconds = 3.0 if run.quick else 8.0
    halvings = 0
    while True:
        last = halvings == 2
        try:
            found = [rank_latency(topics.kafka, run.impressions, rate, seconds) for _ in range(4)][1:]
            if last or sum(f.growing for f in found) < 2:
                return found
            why = f"a queue grows at {rate:g}/s (medians {', '.join(f'{f.p50_ms:g}' for f in found)} ms)"
        except BenchError as e:
            if last:
                raise
            why = str(e)
        run.say(f"  {why}; half of that is tried")
        rate /= 2
        halvings += 1
        time.sleep(2.0)


def _latency(run: Run, key: str, found: Sequence[Latency]) -> None:
    note = f"{sum(f.events for f in found)} events at {found[0].rate_per_s:g}/s"
    run.figures.add(f"{key}.rate_per_s", found[0].rate_per_s, "events/s")
    run.figures.add(f"{key}.p50", [f.p50_ms for f in found], "ms", note)
    run.figures.add(f"{key}.p99", [f.p99_ms for f in found], "ms", note)


def fresh(run: Run) -> None:
    if not run.embedder_events_per_s:
        raise BenchError("freshness is measured at a share of the embedder's load: run the case embedder before")
    topics = run.topics("fresh")
    rate = LOAD * run.embedder_events_per_s
    seconds = 8.0 if run.quick else 30.0
    with (
        run.role("verifier", topics, UNCAPPED, size="heavy") as v,
        run.role("embedder", topics, size="heavy") as e,
        run.role("ranker", topics, ["ranker.explain=true"], size="heavy") as r,
    ):
        for role in (v, e, r):
            role.wait_ready()
        # Its core is slower while the other roles work beside it: what 70 % is, is seen only then.
        before = e.cpu_s()
        freshness(topics.kafka, run.workload, rate, TRIAL_S)
        rate *= min(1.0, LOAD * (TRIAL_S + LOADED_S) / (e.cpu_s() - before))
        time.sleep(3.0)
        before = e.cpu_s()
        found = freshness(topics.kafka, run.workload, rate, seconds)
        load = (e.cpu_s() - before) / (seconds + LOADED_S)
        run.figures.add("freshness_ms.embedder_cpu", load, "cores", f"at {rate:.0f} events/s")
        _latency(run, "freshness_ms.state", [found["state"]])
        _latency(run, "freshness_ms.pairs", [found["pair"]])
        burst = max(20, int(2 * run.embedder_events_per_s))
        found = freshness(topics.kafka, run.workload, rate, seconds, burst)
        _latency(run, "freshness_ms.state_in_burst", [found["state"]])


def growth(run: Run) -> None:
    """CPU per impression: from 1e5 to 1e7 live pairs (1e6 in a quick run), and from 1 to 8 partitions in a process."""
    small = _ranked_at(run, "grow-1e5", USERS, 1)
    many = _ranked_at(run, "grow-8", USERS, 8)
    run.figures.add("growth.partitions", many / small, note="8 partitions over 1, 1e5 pairs")
    _start_empty(run)
    exponent = 6 if run.quick else 7
    if not run.quick:
        _ranked_at(run, "grow-1e6", 10**6 // LIVE_PER_USER, 1)
    large = _ranked_at(run, f"grow-1e{exponent}", 10**exponent // LIVE_PER_USER, 1)
    run.figures.add("growth.pairs", large / small, note=f"1e{exponent} live pairs over 1e5")


def _start_empty(run: Run) -> None:
    took = []
    for k in range(2 if run.quick else 3):
        topics = run.topics(f"empty{k}", partitions=1, catalogue=False)
        with run.role("ranker", topics) as role:
            took.append(role.wait_ready())
    run.figures.add("start.ranker_empty_s", took, "s")


def _ranked_at(run: Run, prefix: str, users: int, partitions: int) -> float:
    topics = run.topics(prefix, partitions)
    run.warm(topics, users)
    records = Workload(5, run.workload.now_ms).impressions(len(run.drained), users)
    # Ready is said when all is restored, however long that takes.
    with run.role("ranker", topics, ["ranker.restore_deadline_s=0"]) as role:
        role.wait_for("its health page", lambda: bool(role.status()), every_s=0.02)
        up = time.monotonic()
        role.wait_ready()
        if users == 10**6 // LIVE_PER_USER:
            note = "health page up -> ready: joining the group, 20,000 items and 1M pairs"
            run.figures.add("start.restore_1m_pairs_s", time.monotonic() - up, "s", note)
            run.figures.add("start.restore_1m_pairs_cpu_s", role.cpu_s(), "CPU s", "since the process began")
        role.drain_records(lambda: topics.send("impressions", records[:500]), 500)
        samples = [
            role.drain_records(lambda: topics.send("impressions", records), len(records)) for _ in range(run.repeats)
        ]
    run.figures.add(f"growth.{prefix}_cpu_us", [s.cpu_s / len(records) * US for s in samples], "us/impression")
    return run.figures[f"growth.{prefix}_cpu_us"]


CASES: dict[str, Callable[[Run], None]] = {
    "verifier": verifier,
    "faust": peers.faust,
    "quix": peers.quix,
    "embedder": embedder,
    "ranker": ranker,
    "kstreams": peers.kstreams,
    "quix_ranker": peers.quix_ranker,
    "fresh": fresh,
    "growth": growth,
}
QUICK = tuple(c for c in CASES if c not in ("quix", "kstreams", "quix_ranker"))
