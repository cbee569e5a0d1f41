"""Sums of what was ranked and clicked, by partition and ten-second window of the broker's append time. Pure.

*Why append time*: a replayed log is days old by event time; a live page is about now, and the broker's clock is the
one that all records share.

*Why blocks*: a block is a function of the records of its window, and a table's row is **set** to it, never added to.
Reading a window again from its first record gives the same block again, so a restart, which goes back to the start of
a window older than every open join (`streams.monitor.connect.rewind`), repairs what a crash left behind.

Ranked ads are joined with their feedback by impression id, in either order of arrival, when the two records lie at
most `feedback_window_ms` apart; the result counts in the block of the ranked record. An impression without feedback
has no label: it counts as ranked, not as "not clicked".
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import msgspec

from topics.errors import InvalidEvent
from topics.events import decode_feedback, decode_ranked_ads
from topics.ids import hash_ids, sampled

BLOCK_MS = 10_000
STEPS = 8
"""histogram buckets per doubling: a percentile is read at most 2**(1/8) - 1 = 9 % too high"""
EPSILON = 1e-7
MAX_PENDING = 200_000
"""impressions waiting for feedback, and feedback waiting for impressions, at most; the oldest give way, counted"""

Key = tuple[int, int]
"""(partition, start of the window in ms)"""


def bucket(ms: float) -> int:
    """Histogram bucket of a duration: 0 up to 1 ms, then `STEPS` per doubling."""
    return 0 if ms <= 1 else math.ceil(STEPS * math.log2(ms))


def upper_ms(index: int) -> float:
    """Upper bound of a bucket, which belongs to it."""
    return 2.0 ** (index / STEPS)


def log_loss(p: float, clicked: bool) -> float:
    p = min(max(p, EPSILON), 1.0 - EPSILON)
    return -math.log(p) if clicked else -math.log1p(-p)


@dataclass(slots=True)
class Labelled:
    """Ads whose outcome is known."""

    ads: int = 0
    clicks: int = 0
    pctr: float = 0.0
    """sum of the predicted click rates"""
    loss: float = 0.0
    """sum of the log losses"""

    def add(self, other: Labelled) -> None:
        self.ads += other.ads
        self.clicks += other.clicks
        self.pctr += other.pctr
        self.loss += other.loss


@dataclass(slots=True)
class Compared:
    """Ads whose outcome is known and whose message had the VM's own scores too."""

    ads: int = 0
    loss: float = 0.0
    """sum of the log losses of what was served"""
    vm_loss: float = 0.0
    """... and of the VM alone"""

    def add(self, other: Compared) -> None:
        self.ads += other.ads
        self.loss += other.loss
        self.vm_loss += other.vm_loss


@dataclass(slots=True)
class Block:
    counts: Counter[str] = field(default_factory=Counter)
    """impressions, ads, restoring, joined, duplicates, feedback, feedback_repeated, feedback_unmatched, undecodable"""
    sources: Counter[str] = field(default_factory=Counter)
    ages: dict[str, Counter[int]] = field(default_factory=dict)
    """source -> histogram of the ages of its data"""
    latency: Counter[int] = field(default_factory=Counter)
    """histogram: impression polled to ranking ready"""
    labelled: dict[str, Labelled] = field(default_factory=dict)
    """by source"""
    compared: Compared = field(default_factory=Compared)

    def add(self, other: Block) -> None:
        self.counts.update(other.counts)
        self.sources.update(other.sources)
        self.latency.update(other.latency)
        for source, histogram in other.ages.items():
            self.ages.setdefault(source, Counter()).update(histogram)
        for source, labelled in other.labelled.items():
            self.labelled.setdefault(source, Labelled()).add(labelled)
        self.compared.add(other.compared)

    def dump(self) -> dict[str, Any]:
        """As JSON takes it; `Block.load` reads it back."""
        return {
            "counts": dict(self.counts),
            "sources": dict(self.sources),
            "ages": {s: {str(k): n for k, n in h.items()} for s, h in self.ages.items()},
            "latency": {str(k): n for k, n in self.latency.items()},
            "labelled": {s: [x.ads, x.clicks, x.pctr, x.loss] for s, x in self.labelled.items()},
            "compared": [self.compared.ads, self.compared.loss, self.compared.vm_loss],
        }

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> Block:
        return cls(
            Counter(value["counts"]),
            Counter(value["sources"]),
            {s: Counter({int(k): n for k, n in h.items()}) for s, h in value["ages"].items()},
            Counter({int(k): n for k, n in value["latency"].items()}),
            {s: Labelled(*x) for s, x in value["labelled"].items()},
            Compared(*value.get("compared", ())),
        )


