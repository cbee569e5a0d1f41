"""The figures that are served, from blocks and processes. Pure; the names are those of a demo's `report.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streams.monitor.blocks import BLOCK_MS, Blocks, Compared, Labelled, upper_ms
from streams.monitor.processes import STALE_MS, Processes

SOURCES = ("direct", "topic", "state", "aggregate", "similar", "none")


@dataclass(slots=True)
class View:
    """Everything that is known, and how it is shown."""

    blocks: Blocks
    processes: Processes
    share: float
    lag: Mapping[str, int] = field(default_factory=dict)
    """role -> records it has not committed yet"""
    ready: bool = False
    """tables recovered"""

    @property
    def keep_ms(self) -> int:
        return self.processes.keep_ms

    def figures(self, span_ms: int, now_ms: int) -> dict[str, Any]:
        """The last `span_ms`, up to and including the window that is still open."""
        from_ms, to_ms = _start(now_ms - span_ms), now_ms + BLOCK_MS
        b = self.blocks.total(from_ms, to_ms)
        known = Labelled()
        for labelled in b.labelled.values():
            known.add(labelled)
        ages: Counter[int] = Counter()
        for histogram in b.ages.values():
            ages.update(histogram)
        return {
            "now_ms": now_ms,
            "span_ms": span_ms,
            "sample_share": self.share,
            "sampled": {name: b.counts[name] for name in COUNTS},
            "coverage": {s: _ratio(b.sources[s], b.counts["ads"]) for s in SOURCES},
            "age_ms": {**percentiles(ages), "by_source": {s: percentiles(h) for s, h in sorted(b.ages.items())}},
            "rank_latency_ms": percentiles(b.latency),
            "calibration": {
                **_calibration(known),
                "by_source": {s: _calibration(x) for s, x in sorted(b.labelled.items())},
            },
            "log_loss": {"solaris": _ratio(known.loss, known.ads), "against_vm": _against_vm(b.compared)},
            **self._work(from_ms, to_ms),
        }

    def series(self, span_ms: int, now_ms: int, points: int = 60) -> list[dict[str, Any]]:
        """The span in `points` steps of whole windows, oldest first, for charts."""
        step = max(BLOCK_MS, span_ms // points // BLOCK_MS * BLOCK_MS)
        out = []
        for at in range(_start(now_ms - span_ms), now_ms + 1, step):
            b = self.blocks.total(at, at + step)
            known = Labelled()
            for labelled in b.labelled.values():
                known.add(labelled)
            out.append(
                {
                    "ts": at,
                    "impressions": b.counts["impressions"],
                    "coverage": {s: _ratio(b.sources[s], b.counts["ads"]) for s in SOURCES},
                    "log_loss": _ratio(known.loss, known.ads),
                    "calibration": _ratio(known.pctr, known.clicks),
                }
            )
        return out

    def roles(self, now_ms: int) -> list[dict[str, Any]]:
        """Every process heard of in the time that is kept. `gone`: not heard of for `STALE_MS`; `ended`: as it should,
        since it was told to stop, or its successor, of the same role and instance, has been heard of since."""
        latest = self.processes.latest()
        newest = {(s.role, s.instance): s.pid for s in sorted(latest, key=lambda s: s.ts)}
        return [
            {
                "role": s.role, "instance": s.instance, "pid": s.pid, "started_ms": s.started_ms,
                "live": s.live, "ready": s.ready, "gone": now_ms - s.ts > STALE_MS,
                "ended": now_ms - s.ts > STALE_MS and (s.stopping or newest[s.role, s.instance] != s.pid),
                "heard_ms_ago": max(0, now_ms - s.ts), "device": s.device,
                "vm": s.vm, "fm": s.fm, "partitions": s.partitions, "counters": s.counters,
            }
            for s in latest
        ]  # fmt: skip

    def _work(self, from_ms: int, to_ms: int) -> dict[str, Any]:
        """From the counters of the roles: not sampled."""
        verifier = self.processes.done("verifier", from_ms, to_ms)
        embedder = self.processes.done("embedder", from_ms, to_ms)
        ranker = self.processes.done("ranker", from_ms, to_ms)
        seen, accepted = verifier["pairs_seen"], verifier["pairs_accepted"]
        embedded, fresh = embedder["embedder_pairs_embedded"], embedder["embedder_pairs_saved"]
        refused = {k.removeprefix("refused_"): n for k, n in sorted(verifier.items()) if k.startswith("refused_")}
        return {
            "pairs": {"seen": seen, "accepted": accepted, "embedded": embedded, "saved": fresh},
            "verifier": {"acceptance": _ratio(accepted, seen), "refused": refused},
            "fm_calls_saved": {
                "by_verifier": seen - accepted,
                "by_freshness": fresh,
                "share_of_seen": _ratio(seen - accepted + fresh, seen),
            },
            "hits_per_fm_call": _ratio(ranker["source_direct"], embedded),
            "ranked": {"impressions": ranker["impressions"], "ads": ranker["ads"]},
            "lag": dict(self.lag),
        }


COUNTS = (
    "impressions", "ads", "restoring", "joined", "duplicates", "feedback", "feedback_repeated", "feedback_unmatched",
    "undecodable",
)  # fmt: skip


def percentiles(histogram: Mapping[int, int]) -> dict[str, float | None]:
    """p50, p90 and p99 in ms as the upper bound of their bucket: at most 9 % above the true value."""
    total = sum(histogram.values())
    out: dict[str, float | None] = {"p50": None, "p90": None, "p99": None}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        reached = 0
        for index in sorted(histogram):
            reached += histogram[index]
            if reached >= share * total:
                out[name] = round(upper_ms(index), 1)
                break
    return out


def _calibration(x: Labelled) -> dict[str, float | int | None]:
    """`ratio`: predicted over observed clicks; 1 is calibrated, above it promises too much."""
    return {
        "ads": x.ads,
        "clicks": x.clicks,
        "mean_pctr": _ratio(x.pctr, x.ads),
        "ctr": _ratio(x.clicks, x.ads),
        "ratio": _ratio(x.pctr, x.clicks),
        "log_loss": _ratio(x.loss, x.ads),
    }


def _against_vm(x: Compared) -> dict[str, float | int | None]:
    """On the ads whose message had the VM's own scores; `gain` is the share of the VM's loss that is saved."""
    return {
        "ads": x.ads,
        "solaris": _ratio(x.loss, x.ads),
        "vm": _ratio(x.vm_loss, x.ads),
        "gain": None if not x.vm_loss else 1.0 - x.loss / x.vm_loss,
    }


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _start(ts_ms: int) -> int:
    return ts_ms - ts_ms % BLOCK_MS
