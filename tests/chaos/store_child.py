"""A process that writes a known changelog into a store until it is killed. Run by test_store_kill.py.

usage: store_child.py DIRECTORY RECORDS_PER_BATCH RECORDS
Prints "ready" when the store is open, then the position after every batch. Goes on from the stored position.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np

from state.api import ChangelogRecord, StoreSettings
from state.store import open_store
from topics.packed import EmbeddingChunk, encode_embedding

T0 = 1_573_700_000_000
MODEL = 5
USERS = 40
SETTINGS = StoreSettings(
    ttl_ms=600_000, window_ms=1_200_000, grace_ms=60_000, segments_per_ttl=3, cache_bytes=1 << 20, lock_timeout_s=5
)


@cache
def record(offset: int) -> ChangelogRecord:
    """Record `offset` of the changelog: a function of the offset alone. One per 300 ms of event time."""
    rng = np.random.default_rng(offset)
    n = int(rng.integers(0, 30))
    items = np.sort(rng.choice(np.arange(1, 200), n, replace=False)).astype(np.uint64)
    return ChangelogRecord(
        offset,
        encode_embedding(
            EmbeddingChunk(
                1 + offset % USERS, T0 + 300 * offset, MODEL, offset + 1, items, (items % 5).astype(np.uint32),
                rng.standard_normal((n, 17)).astype(np.float16), None, rng.standard_normal(8).astype(np.float16),
                rng.standard_normal(4).astype(np.float16), f"e{offset}",
            )
        ),
    )  # fmt: skip


def main(directory: Path, batch: int, records: int) -> None:
    store = open_store(directory, SETTINGS)
    print("ready", flush=True)
    at = store.position or 0
    while at < records:
        end = min(records, at + batch)
        store.apply([record(o) for o in range(at, end)])
        # The clock follows, so segments are dropped while the writes go on.
        store.expire(T0 + 300 * end)
        at = end
        print(at, flush=True)
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
