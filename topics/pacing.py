"""Event time against the wall clock: when an event of a replayed log is due."""

from __future__ import annotations

from dataclasses import dataclass

MAX_GAP_MS = 24 * 3_600_000


@dataclass(slots=True)
class Pacer:
    """`due(ts, now)` says how many seconds to wait before the event of time `ts` goes out, at `speed` times real time.

    The clock starts at the first event and never goes back: late events are due at once. One event more than
    `MAX_GAP_MS` ahead is let through without moving the clock (a wrong time must not stop the replay for days); when
    the next one is there too, the log has a gap, which is skipped.
    """

    speed: float
    clock_ms: int = -1
    _start_ms: int = -1
    _start_s: float = 0.0
    _ahead: bool = False

    def due(self, ts: int, now_s: float) -> float:
        """`now_s` is a monotone clock, in seconds. 0 or less: now."""
        if self.clock_ms < 0:
            self._anchor(ts, now_s)
        elif ts - self.clock_ms > MAX_GAP_MS:
            if not self._ahead:
                self._ahead = True
                return 0.0
            self._anchor(ts, now_s)
        else:
            self.clock_ms = max(self.clock_ms, ts)
        self._ahead = False
        return self._start_s + (ts - self._start_ms) / 1000 / self.speed - now_s

    def _anchor(self, ts: int, now_s: float) -> None:
        self.clock_ms = self._start_ms = ts
        self._start_s = now_s
