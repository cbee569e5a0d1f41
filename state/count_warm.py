"""The kernels of the rolling counts ready before the first batch, as `state.warm` has those of the store."""

from __future__ import annotations

import numpy as np

from state import count_kernels, kernels
from state.api import ChangelogRecord
from state.cache import UserCache
from state.count_store import ItemCounts, parse_counts
from state.counts import Counts, CountSettings
from state.warm import one_at_a_time
from topics.packed_counts import ItemDeltas, encode_items

_warm = False


def warm_counts() -> None:
    """Compiles the kernels, or loads them from numba's cache; at once when this process has them."""
    global _warm
    if _warm:
        return
    one, count = np.ones(1, np.uint64), np.ones(1, np.uint32)
    splits, at = np.array([0, 1], np.int64), np.zeros(1, np.int64)
    with one_at_a_time():
        parse_counts([ChangelogRecord(0, b"")])
        items = ItemCounts(CountSettings(), lambda ts: ts, room=1)
        for k in range(6):  # more than a block takes, so that everything is called
            items.apply(0, [k], [encode_items(ItemDeltas(300_000 * k, one + np.uint64(k), count, count))], k + 1)
        out = Counts.unknown(1, 1)
        items.lookup(splits, one, at, out)
        cache, heads = UserCache(0), np.zeros(1, np.int64)
        kernels.heads_of(one, 0, 1, cache.keys, cache.heads, heads)
        count_kernels.count_pairs(
            0, 1, splits, one, at, out.known, 0, cache.buf, heads,
            out.pair_shown, out.pair_clicked, out.pair_ts_ms, out.user_shown, out.user_clicked,
        )  # fmt: skip
    _warm = True
