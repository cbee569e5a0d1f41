"""Similar users by clusters: k-means over profile vectors, and the mean aggregate of each cluster.

The other form of "similar users": a small table made ahead of time (`solaris neighbours build`) instead of an index.
Profiles are compared by cosine (spherical k-means).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from state import artifact
from state.api import F32, I64
from state.neighbours import Similar
from state.profiles import Profiles, unit

MANIFEST = "clusters.json"
KIND = "solaris-clusters"


@dataclass(slots=True)
class ClusterTable:
    """C clusters."""

    centroids: F32
    """[C, p], length 1"""
    aggregates: F32
    """[C, d] mean of the members' aggregates"""
    counts: I64
    """[C] members"""
    ts_ms: I64
    """[C] newest event time among the members' aggregates"""
    model: int
    window_ms: int
    min_similarity: float = 0.5

    def similar(self, profiles: F32, now_ms: I64) -> Similar:
        """The nearest cluster's mean, by the same rules as `NeighbourIndex.similar`."""
        q, p = profiles.shape
        if p != self.centroids.shape[1]:
            raise ValueError(f"profile vectors of {p} numbers, the table has {self.centroids.shape[1]}")
        out = Similar.none(q, self.aggregates.shape[1])
        queries, good = unit(profiles)
        if not len(self.centroids) or not q:
            return out
        cosines = queries @ self.centroids.T
        best = cosines.argmax(axis=1)
        cosine, ts = cosines[np.arange(q), best], self.ts_ms[best]
        now = np.asarray(now_ms, np.int64)
        some = good & (cosine >= self.min_similarity) & (ts <= now) & (now < ts + self.window_ms)
        out.aggregate[some] = self.aggregates[best[some]]
        out.similarity[some] = cosine[some]
        out.ts_ms[some] = ts[some]
        out.count[some] = self.counts[best[some]]
        return out

    def save(self, directory: Path) -> None:
        arrays: dict[str, np.ndarray] = {
            "centroids": self.centroids,
            "aggregates": self.aggregates,
            "counts": self.counts,
            "ts_ms": self.ts_ms,
        }
        artifact.publish(
            directory,
            MANIFEST,
            {"table": lambda path: artifact.save_arrays(path, arrays)},
            {
                "kind": KIND, "format": 1, "space": "cosine", "dim": self.centroids.shape[1],
                "aggregate_dim": self.aggregates.shape[1], "count": len(self.centroids), "model": f"{self.model:016x}",
                "window_ms": self.window_ms, "min_similarity": self.min_similarity,
            },
        )  # fmt: skip


def load(directory: Path) -> ClusterTable:
    """Raises `StoreFormatError`."""
    manifest, files = artifact.read(directory, MANIFEST, KIND, 1)
    a = artifact.load_arrays(files["table"])
    return ClusterTable(
        a["centroids"], a["aggregates"], a["counts"], a["ts_ms"], int(manifest["model"], 16),
        int(manifest["window_ms"]), float(manifest["min_similarity"]),
    )  # fmt: skip


def cluster(
    data: Profiles, clusters: int, model: int, window_ms: int, *, iterations: int = 25, seed: int = 0
) -> ClusterTable:
    """Spherical k-means, begun by k-means++; deterministic for a seed. Empty clusters are dropped."""
    if clusters < 1:
        raise ValueError(f"{clusters} clusters; at least 1")
    x = data.profiles
    centroids = _spread(x, min(clusters, len(x)), np.random.default_rng(seed))
    member = np.zeros(len(x), np.int64)
    for _ in range(iterations):
        if not len(x):
            break
        member, before = (x @ centroids.T).argmax(axis=1), member
        sums = np.zeros(centroids.shape, np.float64)
        np.add.at(sums, member, x)
        moved, good = unit(sums.astype(np.float32))
        centroids = np.where(good[:, None], moved, centroids)
        if (member == before).all():
            break
    counts = np.bincount(member, minlength=len(centroids)).astype(np.int64)
    sums = np.zeros((len(centroids), data.aggregates.shape[1]), np.float64)
    np.add.at(sums, member, data.aggregates)
    newest = np.full(len(centroids), -1, np.int64)
    np.maximum.at(newest, member, data.ts_ms)
    used = counts > 0
    means = (sums[used] / counts[used][:, None]).astype(np.float32)
    return ClusterTable(centroids[used], means, counts[used], newest[used], model, window_ms)


def _spread(x: F32, k: int, rng: np.random.Generator) -> F32:
    """k-means++: each next seed is drawn by its squared distance from the seeds there are."""
    if k == 0:
        return x[:0]
    chosen = [int(rng.integers(len(x)))]
    distance = 1 - x @ x[chosen[0]]
    while len(chosen) < k:
        weights = np.maximum(distance, 0).astype(np.float64) ** 2
        total = weights.sum()
        if total <= 0:
            break
        chosen.append(int(rng.choice(len(x), p=weights / total)))
        distance = np.minimum(distance, 1 - x @ x[chosen[-1]])
    return x[chosen].copy()
