"""What a simulated world is made of. Presets are starting points: any field can be replaced.

Light on purpose (no numba, no numpy): the command line reads presets from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from topics.errors import SettingsError
from topics.events import MAX_TS

HOUR_MS = 3_600_000
GRID_MS = 600_000
"""Items appear on this grid (10 minutes); every emission window divides it."""


@dataclass(frozen=True, slots=True)
class SimulatorConfig:
    """One world. The same config gives the same bytes with the same version of Solaris (and of numpy)."""

    users: int = 2_500
    hours: float = 24.0
    """event time written to the log"""
    seed: int = 0
    start_ms: int = 1_767_225_600_000
    """first event time, 2026-01-01T00:00Z"""
    warmup_hours: float = 8.0
    """simulated before `start_ms` and not written, so that users begin with a history"""

    demographics: int = 15
    topics: int = 30
    subtopics: int = 4
    """per topic"""
    live_items: int = 1_200
    """live at any moment; rounded up to a multiple of topics x subtopics"""
    advertisers: int = 150
    item_life_hours: float = 72.0
    """mean lifetime, exponential beyond a minimum of 6 h"""

    sessions_per_day: float = 6.0
    """mean of a user; the activity of users is spread around it, and follows the hour of the day"""
    steps_per_session: float = 3.0
    """mean number of user events and requests of a session (geometric)"""
    event_share: float = 0.45
    """share of steps that are user events (search, view); the others are requests"""
    step_gap_ms: int = 1_200_000
    """mean gap between steps of a session"""
    serve_delay_ms: int = 60_000
    """mean gap from a user event to a request that follows it"""

    switch_ms: int = 36_000_000
    """mean time until the current interest changes"""
    trend_share: float = 0.5
    """of the changes, how many go to the shared trend of the demographic"""
    trend_ms: int = 6 * HOUR_MS
    """how long a trend lasts"""
    reveal: float = 0.8
    """probability that a user event is about the current interest"""
    intent_price_sd: float = 0.3
    """how far an interest's price level is from the user's own, in standard deviations of log price"""

    candidates: int = 100
    """items of a candidates event"""
    candidates_share: float = 0.35
    """probability that a user event or a click makes the whole retrieval run"""
    touched: int = 5
    """where it does not run, the event still gives a candidates event of so many items touched lately; 0: none"""
    carry: float = 0.75
    """probability that an item of the last list is kept, times exp(-gap / 8 h)"""
    ads: int = 30
    """ads of an impression"""
    repeat: float = 0.57
    """share of an impression's ads taken from the last candidates, times exp(-gap / 8 h)"""
    history: int = 30
    """newest history entries written with an event"""
    ad_prices: bool = False
    """write today's price of each ad as `ad_features.price` (it differs from the catalogue's)"""

    base_logit: float = -4.15
    w_quality: float = 0.5
    w_affinity: float = 0.45
    w_match: float = 1.7
    w_topic: float = 0.5
    w_product: float = 0.7
    w_price: float = 0.35
    w_touch: float = 0.5
    w_trend: float = 0.3
    w_fatigue: float = 0.35
    w_position: float = 0.12

    late_share: float = 0.0
    """share of events that stand late in the log; their `ts` stays true"""
    late_ms: int = 600_000
    """greatest delay of a late event"""
    disorder_ms: int = 0
    """every event's place in the log is shifted by up to this much"""

    def __post_init__(self) -> None:
        for f in fields(self):
            value: Any = getattr(self, f.name)
            allowed: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool,), "float": (int, float)}
            if type(value) not in allowed[str(f.type)]:
                raise SettingsError(f"simulate.{f.name}", value, f"must be of type {f.type}")
            if not math.isfinite(value):
                raise SettingsError(f"simulate.{f.name}", value, "must be finite")
        positive = (
            "users", "hours", "demographics", "topics", "subtopics", "live_items", "advertisers", "item_life_hours",
            "sessions_per_day", "steps_per_session", "step_gap_ms", "serve_delay_ms", "switch_ms", "trend_ms", "ads",
            "candidates", "history",
        )  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise SettingsError(f"simulate.{name}", getattr(self, name), "must be greater than 0")
        for name in ("event_share", "trend_share", "reveal", "candidates_share", "carry", "repeat", "late_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise SettingsError(f"simulate.{name}", getattr(self, name), "must be within 0..1")
        for name in ("seed", "start_ms", "warmup_hours", "touched", "late_ms", "disorder_ms", "intent_price_sd"):
            if not getattr(self, name) >= 0:
                raise SettingsError(f"simulate.{name}", getattr(self, name), "must not be negative")
        for name in ("candidates", "ads"):
            if getattr(self, name) > 1_000:
                raise SettingsError(f"simulate.{name}", getattr(self, name), "at most 1000")
            if getattr(self, name) > self.live_items // 2:
                raise SettingsError(
                    f"simulate.{name}", getattr(self, name), f"at most half of live_items ({self.live_items})"
                )
        if self.history > 1_000:
            raise SettingsError("simulate.history", self.history, "at most 1000")
        if self.warmup_hours * HOUR_MS > self.start_ms:
            raise SettingsError("simulate.start_ms", self.start_ms, "leave room for warmup_hours before it")
        if self.end_ms > MAX_TS - 24 * HOUR_MS:
            raise SettingsError("simulate.hours", self.hours, "the log would end after the year 2099")
        if self.topics * self.subtopics > 30_000:
            raise SettingsError("simulate.topics", self.topics, "topics x subtopics is at most 30000")

    @property
    def end_ms(self) -> int:
        return self.start_ms + round(self.hours * HOUR_MS)

    def with_(self, **changes: Any) -> SimulatorConfig:
        """A copy with fields replaced. Unknown names are a `SettingsError`."""
        known = {f.name for f in fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise SettingsError(f"simulate.{name}", value, f"unknown; known are {', '.join(sorted(known))}")
        return replace(self, **changes)


PRESETS: dict[str, SimulatorConfig] = {
    "demo": SimulatorConfig(),
    "day": SimulatorConfig(users=10_000, ads=50, live_items=2_400),
    "week": SimulatorConfig(users=10_000, hours=168.0, ads=50, live_items=2_400),
    "sessions": SimulatorConfig(
        users=1_500,
        hours=24.0,
        live_items=1_200,
        sessions_per_day=1.5,
        steps_per_session=22.0,
        event_share=0.7,
        step_gap_ms=12_000,
        serve_delay_ms=2_500,
        switch_ms=45_000,
        trend_share=0.2,
        reveal=0.9,
        intent_price_sd=0.8,
        candidates=12,
        candidates_share=1.0,
        ads=20,
        repeat=0.4,
        ad_prices=True,
        base_logit=-5.2,
        w_match=2.2,
        w_touch=1.2,
        w_price=0.6,
    ),
    "tiny": SimulatorConfig(
        users=120, hours=12.0, live_items=240, topics=10, subtopics=4, demographics=4, advertisers=30, candidates=40,
        ads=20, history=20,
    ),
}  # fmt: skip


def preset(name: str) -> SimulatorConfig:
    try:
        return PRESETS[name]
    except KeyError:
        raise SettingsError("simulate.preset", name, f"one of {', '.join(PRESETS)}") from None
