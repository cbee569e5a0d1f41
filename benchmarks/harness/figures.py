"""What a run found: figures with their spread, targets and units; as JSON, as a table, as the page of the docs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """`at_most` or `at_least` what figure."""

    value: float
    at_most: bool = True

    def met(self, figure: float) -> bool:
        return figure <= self.value if self.at_most else figure >= self.value

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.value:,g}"


AT_MOST, AT_LEAST = Target, lambda value: Target(value, at_most=False)

TARGETS: dict[str, Target] = {
    "verifier.cpu_over_floor": AT_MOST(2.0),
    "verifier.faust_over_ours": AT_LEAST(20.0),
    "verifier.quix_over_ours": AT_LEAST(3.0),
    "embedder.share_of_model": AT_LEAST(0.92),
    "ranker.impressions_per_cpu_s": AT_LEAST(8000),
    "ranker.cpu_over_floor": AT_MOST(2.5),
    "ranker.kstreams_over_ours": AT_LEAST(1.0),
    "ranker.quix_over_ours": AT_LEAST(4.0),
    "latency_ms.exactly_once.p50": AT_MOST(15),
    "latency_ms.exactly_once.p99": AT_MOST(50),
    "latency_ms.at_least_once.p99": AT_MOST(15),
    "freshness_ms.state.p50": AT_MOST(100),
    "freshness_ms.state.p99": AT_MOST(500),
    "freshness_ms.state_in_burst.p50": AT_MOST(100),
    "freshness_ms.state_in_burst.p99": AT_MOST(500),
    "freshness_ms.pairs.p99": AT_MOST(1000),
    "growth.pairs": AT_MOST(1.3),
    "growth.partitions": AT_MOST(1.3),
    "start.ranker_empty_s": AT_MOST(2.0),
    "start.restore_1m_pairs_s": AT_MOST(3.0),
}


@dataclass(slots=True)
class Figure:
    values: list[float]
    unit: str
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.values), max(self.values)


@dataclass(slots=True)
class Figures:
    by_key: dict[str, Figure] = field(default_factory=dict)

    def add(self, key: str, values: float | Sequence[float], unit: str = "", note: str = "") -> None:
        many = [float(values)] if isinstance(values, int | float) else [float(v) for v in values]
        self.by_key[key] = Figure(many, unit, note)

    def __getitem__(self, key: str) -> float:
        return self.by_key[key].median

    def nested(self) -> dict[str, Any]:
        """Medians under their dotted keys; `detail` has every repeat, unit, target."""
        out: dict[str, Any] = {}
        for key, f in self.by_key.items():
            at = out
            *path, last = key.split(".")
            for part in path:
                at = at.setdefault(part, {})
            at[last] = _rounded(f.median)
        detail = {}
        for key, f in self.by_key.items():
            target = TARGETS.get(key)
            detail[key] = {
                "median": f.median, "values": f.values, "unit": f.unit, "note": f.note,
                "target": None if target is None else str(target),
                "met": None if target is None else target.met(f.median),
            }  # fmt: skip
        return {**out, "detail": detail}

    @classmethod
    def of_detail(cls, detail: dict[str, Any]) -> Figures:
        """From `nested()["detail"]`."""
        return cls({key: Figure(d["values"], d["unit"], d["note"]) for key, d in detail.items()})

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """(key, median with unit, spread, target, verdict)."""
        out = []
        for key, f in self.by_key.items():
            target = TARGETS.get(key)
            low, high = f.spread
            spread = f"{_text(low)} .. {_text(high)}" if len(f.values) > 1 else ""
            verdict = "" if target is None else ("met" if target.met(f.median) else "MISSED")
            out.append((key, f"{_text(f.median)} {f.unit}".strip(), spread, str(target or ""), verdict))
        return out

    def missed(self) -> list[str]:
        return [key for key, f in self.by_key.items() if key in TARGETS and not TARGETS[key].met(f.median)]

    def absent(self) -> list[str]:
        return [key for key in TARGETS if key not in self.by_key]


def table(figures: Figures) -> str:
    rows = [("figure", "median", "spread", "target", ""), *figures.rows()]
    widths = [max(len(r[k]) for r in rows) for k in range(5)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)


def _rounded(value: float) -> float:
    return round(value, 1) if abs(value) >= 1000 else float(f"{value:.4g}")


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
