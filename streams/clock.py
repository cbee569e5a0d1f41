"""A partition's event clock: monotone, and not moved by one wrong timestamp.

It decides when segments expire; look-ups use the request's own event time. An event up to `MAX_STEP_MS` ahead moves
the clock at once. A larger jump (the first event of a new store, a gap in the log, a wrong timestamp) moves it only
when `CONFIRM` events in a row agree, each within `MAX_STEP_MS` of the jump; any event near the clock withdraws it.
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
        elif self._votes and abs(ts_ms - self._claim_ms) <= MAX_STEP_MS:
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
