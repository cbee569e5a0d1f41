"""Whether a peer gives our answers, event by event and pair by pair."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from topics.events import RankedAds, decode_impression, decode_ranked_ads
from topics.packed import PrecomputeRequest, decode_precompute

SCORE = 1e-4
"""pCTR may differ by this much: the same sums in another order, another build of ONNX Runtime"""
LOGIT = 1e-3


def same_requests(ours: Sequence[bytes], theirs: Sequence[bytes]) -> float:
    """Share of our precompute requests that the peer has with the same pairs, in order, and the same scores."""
    by_id = {(q.user, q.event_id): q for q in map(decode_precompute, theirs)}
    return _share([_same_request(q, by_id.get((q.user, q.event_id))) for q in map(decode_precompute, ours)])


def same_ranked(impressions: Sequence[bytes], ours: Sequence[bytes], theirs: Sequence[bytes]) -> float:
    """Share of our ranked ads that the peer has with the same ads in the same order, each with the same score, source
    and age. Two ads may change places where pCTR x bid is the same within `SCORE`."""
    by_id = {a.id: a for a in map(decode_ranked_ads, theirs)}
    bids = {e.id: np.array(e.bids or [1.0] * len(e.ads)) for e in map(decode_impression, impressions)}
    return _share([_same_ranking(a, by_id.get(a.id), bids[a.id]) for a in map(decode_ranked_ads, ours)])


def _share(equal: list[bool]) -> float:
    return sum(equal) / len(equal) if equal else 0.0


def _same_request(q: PrecomputeRequest, p: PrecomputeRequest | None) -> bool:
    return p is not None and p.items.tolist() == q.items.tolist() and bool(abs(p.scores - q.scores).max() < LOGIT)


def _same_ranking(a: RankedAds, b: RankedAds | None, bids: npt.NDArray[np.float64]) -> bool:
    if b is None or (a.user, a.ts, a.vm, a.fm, len(a.ads)) != (b.user, b.ts, b.vm, b.fm, len(b.ads)):
        return False
    if sorted(a.positions) != sorted(b.positions):
        return False
    at = np.argsort(b.positions)[np.array(a.positions, np.int64)]  # where the peer put each of our ads
    for mine, other in ((a.ads, b.ads), (a.sources, b.sources), (a.ages_ms, b.ages_ms)):
        if [other[k] for k in at.tolist()] != list(mine):
            return False
    score = np.zeros(len(bids))
    score[a.positions] = a.scores
    close = np.abs(np.array(a.scores) - np.array(b.scores)[at]) <= SCORE
    worth = score * bids
    order = np.abs(worth[a.positions] - worth[b.positions]) <= SCORE
    return bool(close.all() and order.all())
