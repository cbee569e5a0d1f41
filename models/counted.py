"""Rolling counts of a log's impressions, each as of its own time: what training and evaluation learn from."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from models.api import F32
from models.dataset import Dataset
from models.features import requests
from models.rolling import ROLLING, rolling_features
from state.counts import Counts, CountSettings
from state.counts_offline import OfflineCounts

PIECE = 512
"""requests asked for at a time"""


class CountedImpressions:
    """All impressions and all feedback of the log count, each from its own event time on, those among them that are
    nothing to learn from. Requests where `unknown` [B] have no counts."""

    def __init__(self, data: Dataset, settings: CountSettings, unknown: npt.NDArray[np.bool_]) -> None:
        self._impressions, self._unknown = data.impressions, unknown
        self._counts = OfflineCounts(settings)
        for events, add in ((data.shown, self._counts.shown), (data.clicks, self._counts.clicked)):
            add(events.users, events.ts_ms, events.splits, events.items)

    def counts(self, start: int, stop: int) -> Counts:
        """Of the requests `start:stop`."""
        asked = requests(self._impressions, start, stop)
        counts = self._counts.lookup(asked.users, asked.splits, asked.items, asked.ts_ms)
        counts.known &= ~self._unknown[start:stop]
        return counts

    @cached_property
    def columns(self) -> F32:
        """[all pairs, len(ROLLING)]"""
        impressions = self._impressions
        out = np.empty((impressions.pairs, len(ROLLING)), np.float32)
        for start in range(0, impressions.requests, PIECE):
            stop = min(start + PIECE, impressions.requests)
            part = requests(impressions, start, stop)
            pairs = slice(int(impressions.splits[start]), int(impressions.splits[stop]))
            out[pairs] = rolling_features(self.counts(start, stop), part.splits, part.ts_ms)
        return out
