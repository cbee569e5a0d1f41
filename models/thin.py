"""Requests of a poorer service, for the VM with slots to learn from.

In a log that was embedded whole, a pair without a direct hit nearly always has a topic aggregate, an aggregate and a
state. A budget changes that: some users then have a state and nothing else, and a VM that has never seen it is misled
there, worse than by no slot at all. So a share of the requests is shown with slots taken away at random.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from models.api import F32, I64

PER_PAIR = ("direct", "topic")
PER_REQUEST = ("aggregate", "state")


def thinned(
    columns: F32, splits: I64, spans: Mapping[str, tuple[int, int]], share: float, rng: np.random.Generator
) -> F32:
    """columns [n, W] of the pairs of B requests with `splits` [B + 1] -> a copy in which `share` of the requests lose
    slots: direct and topic from each pair with a probability drawn for the request, aggregate and state as a whole from
    half of them. A slot taken away is all zeros, as an empty one is; `spans` says where each lies
    (`models.inputs.slot_spans`)."""
    out, counts = columns.copy(), np.diff(splits)
    poor = rng.random(len(counts)) < share
    for slot in (*PER_PAIR, *PER_REQUEST):
        if slot not in spans:
            continue
        if slot in PER_PAIR:
            kept = np.repeat(np.where(poor, rng.random(len(counts)), 1.0), counts)
            lost = rng.random(len(out)) >= kept
        else:
            lost = np.repeat(poor & (rng.random(len(counts)) < 0.5), counts)
        a, z = spans[slot]
        out[lost, a:z] = 0
    return out
