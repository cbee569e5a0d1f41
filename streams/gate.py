"""The verifier's decision: which scored pairs are worth the FM's time. One gate per partition, pure and sequential.

An event's pairs are decided in event order, so the outcome depends on the log alone and not on how events were
batched. Per event, in this order:

1. pairs below `threshold` are refused (reason ``below_threshold``), and those without a score with them;
2. the best `top_k` stay, the rest are refused (``top_k``);
3. the user's cap: at most `per_user_cap` accepted pairs per user and `cap_window_ms` (``user_cap``);
4. the adaptive threshold: pairs below it are refused (``below_bar``). The bar follows the budget and the backlog;
5. the budget: a token bucket in event time; what does not fit is shed, least valuable first (``budget``).

The bar is a quantile tracker: after each event it moves up when the accepted share is above the target share, down
when below (Robbins-Monro on the score's logit scale). Target share = budget / rate of pairs seen, or the budget's
share, times (1 - pressure). Pressure is 0 up to `backlog_low_pairs` waiting at the embedder, 1 at
`backlog_high_pairs`: then nothing is accepted and the user's state alone is computed.

`dump` and `Gate.load` carry the adaptive part (bar, bucket, rate, clock) through the offset commit's metadata, so a
restart goes on where the committed offset says. Caps restart empty.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from models.api import NO_SCORE
from streams.clock import ElapsedClock

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

REASONS = ("below_threshold", "top_k", "user_cap", "below_bar", "budget")
NO_BAR = -50.0
MIN_BUCKET_PAIRS = 100.0
"""a bucket holds one event's list at least, or a small budget would be lost between the events it could serve"""
_STEP = 0.5
_RATE_TAU_MS = 60_000.0
_MAX_CAPPED_USERS = 100_000


@dataclass(frozen=True, slots=True)
class GateSettings:
    threshold: float = 0.0
    """least pCTR worth an FM call"""
    top_k: int = 0
    """most pairs accepted per event; 0: no limit"""
    per_user_cap: int = 0
    """most pairs accepted per user and `cap_window_ms`; 0: no limit"""
    cap_window_ms: int = 3_600_000
    budget_pairs_per_s: float = 0.0
    """of this partition, in event time; 0: no limit"""
    budget_burst_s: float = 10.0
    budget_share: float = 1.0
    """largest share of the pairs seen that is accepted"""
    backlog_low_pairs: int = 50_000
    backlog_high_pairs: int = 500_000


class _Saved(msgspec.Struct, array_like=True):
    version: int
    bar: float
    tokens: float
    rate: float
    clock_ms: int


