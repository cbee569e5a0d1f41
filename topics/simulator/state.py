"""The arrays that the kernels work on, and the numbers of the config as one record."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from topics.simulator.config import HOUR_MS, SimulatorConfig

RECORD = np.dtype(
    [
        ("key", np.int64),  # place in the log; equals ts unless late or disordered
        ("ts", np.int64),
        ("offset", np.int64),  # of its bytes in `data`
        ("length", np.int64),
        ("truth_offset", np.int64),
        ("user", np.int32),
        ("sequence", np.int32),
        ("pairs", np.int32),  # candidates or ads; for feedback, clicks
        ("kind", np.int32),
    ],
    align=True,
)


class State(NamedTuple):
    """All that the kernels read and write: one tuple of few arrays, since compiling time goes by their number."""

    p: Any
    """record of the config's numbers"""
    items: Any
    """records[M]"""
    slot_item: Any
    """int32[live] item now in each slot"""
    trend: Any
    """int16[demographics, periods]"""
    trend_phase: Any
    """int64[demographics] ms"""
    hour_activity: Any
    """float64[24], at most 1"""
    users: Any
    """records[U]"""
    history: Any
    """records[U, H] ring"""
    listed: Any
    """int32[U, K] newest candidates"""
    stamp: Any
    """int64[M] scratch: last list that took the item"""
    stamp_now: Any
    """int64[1]"""
    times_shown: Any
    """int32[M] scratch: times in the newest impressions of the user at hand"""
    lately: Any
    """int8[M] scratch: touched in the last half hour by the user at hand"""
    topic: Any
    """int32[sub-topics]"""
    log1p: Any
    """float64[...] log(1 + i), for positions and counts"""
    ids: Any
    """int32[max(K, ads)] scratch: the list under way"""
    scores: Any
    """float64[max(K, ads)] scratch"""
    records: Any
    """RECORD[R] rendered and not yet written"""
    data: Any
    """uint8[...] their bytes"""
    truth: Any
    """float32[...] click probabilities of impressions, end to end"""
    n: Any
    """int64[3] used of records, data, truth"""


def params(c: SimulatorConfig, trend_begin: int, mean_activity: float) -> Any:
    """The record `State.p`."""
    n_sub = c.topics * c.subtopics
    whole = {
        "n_sub": n_sub, "items_per_sub": -(-c.live_items // n_sub), "subtopics": c.subtopics, "emit_from": c.start_ms,
        "trend_begin": trend_begin, "trend_ms": c.trend_ms, "candidates": c.candidates, "touched": c.touched,
        "ads": c.ads, "ad_prices": int(c.ad_prices),
    }  # fmt: skip
    real = {
        "session_gap_ms": 24.0 * HOUR_MS * mean_activity / c.sessions_per_day,
        "stop": 1.0 / max(c.steps_per_session, 1.0),
        "base": c.base_logit,
        **{
            name: float(getattr(c, name))
            for name in (
                "event_share", "step_gap_ms", "serve_delay_ms", "switch_ms", "trend_share", "reveal",
                "intent_price_sd", "candidates_share", "carry", "repeat", "w_quality", "w_affinity", "w_match",
                "w_topic", "w_product", "w_price", "w_touch", "w_trend", "w_fatigue", "w_position", "late_share",
                "late_ms", "disorder_ms",
            )
        },
    }  # fmt: skip
    fields = [(name, np.int64) for name in whole] + [(name, np.float64) for name in real]
    return np.array([(*whole.values(), *real.values())], np.dtype(fields))[0]
