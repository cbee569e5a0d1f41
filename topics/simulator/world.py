"""The world before anything happens: taste, items with lifetimes, trends, and the arrays of the users' state."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from topics.simulator.config import GRID_MS, HOUR_MS, SimulatorConfig

DIM = 12
FAVOURITES = 6
SHOWN = 128
"""impressions of items remembered per user, for fatigue"""
CLICKS = 8
"""clicks of one impression that enter the history"""
FORMATS = ("image", "video", "text", "carousel")
DEVICES = ("mobile", "desktop", "tablet")

Array = npt.NDArray[Any]


class World(NamedTuple):
    """What does not change while users act, but `slot_item` (which item each slot holds now) and scratch."""

    sub: Array
    """int16[M] sub-topic of each item; its topic is sub // subtopics"""
    vector: Array
    """float32[M, DIM]"""
    quality: Array
    """float32[M]"""
    price_level: Array
    """float32[M] standardised log price"""
    advertiser: Array
    """int32[M]"""
    format: Array
    """int8[M]"""
    born: Array
    """int64[M] ms, on the grid, ascending"""
    dies: Array
    """int64[M] ms"""
    slot: Array
    """int32[M] slot of each item; slot % (number of sub-topics) is its sub-topic"""
    slot_item: Array
    """int32[live] item now in each slot"""
    trend: Array
    """int16[demographics, periods]"""
    trend_phase: Array
    """int64[demographics] ms"""
    hour_activity: Array
    """float64[24], at most 1"""
    stamp: Array
    """int64[M] scratch: last list that took the item"""
    stamp_now: Array
    """int64[1]"""


class Users(NamedTuple):
    """One row a user."""

    taste: Array
    demographic: Array
    device: Array
    level: Array
    """float32[U] price level of the user"""
    activity: Array
    favourites: Array
    rng: Array
    """uint64[U] splitmix64 state: every user draws from its own stream"""
    next_ts: Array
    phase: Array
    steps_left: Array
    current: Array
    """int16[U] sub-topic of current interest"""
    current_level: Array
    switch_ts: Array
    sequence: Array
    history_item: Array
    """int32[U, H] ring"""
    history_ts: Array
    history_kind: Array
    history_n: Array
    list_item: Array
    """int32[U, K] newest candidates"""
    list_n: Array
    list_ts: Array
    shown: Array
    """int32[U, SHOWN] ring"""
    shown_n: Array
    pending: Array
    """int32[U, CLICKS] clicked items that enter the history at the feedback"""
    pending_n: Array


def build(c: SimulatorConfig) -> tuple[World, Users]:
    """Deterministic in `c`. Memory: about 0.1 kB an item and 1.5 kB a user."""
    rng = np.random.Generator(np.random.PCG64(c.seed))
    begin = c.start_ms - round(c.warmup_hours * HOUR_MS)
    begin -= begin % GRID_MS
    n_sub = c.topics * c.subtopics

    centre = rng.normal(size=(c.demographics, DIM))
    topic_vec = rng.normal(size=(c.topics, DIM))
    sub_vec = np.repeat(topic_vec, c.subtopics, axis=0) + 0.7 * rng.normal(size=(n_sub, DIM))
    sub_vec /= np.linalg.norm(sub_vec, axis=1, keepdims=True)

    world = _items(c, rng, begin, sub_vec)
    users = _users(c, rng, begin, centre, sub_vec)
    return world, users