@dataclass(slots=True)
class Gate:
    settings: GateSettings
    bar: float = NO_BAR
    """adaptive threshold on the logit scale"""
    tokens: float = math.nan
    rate: float = 0.0
    """pairs seen per second of event time, smoothed"""
    clock: ElapsedClock = field(default_factory=ElapsedClock)
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    seen: int = 0
    accepted: int = 0
    _caps: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)

    def decide(self, user: int, ts_ms: int, logits: F32, backlog_pairs: int = 0) -> I64:
        """logits [n] of one event -> indices of the accepted pairs, most valuable first (ties in input order)."""
        splits = np.array([0, len(logits)], np.int64)
        order = by_value(logits, splits)
        ranked = logits[order]
        usable = above_threshold(ranked, splits, self.settings)[0]
        return order[: self.take(user, ts_ms, ranked, usable, backlog_pairs)]

    def take(self, user: int, ts_ms: int, ranked: F32, usable: int, backlog_pairs: int = 0) -> int:
        """`decide` for an event whose logits [n] are sorted already (`by_value`), the first `usable` of them not below
        the threshold: how many of them, from the first, are accepted."""
        s = self.settings
        n = len(ranked)
        self.seen += n
        target = self._advance(ts_ms, n, backlog_pairs)
        if n == 0:
            return 0
        keep = usable
        self._refuse("below_threshold", n - usable)
        if s.top_k:
            keep = min(keep, s.top_k)
            self._refuse("top_k", usable - keep)
        if s.per_user_cap:
            room = self._room(user, ts_ms)
            self._refuse("user_cap", max(0, keep - room))
            keep = min(keep, room)
        if target < 1.0:
            above = 0 if target <= 0.0 else int(np.count_nonzero(ranked[:keep] >= self.bar))
            self._refuse("below_bar", keep - above)
            self._move_bar(ranked, above, keep, n, target)
            keep = above
        if s.budget_pairs_per_s:
            fits = min(keep, int(self.tokens))
            self._refuse("budget", keep - fits)
            keep = fits
            self.tokens -= keep
        if s.per_user_cap and keep:
            self._count(user, ts_ms, keep)
        self.accepted += keep
        return keep

    def dump(self) -> str:
        """Under 100 characters of JSON, for the offset commit's metadata."""
        tokens = -1.0 if math.isnan(self.tokens) else self.tokens
        return msgspec.json.encode(_Saved(1, self.bar, tokens, self.rate, self.clock.now_ms)).decode()

    @classmethod
    def load(cls, settings: GateSettings, text: str | None) -> Gate:
        """A gate that goes on from `dump`'s text; a fresh one when the text is missing or not ours."""
        gate = cls(settings)
        if text:
            try:
                saved = msgspec.json.decode(text, type=_Saved)
            except msgspec.MsgspecError:
                return gate
            if saved.version == 1 and math.isfinite(saved.bar + saved.tokens + saved.rate):
                gate.bar, gate.rate, gate.clock = saved.bar, saved.rate, ElapsedClock(saved.clock_ms, saved.clock_ms)
                gate.tokens = math.nan if saved.tokens < 0 else saved.tokens
        return gate

    def _advance(self, ts_ms: int, n: int, backlog_pairs: int) -> float:
        """Moves the event clock, the bucket and the rate; returns the target share of this event's pairs."""
        s = self.settings
        full = max(s.budget_pairs_per_s * s.budget_burst_s, MIN_BUCKET_PAIRS) if s.budget_pairs_per_s else 0.0
        if math.isnan(self.tokens):
            self.tokens = full
        elapsed_ms = self.clock.elapsed(ts_ms)
        self.tokens = min(full, self.tokens + s.budget_pairs_per_s * elapsed_ms / 1000)
        self.rate = self.rate * math.exp(-elapsed_ms / _RATE_TAU_MS) + n * 1000 / _RATE_TAU_MS
        target = s.budget_share
        if s.budget_pairs_per_s and self.rate > 0:
            target = min(target, s.budget_pairs_per_s / self.rate)
        span = max(1, s.backlog_high_pairs - s.backlog_low_pairs)
        pressure = min(1.0, max(0.0, (backlog_pairs - s.backlog_low_pairs) / span))
        return target * (1.0 - pressure)

    def _move_bar(self, ranked: F32, above: int, keep: int, n: int, target: float) -> None:
        if self.bar == NO_BAR:
            # First use: start at this event's own quantile.
            i = min(n - 1, max(0, math.ceil(target * n)))
            value = float(ranked[i])
            self.bar = value if math.isfinite(value) else NO_BAR
            return
        self.bar += _STEP * (above / n - min(target, keep / n))
        self.bar = min(50.0, max(NO_BAR + 1, self.bar))

    def _room(self, user: int, ts_ms: int) -> int:
        started, count = self._caps.get(user, (ts_ms, 0))
        return self.settings.per_user_cap - (count if abs(ts_ms - started) < self.settings.cap_window_ms else 0)

    def _count(self, user: int, ts_ms: int, n: int) -> None:
        started, count = self._caps.pop(user, (ts_ms, 0))
        if abs(ts_ms - started) >= self.settings.cap_window_ms:  # behind it: the log is played again
            started, count = ts_ms, 0
        self._caps[user] = (started, count + n)
        if len(self._caps) > _MAX_CAPPED_USERS:
            self._caps.popitem(last=False)

    def _refuse(self, reason: str, n: int) -> None:
        self.refused[reason] += n


def by_value(logits: F32, splits: I64) -> I64:
    """logits [N] of the events that `splits` [B + 1] tells apart -> [N] places of each event's pairs, most valuable
    first: ties in input order, NaN last.

    Value and place share one integer, since NumPy sorts those with vector instructions and a float with its place not.
    """
    bits = (logits + np.float32(0.0)).view(np.uint32)  # -0.0 becomes 0.0
    # Floats are ordered as their bits are, negative ones the other way round. Inverted: the largest first.
    falling = np.where(bits >> np.uint32(31), bits, ~bits & np.uint32(0x7FFF_FFFF))
    falling[np.isnan(logits)] = np.uint32(0xFFFF_FFFF)
    keys = (falling.astype(np.uint64) << np.uint64(32)) | np.arange(len(logits), dtype=np.uint64)
    for lo, hi in pairwise(splits.tolist()):
        keys[lo:hi].sort()
    order: I64 = (keys & np.uint64(0xFFFF_FFFF)).view(np.int64)
    return order


def above_threshold(ranked: F32, splits: I64, settings: GateSettings) -> list[int]:
    """How many logits of each event are not below the threshold. NaN is, and `NO_SCORE`."""
    counts = np.zeros(len(ranked) + 1, np.int64)
    least = max(_logit(settings.threshold), float(np.nextafter(NO_SCORE, np.float32(0))))
    np.cumsum(ranked >= np.float32(least), out=counts[1:])
    found: list[int] = np.diff(counts[splits]).tolist()
    return found


def _logit(p: float) -> float:
    if p <= 0.0:
        return -math.inf
    return math.inf if p >= 1.0 else math.log(p / (1.0 - p))
