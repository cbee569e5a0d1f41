"""Similar users at event time, for training and evaluation: an index built at every full hour from what the store
showed then, as the roles and the backtest build theirs, and two forms to compare it with.

``clusters`` is the small table of `state.clusters`. ``random`` is the control: the same users with their profiles
dealt out anew, so that numbers, similarities and ages are those of neighbours and only the likeness is gone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Protocol

import numpy as np

from models.api import F32, I64, U64
from models.slots import SimilarUsers
from state.api import StoreDims
from state.clusters import ClusterTable, cluster
from state.neighbours import NeighbourIndex, NeighbourSettings, Similar
from state.profiles import Profiles, collect
from state.store import RocksStore

Form = Literal["neighbours", "clusters", "random"]
FORMS: tuple[Form, ...] = ("neighbours", "clusters", "random")
EVERY_MS = 3_600_000
NEIGHBOURS = NeighbourSettings(k=16)
CLUSTERS = 32


class Index(Protocol):
    def similar(self, profiles: F32, now_ms: I64) -> Similar: ...


class SimilarInTime:
    """Indexes by the hour they serve; each is built when first asked for, and kept."""

    def __init__(self, store: RocksStore, model: int, dims: StoreDims, every_ms: int = EVERY_MS) -> None:
        self._store, self._model, self._dims, self._every_ms = store, model, dims, every_ms
        self._profiles: dict[int, Profiles] = {}
        self._built: dict[tuple[int, Form], NeighbourIndex | ClusterTable] = {}

    def similar(self, profiles: F32, now_ms: I64, users: U64, delay_ms: int = 0, form: Form = "neighbours") -> Similar:
        """profiles [Q, p], now [Q], users [Q] (none is its own neighbour) -> Q answers.

        The index of a full hour holds what was servable then: what had happened `delay_ms` before it.
        """
        out = Similar.none(len(now_ms), self._dims.dim)
        began = now_ms - now_ms % self._every_ms
        for start in np.unique(began).tolist():
            mine = np.flatnonzero(began == start)
            index = self._index(start - delay_ms, form)
            if isinstance(index, ClusterTable):
                got = index.similar(profiles[mine], now_ms[mine])
            else:
                got = index.similar(profiles[mine], now_ms[mine], users[mine])
            out.aggregate[mine], out.similarity[mine] = got.aggregate, got.similarity
            out.ts_ms[mine], out.count[mine] = got.ts_ms, got.count
        return out

    def _index(self, as_of_ms: int, form: Form) -> NeighbourIndex | ClusterTable:
        built = self._built.get((as_of_ms, form))
        if built is None:
            built = self._built[as_of_ms, form] = self._build(as_of_ms, form)
        return built

    def _build(self, as_of_ms: int, form: Form) -> NeighbourIndex | ClusterTable:
        data = self._profiles.get(as_of_ms)
        if data is None:
            data = self._profiles[as_of_ms] = collect(self._store, as_of_ms, self._model, self._dims)
        window_ms = self._store.settings.window_ms
        if form == "clusters":
            return cluster(data, CLUSTERS, self._model, window_ms)
        if form == "random":
            dealt = np.random.default_rng(as_of_ms & 0xFFFFFFFF).permutation(len(data))
            data = replace(data, profiles=data.profiles[dealt])
        return NeighbourIndex(data, self._model, window_ms, NEIGHBOURS)


def nobody(requests: int, dim: int) -> SimilarUsers:
    """[B] no similar user for anybody."""
    return SimilarUsers(
        np.zeros((requests, dim), np.float32), np.full(requests, -1, np.int64), np.zeros(requests, np.float32)
    )
