"""Catching up with the changelog: where to start, and how far it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    action: Literal["resume", "rebuild", "wipe"]
    """resume: go on from the stored offset; rebuild: the store is new, read the whole log; wipe: empty the store
    first (`RocksStore.wipe`), then read the whole log"""
    start: int
    """first offset to read"""
    end: int
    """the log's end when the plan was made: caught up when the position is here"""
    reason: str

    @property
    def records(self) -> int:
        return max(0, self.end - self.start)


def plan_restore(position: int | None, log_start: int, log_end: int) -> RestorePlan:
    """What to do with a store whose next offset is `position` and a log that holds log_start .. log_end - 1.

    A position below the start means that records were deleted unread; above the end, that the log is another one
    than the store was filled from (made anew, or cut off by an unclean election). Either way what the store holds
    cannot be trusted to equal the log, and the log is the truth.
    """
    if not 0 <= log_start <= log_end:
        raise ValueError(f"a log from {log_start} to {log_end}")
    if position is None:
        return RestorePlan("rebuild", log_start, log_end, "the store is new")
    if position < log_start:
        return RestorePlan(
            "wipe",
            log_start,
            log_end,
            f"offset {position} is below the log's start {log_start}: "
            f"{log_start - position} records were deleted unread",
        )
    if position > log_end:
        return RestorePlan(
            "wipe",
            log_start,
            log_end,
            f"offset {position} is above the log's end {log_end}: it is not the log this store was filled from",
        )
    return RestorePlan("resume", position, log_end, f"{log_end - position} records to catch up")


@dataclass(frozen=True, slots=True)
class Progress:
    records: int
    """applied since the restore began"""
    remaining: int
    records_per_s: float
    eta_s: float | None
    """None while there is no rate to tell it from"""

    def __str__(self) -> str:
        eta = "unknown" if self.eta_s is None else f"{self.eta_s:.0f} s"
        return f"{self.records:,} records restored, {self.remaining:,} to go, {self.records_per_s:,.0f}/s, ETA {eta}"


class RestoreReporter:
    """Says every few seconds how far a restore is. `update` is cheap enough to call once a batch."""

    def __init__(
        self, name: str, plan: RestorePlan, every_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.plan, self._every_s, self._clock = name, plan, every_s, clock
        self._began = self._said = clock()
        self._position = plan.start
        self.done = plan.records == 0
        (log.error if plan.action == "wipe" else log.info)(
            "%s: %s from offset %d to %d (%s)", name, plan.action, plan.start, plan.end, plan.reason
        )

    def update(self, position: int) -> Progress:
        """`position`: the store's next offset."""
        self._position = max(self._position, position)
        now = self._clock()
        progress = self.progress()
        if not self.done and self._position >= self.plan.end:
            self.done = True
            log.info("%s: caught up: %s", self.name, progress)
        elif not self.done and now - self._said >= self._every_s:
            self._said = now
            log.info("%s: %s", self.name, progress)
        return progress

    def progress(self) -> Progress:
        records = self._position - self.plan.start
        remaining = max(0, self.plan.end - self._position)
        elapsed = self._clock() - self._began
        rate = records / elapsed if elapsed > 0 else 0.0
        eta = 0.0 if remaining == 0 else (remaining / rate if rate > 0 else None)
        return Progress(records, remaining, rate, eta)
