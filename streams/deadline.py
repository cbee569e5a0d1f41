"""One deadline that runs through a revoke or a shutdown, instead of a timeout per step."""

from __future__ import annotations

import time


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self, at_most: float = float("inf")) -> float:
        """Seconds left, never negative, at most `at_most`."""
        return min(at_most, max(0.0, self._end - time.monotonic()))

    @property
    def over(self) -> bool:
        return self.left() <= 0.0
