"""Answers to fill."""

from __future__ import annotations

import numpy as np

from state.api import Lookup, StoreDims


def empty_lookup(requests: int, pairs: int, dims: StoreDims) -> Lookup:
    """Nothing known: numbers zero, times -1."""
    B, N = requests, pairs
    return Lookup(
        vectors=np.zeros((N, dims.dim), np.float32),
        ts_ms=np.full(N, -1, np.int64),
        topic=np.zeros((N, dims.dim), np.float32),
        topic_count=np.zeros(N, np.int32),
        topic_ts_ms=np.full(N, -1, np.int64),
        aggregate=np.zeros((B, dims.dim), np.float32),
        aggregate_count=np.zeros(B, np.int32),
        aggregate_ts_ms=np.full(B, -1, np.int64),
        state=np.zeros((B, dims.state), np.float32),
        state_ts_ms=np.full(B, -1, np.int64),
        fingerprint=np.zeros(B, np.uint64),
        profile=np.zeros((B, dims.profile), np.float32),
        pair_fingerprint=np.zeros(N, np.uint64),
    )


def unfilled_lookup(requests: int, pairs: int, dims: StoreDims) -> Lookup:
    """Memory for an answer; whoever fills it writes every number."""
    B, N = requests, pairs
    e, f4, i8, i4, u8 = np.empty, np.float32, np.int64, np.int32, np.uint64
    return Lookup(
        e((N, dims.dim), f4), e(N, i8), e((N, dims.dim), f4), e(N, i4), e(N, i8),
        e((B, dims.dim), f4), e(B, i4), e(B, i8),
        e((B, dims.state), f4), e(B, i8), e(B, u8), e((B, dims.profile), f4), e(N, u8),
    )  # fmt: skip
