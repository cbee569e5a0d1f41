"""Freshness: user event produced -> its state rankable; candidate produced -> its embedding rankable.

All three roles run; candidates events arrive at a steady rate that keeps the embedder at a chosen load. Some of them
are *probed*: impressions of the same user and `ADS` of the candidates (half of which the verifier passes on) follow
every `EVERY_S` or fifth of the time passed, whichever is longer (probing must not become the load it measures), and
the first answer with a state (or a direct embedding) of that very event ends the probe. Its figure
is the time of ranking (the ranker's clock) less the time the event was due, so it is an upper bound, off by at most
that time; a probe that is given up counts as `GIVE_UP_S`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.harness.bundle import HISTORY
from benchmarks.harness.cluster import BenchError
from benchmarks.harness.events import CANDIDATES, CATALOGUE, Workload
from benchmarks.harness.latency import Latency, client, tail_reader
from topics.events import decode_ranked_ads
from topics.kafka import KafkaSettings

EVERY_S = 0.02
SHARE = 0.2
ADS = 20
GIVE_UP_S = 10.0
PROBES_PER_S = 2.5
WARM_UP_S = 3.0


@dataclass(slots=True)
class _Probe:
    user: str
    ts: int
    due: float
    items: list[str]
    history: list[str]
    next_at: float
    state_ms: float | None = None
    pair_ms: float | None = None

    @property
    def done(self) -> bool:
        return self.state_ms is not None and self.pair_ms is not None


def freshness(
    kafka: KafkaSettings, workload: Workload, events_per_s: float, seconds: float, burst_events: int = 0
) -> dict[str, Latency]:
    """`burst_events` extra events come at once in the middle. Ranker runs with `ranker.explain`."""
    made = client(kafka.bootstrap)
    reader = tail_reader(kafka, "ranked-ads")
    reader.poll(1.0)
    candidates, impressions = kafka.topic("candidates"), kafka.topic("impressions")
    open_probes: dict[str, _Probe] = {}
    ended: list[_Probe] = []
    begin = time.time() + 0.1
    end = begin + WARM_UP_S + seconds
    k = probe_no = 0
    next_probe = begin + WARM_UP_S
    burst_at = begin + WARM_UP_S + seconds / 2 if burst_events else end + 1
    while True:
        now = time.time()
        if now > end and (not open_probes or now > end + GIVE_UP_S):
            break
        while now >= begin + k / events_per_s and now <= end:
            due = begin + k / events_per_s
            measured = due >= next_probe
            user = f"p{probe_no}" if measured else f"u{k % 3000}"
            items, history = _lists(workload)
            ts = int(due * 1000)
            made.produce(candidates, _candidates(f"f{k}", user, ts, items, history), user.encode())
            if measured:
                probe = _Probe(user, ts, due, items[:ADS], history, due + EVERY_S)
                open_probes[user] = probe
                probe_no += 1
                next_probe += 1 / PROBES_PER_S
            k += 1
        if now >= burst_at:
            burst_at = end + 1
            for b in range(burst_events):
                items, history = _lists(workload)
                made.produce(
                    candidates, _candidates(f"b{b}", f"b{b}", int(now * 1000), items, history), f"b{b}".encode()
                )
        for probe in open_probes.values():
            if now >= probe.next_at:
                probe.next_at = max(probe.next_at + max(EVERY_S, SHARE * (now - probe.due)), now)
                value = _impression(probe, max(probe.ts, int(now * 1000)))
                made.produce(impressions, value, probe.user.encode())
        made.poll(0)
        first = reader.poll(0.004)
        for m in [first, *reader.consume(200, 0)] if first is not None else []:
            if m.error() is None:
                _take(m.value(), open_probes)
        for user in [u for u, p in open_probes.items() if p.done or now > p.due + GIVE_UP_S]:
            ended.append(open_probes.pop(user))
    made.flush(10)
    reader.close()
    rate = events_per_s
    out = {}
    for name in ("state", "pair"):
        values = [getattr(p, f"{name}_ms") for p in ended]
        if not values:
            raise BenchError(f"no probes at {events_per_s:g} events a second in {seconds:g} s")
        out[name] = Latency.of([GIVE_UP_S * 1000 if v is None else v for v in values], rate)
    return out


def _lists(workload: Workload) -> tuple[list[str], list[str]]:
    ids = workload.item_ids
    items = workload.rng.choice(CATALOGUE, CANDIDATES, replace=False).tolist()
    past = workload.rng.integers(0, CATALOGUE, HISTORY).tolist()
    return [ids[i] for i in items], [ids[i] for i in past]


def _features(ts: int, history: Sequence[str]) -> dict[str, object]:
    times = [ts - (HISTORY - j) * 60_000 for j in range(HISTORY)]
    return {"hour": 1, "age": 3.5, "visits": 2, "depth": 0.5, "history": list(history), "history_ts": times}


def _candidates(name: str, user: str, ts: int, items: list[str], history: list[str]) -> bytes:
    return msgspec.json.encode(
        {"type": "candidates", "id": name, "user": user, "ts": ts, "items": items, "features": _features(ts, history)}
    )


def _impression(probe: _Probe, ts: int) -> bytes:
    return msgspec.json.encode(
        {
            "type": "impression", "id": f"{probe.user}-{ts}", "user": probe.user, "ts": ts,
            "ads": probe.items, "features": _features(ts, probe.history),
        }
    )  # fmt: skip


def _take(value: bytes, probes: dict[str, _Probe]) -> None:
    answer = decode_ranked_ads(value)
    probe = probes.get(answer.user)
    if probe is None or answer.slots is None:
        return
    taken_ms = answer.ranked_ms - 1000 * probe.due
    if probe.state_ms is None and _of(answer.slots["state"], answer.ts, probe.ts):
        probe.state_ms = taken_ms
    if probe.pair_ms is None and _of(answer.slots["direct"], answer.ts, probe.ts):
        probe.pair_ms = taken_ms


def _of(ages: Sequence[int | None], now: int, ts: int) -> bool:
    """Whether any ad has data of event time `ts`."""
    return any(age is not None and now - age == ts for age in ages)
