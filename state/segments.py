"""Segments: column families that each hold the chunks of one stretch of event time.

A name carries its own range (``s<start ms>_<length ms>``), so that a store opened with another TTL still knows what
its older segments hold and when they die. ``far`` takes what lies so far ahead that it would open segments without
bound: one wrong timestamp must not cost a column family.
"""

from __future__ import annotations

from dataclasses import dataclass

from state.api import StoreSettings

FAR = "far"
NO_FLOOR = -(1 << 62)


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    start_ms: int
    length_ms: int

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.length_ms

    @property
    def name(self) -> str:
        return f"s{self.start_ms}_{self.length_ms}"


def parse(name: str) -> Segment | None:
    """The segment of a column family's name, None where it is not one."""
    start, sep, length = name[1:].partition("_")
    if name[:1] != "s" or not sep or not start.isdecimal() or not length.isdecimal() or int(length) == 0:
        return None
    return Segment(int(start), int(length))


@dataclass(frozen=True, slots=True)
class Times:
    """What the settings say about time; all in ms."""

    ttl: int
    window: int
    grace: int
    segment: int

    @classmethod
    def of(cls, s: StoreSettings) -> Times:
        return cls(s.ttl_ms, s.window_ms, s.grace_ms, max(1, s.ttl_ms // s.segments_per_ttl))

    @property
    def horizon(self) -> int:
        """How long a chunk can matter."""
        return max(self.ttl, self.window)

    @property
    def max_segments(self) -> int:
        """Segments that data in order can need, twice over."""
        return 2 * ((self.horizon + self.grace) // self.segment + 2)

    def segment_of(self, ts_ms: int) -> Segment:
        return Segment(ts_ms - ts_ms % self.segment, self.segment)

    def floor(self, clock_ms: int) -> int:
        return clock_ms - self.grace if clock_ms >= 0 else NO_FLOOR

    def dead(self, newest_ts_ms: int, floor_ms: int) -> bool:
        """Nothing of event time <= `newest_ts_ms` can be live at `floor_ms` or later."""
        return newest_ts_ms + self.horizon <= floor_ms
