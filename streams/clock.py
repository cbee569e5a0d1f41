"""A partition's event clock: monotone, and not moved by one wrong timestamp.

It decides when segments expire; look-ups use the request's own event time. An event up to `MAX_STEP_MS` ahead moves
the clock at once. A larger jump (the first event of a new store, a gap in the log, a partition with few events, a wrong
timestamp) moves it only when `CONFIRM` events in a row are that far ahead, and then to the least of them; any event
near the clock or behind it withdraws the jump.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEP_MS = 3_600_000
CONFIRM = 8


@dataclass(slots=True)
class EventClock:
    now_ms: int = -1
    jumps_doubted: int = 0
    """events whose jump was not (yet) believed"""
    late: int = 0
    """events behind the clock"""
    _claim_ms: int = -1
    _votes: int = 0

    def see(self, ts_ms: int) -> int:
        """Takes one event time, returns the clock."""
        if ts_ms <= self.now_ms:
            self.late += ts_ms < self.now_ms
            self._votes = 0
        elif self.now_ms >= 0 and ts_ms - self.now_ms <= MAX_STEP_MS:
            self.now_ms = ts_ms
            self._votes = 0
        elif self._votes:
            self._votes += 1
            self._claim_ms = min(self._claim_ms, ts_ms)
            if self._votes >= CONFIRM:
                self.now_ms = max(self.now_ms, self._claim_ms)
                self._votes = 0
            else:
                self.jumps_doubted += 1
        else:
            self._claim_ms, self._votes = ts_ms, 1
            self.jumps_doubted += 1
        return self.now_ms


NEAR_MS = 60_000


@dataclass(slots=True)
class ElapsedClock:
    """How much event time passes, for budgets and rates: a wrong timestamp or a log that is played again does not stop
    it, and jumps to and fro are not counted.

    An event up to `MAX_STEP_MS` ahead moves the clock at once, one up to a minute behind is late and moves nothing.
    What is further off moves it, ahead or back, only when `CONFIRM` events in a row agree. A step counts as a minute at
    most, and time that was counted once is not counted again by more than a minute's step.
    """

    now_ms: int = -1
    _counted_ms: int = -1
    _claim_ms: int = -1
    _votes: int = 0
    """in a row for another time: above 0 ahead of the clock, below 0 behind it"""

    def elapsed(self, ts_ms: int) -> int:
        """Takes one event time, returns by how many milliseconds time went on."""
        if self.now_ms < 0:
            self.now_ms = self._counted_ms = ts_ms
            return 0
        ahead = ts_ms - self.now_ms
        if -NEAR_MS <= ahead <= 0:
            self._votes = 0
            return 0
        if 0 < ahead <= MAX_STEP_MS:
            return self._forward(ts_ms)
        way = 1 if ahead > 0 else -1
        if self._votes * way > 0:
            self._votes += way
            self._claim_ms = min(self._claim_ms, ts_ms) if way > 0 else max(self._claim_ms, ts_ms)
        else:
            self._votes, self._claim_ms = way, ts_ms
        if abs(self._votes) < CONFIRM:
            return 0
        if way > 0:
            return self._forward(self._claim_ms)
        if self.now_ms - self._claim_ms > MAX_STEP_MS:
            self._counted_ms = self._claim_ms  # no late event: another beginning
        self.now_ms, self._votes = self._claim_ms, 0
        return 0

    def _forward(self, ts_ms: int) -> int:
        step = ts_ms - self.now_ms
        counted = step if step <= NEAR_MS else min(NEAR_MS, ts_ms - max(self.now_ms, self._counted_ms))
        self.now_ms, self._votes = ts_ms, 0
        self._counted_ms = max(self._counted_ms, ts_ms)
        return max(0, counted)
