"""Chunks, questions and comparisons shared by the store suites."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from state.api import ChangelogRecord, Lookup, StoreDims, StoreSettings
from topics.packed import EmbeddingChunk, encode_embedding

T0 = 1_573_700_000_000
HOUR = 3_600_000
MODEL = 5
DIMS = StoreDims(dim=3, state=2, profile=2)
SETTINGS = StoreSettings(cache_bytes=1 << 20, lock_timeout_s=0.2)


def chunk(
    user: int,
    ts_ms: int,
    items: list[int],
    *,
    value: float | None = None,
    topics: list[int] | None = None,
    model: int = MODEL,
    dims: StoreDims = DIMS,
    int8: bool = False,
    fingerprint: int = 9,
    event_id: str = "e1",
) -> bytes:
    """One record. Vectors are derived from (item, ts, value), so that a mix-up shows."""
    items = sorted(set(items))
    n = len(items)
    base = float(ts_ms % 97) if value is None else value
    v = np.array([[base + (i % 31) + k / 4 for k in range(dims.dim)] for i in items], np.float32).reshape(n, dims.dim)
    scales = None
    if int8:
        vectors: Any = (v % 100).astype(np.int8)
        scales = np.linspace(0.5, 1.5, n).astype(np.float32)
    else:
        vectors = v.astype(np.float16)
    return encode_embedding(
        EmbeddingChunk(
            user, ts_ms, model, fingerprint, np.array(items, np.uint64),
            np.array(topics if topics is not None else [i % 3 for i in items], np.uint32),
            vectors, scales, np.full(dims.state, base, np.float16),
            np.full(dims.profile, base + 1, np.float16), event_id,
        )
    )  # fmt: skip


def record(offset: int, *args: Any, **kw: Any) -> ChangelogRecord:
    return ChangelogRecord(offset, chunk(*args, **kw))


def ask(
    store: Any,
    questions: list[tuple[int, list[int], int]],
    *,
    topics: list[int] | None = None,
    model: int = MODEL,
    dims: StoreDims = DIMS,
) -> Lookup:
    """questions: (user, items, now). Topics default to item % 3, as in `chunk`."""
    items = [i for _, ids, _ in questions for i in ids]
    return store.lookup(
        np.array([u for u, _, _ in questions], np.uint64),
        np.cumsum([0] + [len(ids) for _, ids, _ in questions]).astype(np.int64),
        np.array(items, np.uint64),
        np.array(topics if topics is not None else [i % 3 for i in items], np.uint32),
        np.array([now for _, _, now in questions], np.int64),
        model,
        dims,
    )


def assert_same(got: Lookup, want: Lookup) -> None:
    """Everything equal; means to float32 rounding."""
    for f in fields(Lookup):
        a, b = getattr(got, f.name), getattr(want, f.name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f.name
        if f.name in ("topic", "aggregate"):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=f.name)
        else:
            np.testing.assert_array_equal(a, b, err_msg=f.name)