@dataclass(slots=True)
class _Ranked:
    key: Key
    ts_ms: int
    seen_ms: int
    ads: array[int]
    scores: array[float]
    vm_scores: array[float]
    """empty when the message had none"""
    sources: list[str]


@dataclass(slots=True)
class _Clicks:
    key: Key
    ts_ms: int
    seen_ms: int
    clicked: set[int]


class _Id(msgspec.Struct):
    id: str


class Blocks:
    """`since_ms`: start of the window from which records are read; older windows come from `load` alone."""

    def __init__(self, share: float, feedback_window_ms: int, keep_ms: int, since_ms: int = 0) -> None:
        self._share, self._window_ms, self._keep_ms = share, feedback_window_ms, keep_ms
        self.since_ms = since_ms
        self._blocks: dict[Key, Block] = {}
        self._own: set[Key] = set()
        self._dirty: set[Key] = set()
        self._ranked: dict[str, _Ranked | int] = {}
        """id -> waiting for feedback, or the time it was seen once it has got it"""
        self._clicks: dict[str, _Clicks] = {}
        self._id = msgspec.json.Decoder(_Id)
        self.skipped: Counter[str] = Counter()
        """records outside every block: too_old, pending_dropped"""

    def load(self, key: Key, value: Mapping[str, Any]) -> None:
        """A row as it was stored. Windows that are being read again are left alone."""
        if key not in self._own:
            self._blocks[key] = Block.load(value)

    def ranked(self, partition: int, ts_ms: int, value: bytes | None, now_ms: int) -> None:
        """One record of `ranked-ads`: `ts_ms` is when the broker took it, `now_ms` when it is read."""
        key = self._key(partition, ts_ms, self.since_ms)
        if key is None or not self._wanted(key, value):
            return
        try:
            r = decode_ranked_ads(value or b"")
        except InvalidEvent:
            self._count(key, "undecodable")
            return
        block = self._block(key)
        if r.id in self._ranked:
            block.counts["duplicates"] += 1
            return
        block.counts["impressions"] += 1
        block.counts["ads"] += len(r.ads)
        block.counts["restoring"] += r.state != "live"
        block.sources.update(r.sources)
        block.latency[bucket(r.ranked_ms - r.received_ms)] += 1
        for source, age in zip(r.sources, r.ages_ms, strict=False):
            if age is not None:
                block.ages.setdefault(source, Counter())[bucket(age)] += 1
        waiting = _Ranked(key, ts_ms, now_ms, array("Q", hash_ids(r.ads).tolist()),
                          array("d", r.scores), array("d", r.vm_scores or ()), r.sources)  # fmt: skip
        clicks = self._clicks.pop(r.id, None)
        self._ranked[r.id] = waiting
        if clicks is not None:
            self._join(r.id, waiting, clicks)
        self._bound(self._ranked)

    def feedback(self, partition: int, ts_ms: int, value: bytes | None, now_ms: int) -> None:
        """One record of `feedback`. One of the block before `since_ms` counts nowhere, but may still be joined."""
        key = self._key(partition, ts_ms, since_ms=self.since_ms - BLOCK_MS)
        if key is None or not self._wanted(key, value):
            return
        try:
            f = decode_feedback(value or b"")
        except InvalidEvent:
            self._count(key, "undecodable")
            return
        self._count(key, "feedback")
        clicks = _Clicks(key, ts_ms, now_ms, set(hash_ids(f.clicked).tolist()))
        waiting = self._ranked.get(f.id)
        if isinstance(waiting, _Ranked):
            self._join(f.id, waiting, clicks)
        elif waiting is not None or f.id in self._clicks:
            self._count(key, "feedback_repeated")
        else:
            self._clicks[f.id] = clicks
            self._bound(self._clicks)

    def expire(self, now_ms: int) -> list[Key]:
        """Ends the joins whose window has closed and forgets blocks older than `keep_ms`, whose keys it returns."""
        limit = now_ms - self._window_ms
        # Both are in the order of arrival, so the walk ends at the first that may stay.
        for i, _ in list(takewhile(lambda e: _seen(e[1]) < limit, self._ranked.items())):
            del self._ranked[i]
        for i, c in list(takewhile(lambda e: _seen(e[1]) < limit, self._clicks.items())):
            del self._clicks[i]
            self._count(c.key, "feedback_unmatched")
        gone = [k for k in self._blocks if k[1] + BLOCK_MS < now_ms - self._keep_ms]
        for k in gone:
            del self._blocks[k]
            self._own.discard(k)
            self._dirty.discard(k)
        return gone

    def changed(self) -> list[tuple[Key, dict[str, Any]]]:
        """Blocks to store, whole, since the last call."""
        out = [(k, self._blocks[k].dump()) for k in sorted(self._dirty)]
        self._dirty.clear()
        return out

    def total(self, from_ms: int, to_ms: int) -> Block:
        """Sum of the windows that begin in [from_ms, to_ms), over all partitions."""
        out = Block()
        for (_, start), block in self._blocks.items():
            if from_ms <= start < to_ms:
                out.add(block)
        return out

    def _key(self, partition: int, ts_ms: int, since_ms: int) -> Key | None:
        start = ts_ms - ts_ms % BLOCK_MS
        if start < since_ms:
            self.skipped["too_old"] += 1
            return None
        return partition, start

    def _wanted(self, key: Key, value: bytes | None) -> bool:
        if self._share >= 1.0:
            return True
        try:
            return sampled(self._id.decode(value or b"").id, self._share)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            self._count(key, "undecodable")
            return False

    def _block(self, key: Key) -> Block:
        if key not in self._own:
            self._own.add(key)
            self._blocks[key] = Block()
        self._dirty.add(key)
        return self._blocks[key]

    def _count(self, key: Key, what: str) -> None:
        if key[1] >= self.since_ms:
            self._block(key).counts[what] += 1

    def _join(self, impression_id: str, ranked: _Ranked, clicks: _Clicks) -> None:
        self._ranked[impression_id] = ranked.seen_ms
        if abs(clicks.ts_ms - ranked.ts_ms) > self._window_ms:
            self._count(clicks.key, "feedback_unmatched")
            return
        if ranked.key not in self._own:
            self.skipped["too_old"] += 1
            return
        block = self._block(ranked.key)
        block.counts["joined"] += 1
        for ad, score, source in zip(ranked.ads, ranked.scores, ranked.sources, strict=False):
            labelled = block.labelled.setdefault(source, Labelled())
            clicked = ad in clicks.clicked
            labelled.ads += 1
            labelled.clicks += clicked
            labelled.pctr += score
            labelled.loss += log_loss(score, clicked)
        for ad, score, vm in zip(ranked.ads, ranked.scores, ranked.vm_scores, strict=False):
            clicked = ad in clicks.clicked
            block.compared.ads += 1
            block.compared.loss += log_loss(score, clicked)
            block.compared.vm_loss += log_loss(vm, clicked)

    def _bound(self, waiting: dict[str, Any]) -> None:
        if len(waiting) > MAX_PENDING:
            oldest = waiting.pop(next(iter(waiting)))
            self.skipped["pending_dropped"] += not isinstance(oldest, int)


def _seen(waiting: _Ranked | _Clicks | int) -> int:
    return waiting if isinstance(waiting, int) else waiting.seen_ms
