"""Small figures that reports share: quantiles, histograms, shares, coverage over time. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from models.api import SOURCES

BINS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000)
_S, _MIN, _H = 1_000, 60_000, 3_600_000
AGE_BINS_MS = (
    _S, 10 * _S, _MIN, 5 * _MIN, 15 * _MIN, 30 * _MIN, _H, 2 * _H, 4 * _H, 6 * _H, 12 * _H, 24 * _H,
)  # fmt: skip


def ratio(a: float, b: float) -> float | None:
    """a / b, None where b is 0."""
    return round(a / b, 5) if b else None


def quantiles(values: Sequence[float] | npt.NDArray[np.generic]) -> dict[str, float | None]:
    """p50, p90, p99 and max; None each where there are no values."""
    if not len(values):
        return {"p50": None, "p90": None, "p99": None, "max": None}
    a = np.asarray(values, np.float64)
    p50, p90, p99 = (float(q) for q in np.quantile(a, [0.5, 0.9, 0.99]))
    return {"p50": round(p50, 1), "p90": round(p90, 1), "p99": round(p99, 1), "max": round(float(a.max()), 1)}


def histogram(
    values: Sequence[float] | npt.NDArray[np.generic], bins: Sequence[float] = BINS_MS
) -> dict[str, list[float]]:
    """Counts of values up to each bin's upper edge; the last count is what lies above all."""
    edges = np.asarray(bins, np.float64)
    counts = np.bincount(np.searchsorted(edges, np.asarray(values, np.float64)), minlength=len(edges) + 1)
    return {"up_to_ms": list(map(float, bins)), "count": counts.tolist()}


def coverage(source: npt.NDArray[np.integer[Any]]) -> dict[str, float | None]:
    """Share of ads by their best source; `source` [N] indexes `SOURCES`."""
    counts = np.bincount(source, minlength=len(SOURCES))
    return {s: ratio(int(counts[k]), len(source)) for k, s in enumerate(SOURCES)}


def coverage_spans(
    ts_ms: npt.NDArray[np.int64], source: npt.NDArray[np.integer[Any]], spans: int = 24
) -> list[dict[str, Any]]:
    """Shares of ads by source in equal spans of event time; spans without ads are left out. Both arrays are [N]."""
    if not len(ts_ms):
        return []
    first, last = int(ts_ms.min()), int(ts_ms.max()) + 1
    width = max(1, -(-(last - first) // spans))
    k = len(SOURCES)
    counts = np.bincount((ts_ms - first) // width * k + source, minlength=spans * k).reshape(-1, k)
    out: list[dict[str, Any]] = []
    for span, row in enumerate(counts):
        n = int(row.sum())
        if n:
            shares = {s: round(int(row[i]) / n, 4) for i, s in enumerate(SOURCES)}
            out.append({"ts": first + span * width, "ads": n, **shares})
    return out


def plain(value: Any) -> Any:
    """`value` with numbers that JSON does not know (NaN, infinity) as None, all through dicts and lists."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
