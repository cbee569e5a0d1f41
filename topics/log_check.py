"""What is in an event log: counts, span, order, duplicates, bad lines, and how much of it candidates could cover.

Memory is bounded: distinct ids are counted over sets of 64-bit hashes, exact up to `SET_CAPACITY` and a uniform sample
of hashes beyond (an error of about 0.2 %); the coverage ceiling keeps the newest candidate time of each pair of the
past 24 h, and of a smaller and smaller share of the users when that exceeds `PAIR_CAPACITY`. Reports say when they
sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from topics.events import Candidates, Event, Feedback, Impression, Item
from topics.ids import hash_id, hash_ids
from topics.readers import EventLog

SET_CAPACITY = 1 << 20
PAIR_CAPACITY = 4 << 20
HOUR_MS = 3_600_000
TTLS_H = (1, 6, 24)
_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


class Distinct:
    """How many different hashes were added, and how many were repeats."""

    def __init__(self, capacity: int = SET_CAPACITY) -> None:
        self._capacity = capacity
        self._kept: set[int] = set()
        self._shift = 0
        self._repeats = 0.0

    def add(self, h: int) -> None:
        if self._shift and h & ((1 << self._shift) - 1):
            return
        kept = self._kept
        if h in kept:
            self._repeats += 1 << self._shift
            return
        kept.add(h)
        if len(kept) > self._capacity:
            self._shift += 1
            low = (1 << self._shift) - 1
            self._kept = {k for k in kept if not k & low}

    @property
    def exact(self) -> bool:
        return self._shift == 0

    @property
    def count(self) -> int:
        return len(self._kept) << self._shift

    @property
    def repeats(self) -> int:
        return int(self._repeats)


class CoverageCeiling:
    """Share of the impressions' pairs that were candidates of that user within the TTL before: the most that
    precomputed embeddings could hit."""

    def __init__(self, capacity: int = PAIR_CAPACITY, ttls_h: Iterable[int] = TTLS_H) -> None:
        self._capacity = capacity
        self._last: dict[int, tuple[int, int]] = {}
        self._shift = 0
        self._clock = 0
        self.pairs = 0
        self.covered = dict.fromkeys(ttls_h, 0)
        self._max_ms = max(self.covered) * HOUR_MS

    def add(self, event: Candidates | Impression) -> None:
        user = hash_id(event.user)
        if self._skips(user):
            return
        ts = event.ts
        last = self._last
        if isinstance(event, Candidates):
            self._clock = max(self._clock, ts)
            for item in hash_ids(event.items).tolist():
                last[(user ^ (item * _ODD)) & _MASK] = (ts, user)
            if len(last) > self._capacity:
                self._shrink()
            return
        for item in hash_ids(event.ads).tolist():
            self.pairs += 1
            seen = last.get((user ^ (item * _ODD)) & _MASK)
            if seen is None:
                continue
            age = ts - seen[0]
            if age >= 0:
                for ttl in self.covered:
                    if age < ttl * HOUR_MS:
                        self.covered[ttl] += 1

    @property
    def user_share(self) -> float:
        """of the users that were looked at; 1.0 unless the log is too large. Users left out late still count with
        what was seen of them before."""
        return 1 / (1 << self._shift)

    def _skips(self, user: int) -> bool:
        return bool(self._shift and user & ((1 << self._shift) - 1))

    def _shrink(self) -> None:
        oldest = self._clock - self._max_ms
        self._last = {k: v for k, v in self._last.items() if v[0] > oldest}
        while len(self._last) > self._capacity // 2:
            self._shift += 1
            self._last = {k: v for k, v in self._last.items() if not self._skips(v[1])}


@dataclass(slots=True)
class LogReport:
    format: str
    rows: dict[str, int] = field(default_factory=dict)
    """by type; derived candidates are `derived_candidates`, not rows"""
    derived_candidates: int = 0
    sources: str | None = None
    users: int = 0
    items: int = 0
    exact: bool = True
    """users, items and duplicates were counted, not estimated"""
    first_ts: int | None = None
    last_ts: int | None = None
    pairs: int = 0
    """of impressions"""
    ads_per_impression: float = 0.0
    candidates_per_request: float = 0.0
    clicks: int = 0
    click_rate: float | None = None
    """clicks per pair shown; None without pairs"""
    order_violations: int = 0
    """events earlier than one before them"""
    largest_lateness_ms: int = 0
    duplicate_ids: dict[str, int] = field(default_factory=dict)
    """by type: events whose id an earlier event of the same type has (a repeated item is an update, not counted)"""
    coverage_ceiling: dict[str, float] = field(default_factory=dict)
    """TTL -> share of the pairs"""
    coverage_user_share: float = 1.0
    bad_lines: int = 0
    bad_reasons: dict[str, int] = field(default_factory=dict)
    first_bad_lines: list[dict[str, Any]] = field(default_factory=list)
    source_counts: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.bad_lines and not self.order_violations and not any(self.duplicate_ids.values())


class LogCheck:
    """Takes the events of a log one by one; `report` sums up."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._users, self._items = Distinct(), Distinct()
        self._ids = {"candidates": Distinct(), "impression": Distinct(), "feedback": Distinct()}
        self._ceiling = CoverageCeiling()
        self._first: int | None = None
        self._clock: int | None = None
        self._violations = self._lateness = 0
        self._pairs = self._candidates = self._clicks = 0

    def add(self, event: Event) -> None:
        kind = str(event.__struct_config__.tag)
        self._rows[kind] = self._rows.get(kind, 0) + 1
        if event.ts > 0 or not isinstance(event, Item):
            self._time(event.ts)
        if isinstance(event, Item):
            self._items.add(hash_id(event.id))
            return
        self._users.add(hash_id(event.user))
        self._ids[kind].add(hash_id(event.id))
        if isinstance(event, Feedback):
            self._clicks += len(event.clicked)
            return
        self._ceiling.add(event)
        items = event.items if isinstance(event, Candidates) else event.ads
        for item in hash_ids(items).tolist():
            self._items.add(item)
        if isinstance(event, Candidates):
            self._candidates += len(items)
        else:
            self._pairs += len(items)

    def report(self, log: EventLog) -> LogReport:
        rows = dict(self._rows)
        requests = rows.get("candidates", 0)
        ceiling = self._ceiling
        out = LogReport(log.format, rows)
        if log.sources is not None:
            out.sources = ",".join(f"{name}:{size}" for name, size in log.sources.mix.parts)
            counts = log.sources.counts
            out.source_counts = {name: getattr(counts, name) for name in counts.__slots__}
            out.derived_candidates = counts.events
            rows["candidates"] = requests - counts.events
        out.users, out.items = self._users.count, self._items.count
        out.exact = all(d.exact for d in (self._users, self._items, *self._ids.values()))
        out.first_ts, out.last_ts = self._first, self._clock
        out.pairs, out.clicks = self._pairs, self._clicks
        impressions = rows.get("impression", 0)
        out.ads_per_impression = self._pairs / impressions if impressions else 0.0
        out.candidates_per_request = self._candidates / requests if requests else 0.0
        out.click_rate = self._clicks / self._pairs if self._pairs else None
        out.order_violations, out.largest_lateness_ms = self._violations, self._lateness
        out.duplicate_ids = {kind: d.repeats for kind, d in self._ids.items()}
        if ceiling.pairs and requests:
            out.coverage_ceiling = {f"{ttl} h": n / ceiling.pairs for ttl, n in ceiling.covered.items()}
        out.coverage_user_share = ceiling.user_share
        out.bad_lines, out.bad_reasons = log.bad.count, dict(log.bad.reasons)
        out.first_bad_lines = [{name: getattr(b, name) for name in b.__slots__} for b in log.bad.first]
        return out

    def _time(self, ts: int) -> None:
        if self._clock is None or self._first is None:
            self._first = self._clock = ts
            return
        self._first = min(self._first, ts)
        if ts < self._clock:
            self._violations += 1
            self._lateness = max(self._lateness, self._clock - ts)
        else:
            self._clock = ts


def check_log(log: EventLog) -> LogReport:
    """Reads the whole log once."""
    checking = LogCheck()
    for event in log.events():
        checking.add(event)
    return checking.report(log)