def _items(c: SimulatorConfig, rng: np.random.Generator, begin: int, sub_vec: Array) -> World:
    n_sub = c.topics * c.subtopics
    live = -(-c.live_items // n_sub) * n_sub
    slots, born, dies = [], [], []
    at = np.full(live, begin, np.int64)
    slot = np.arange(live, dtype=np.int32)
    while len(slot):
        life_h = 6.0 + rng.exponential(max(c.item_life_hours - 6.0, 0.1), len(slot))
        end = at + (np.ceil(life_h * HOUR_MS / GRID_MS) * GRID_MS).astype(np.int64)
        slots.append(slot)
        born.append(at)
        dies.append(end)
        again = end < c.end_ms
        slot, at = slot[again], end[again]
    s, b, d = np.concatenate(slots), np.concatenate(born), np.concatenate(dies)
    order = np.lexsort((s, b))
    s, b, d = s[order], b[order], d[order]
    m = len(s)
    sub = (s % n_sub).astype(np.int16)
    adv_quality = rng.normal(0.0, 0.8, c.advertisers)
    adv_topic = rng.integers(0, c.topics, (c.advertisers,))
    advertiser = _advertisers(rng, adv_topic, sub // c.subtopics)
    hours = np.arange(24)
    hour_activity = 0.12 + 0.88 * np.clip(np.sin((hours - 6.5) / 17.5 * np.pi), 0.0, None) ** 0.7
    hour_activity[:6] = 0.12
    periods = int((c.end_ms - begin) // c.trend_ms) + 3
    return World(
        sub=sub,
        vector=(sub_vec[sub] + 0.15 * rng.normal(size=(m, DIM))).astype(np.float32),
        quality=(adv_quality[advertiser] + rng.normal(0.0, 0.6, m)).astype(np.float32),
        price_level=rng.normal(size=m).astype(np.float32),
        advertiser=advertiser.astype(np.int32),
        format=rng.integers(0, len(FORMATS), m).astype(np.int8),
        born=b,
        dies=d,
        slot=s,
        slot_item=np.full(live, -1, np.int32),
        trend=rng.integers(0, n_sub, (c.demographics, periods)).astype(np.int16),
        trend_phase=rng.integers(0, c.trend_ms, c.demographics).astype(np.int64),
        hour_activity=hour_activity / hour_activity.max(),
        stamp=np.full(m, -1, np.int64),
        stamp_now=np.zeros(1, np.int64),
    )


def _advertisers(rng: np.random.Generator, adv_topic: Array, topic: Array) -> Array:
    """Each item's advertiser: 70 % one whose home is the item's topic (where there is one), else any."""
    chosen = rng.integers(0, len(adv_topic), len(topic))
    home = rng.random(len(topic)) < 0.7
    for t in np.unique(topic):
        own = np.flatnonzero(adv_topic == t)
        if len(own):
            here = np.flatnonzero(home & (topic == t))
            chosen[here] = rng.choice(own, len(here))
    return chosen


def _users(c: SimulatorConfig, rng: np.random.Generator, begin: int, centre: Array, sub_vec: Array) -> Users:
    u = c.users
    demographic = rng.integers(0, c.demographics, u).astype(np.int16)
    taste = np.empty((u, DIM), np.float32)
    favourites = np.empty((u, FAVOURITES), np.int16)
    step = 50_000  # users at a time: the scores of all sub-topics need not fit in memory together
    for i in range(0, u, step):
        part = slice(i, min(i + step, u))
        n = part.stop - part.start
        t = centre[demographic[part]] + 0.8 * rng.normal(size=(n, DIM))
        taste[part] = t / 1.28
        score = t @ sub_vec.T + 0.5 * rng.normal(size=(n, len(sub_vec)))
        k = min(FAVOURITES, len(sub_vec))
        best = np.argsort(-score, axis=1, kind="stable")[:, :k]
        favourites[part] = np.resize(best.T, (FAVOURITES, n)).T if k < FAVOURITES else best
    gap_ms = 24 * HOUR_MS / c.sessions_per_day
    return Users(
        taste=taste,
        demographic=demographic,
        device=rng.choice(len(DEVICES), u, p=[0.65, 0.28, 0.07]).astype(np.int8),
        level=rng.normal(0.0, 0.7, u).astype(np.float32),
        activity=np.exp(rng.normal(-0.125, 0.5, u)),
        favourites=favourites,
        rng=rng.integers(0, 2**63, u, dtype=np.int64).astype(np.uint64),
        next_ts=begin + (rng.exponential(gap_ms, u)).astype(np.int64),
        phase=np.zeros(u, np.int8),
        steps_left=np.zeros(u, np.int32),
        current=np.zeros(u, np.int16),
        current_level=np.zeros(u, np.float32),
        switch_ts=np.zeros(u, np.int64),
        sequence=np.zeros(u, np.int32),
        history_item=np.zeros((u, c.history), np.int32),
        history_ts=np.zeros((u, c.history), np.int64),
        history_kind=np.zeros((u, c.history), np.int8),
        history_n=np.zeros(u, np.int64),
        list_item=np.zeros((u, c.candidates), np.int32),
        list_n=np.zeros(u, np.int32),
        list_ts=np.zeros(u, np.int64),
        shown=np.full((u, SHOWN), -1, np.int32),
        shown_n=np.zeros(u, np.int64),
        pending=np.zeros((u, CLICKS), np.int32),
        pending_n=np.zeros(u, np.int32),
    )
