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
PRICE_SCALE = 40.0
PRICE_SD = 0.6
"""price = PRICE_SCALE x exp(PRICE_SD x price level)"""
FORMATS = ("image", "video", "text", "carousel")
DEVICES = ("mobile", "desktop", "tablet")

Array = npt.NDArray[Any]


ITEM = np.dtype(
    [
        ("dies", np.int64),  # ms
        ("quality", np.float32),
        ("price_level", np.float32),  # standardised log price
        ("vector", np.float32, (DIM,)),
        ("sub", np.int32),  # sub-topic; the topic is sub // subtopics
    ],
    align=True,
)
USER = np.dtype(
    [
        ("rng", np.uint64),  # splitmix64 state: every user draws from its own stream
        ("next_ts", np.int64),
        ("switch_ts", np.int64),
        ("list_ts", np.int64),
        ("history_n", np.int64),  # entries ever; the ring holds the newest
        ("shown_n", np.int64),
        ("activity", np.float64),
        ("taste", np.float32, (DIM,)),
        ("level", np.float32),  # price level of the user
        ("current_level", np.float32),  # and of the current interest
        ("index", np.int32),
        ("current", np.int32),  # sub-topic of current interest
        ("demographic", np.int32),
        ("device", np.int32),
        ("phase", np.int32),
        ("steps_left", np.int32),
        ("sequence", np.int32),
        ("list_n", np.int32),
        ("pending_n", np.int32),
        ("favourites", np.int32, (FAVOURITES,)),
        ("pending", np.int32, (CLICKS,)),  # clicked items that enter the history at the feedback
        ("shown", np.int32, (SHOWN,)),  # ring
    ],
    align=True,
)
HISTORY = np.dtype([("ts", np.int64), ("item", np.int32), ("kind", np.int32)], align=True)


class World(NamedTuple):
    """What does not change while users act."""

    items: Array
    """ITEM[M], by birth"""
    born: Array
    """int64[M] ms, on the grid, ascending"""
    slot: Array
    """int32[M] slot of each item; slot % (number of sub-topics) is its sub-topic"""
    slots: int
    advertiser: Array
    """int32[M]"""
    format: Array
    """int8[M]"""
    trend: Array
    """int16[demographics, periods]"""
    trend_phase: Array
    """int64[demographics] ms"""
    hour_activity: Array
    """float64[24], at most 1"""


def build(c: SimulatorConfig) -> tuple[World, Array]:
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
    sub = (s % n_sub).astype(np.int32)
    adv_quality = rng.normal(0.0, 0.8, c.advertisers)
    adv_topic = rng.integers(0, c.topics, (c.advertisers,))
    advertiser = _advertisers(rng, adv_topic, sub // c.subtopics)
    hours = np.arange(24)
    hour_activity = 0.12 + 0.88 * np.clip(np.sin((hours - 6.5) / 17.5 * np.pi), 0.0, None) ** 0.7
    hour_activity[:6] = 0.12
    periods = int((c.end_ms - begin) // c.trend_ms) + 3
    items = np.zeros(m, ITEM)
    items["dies"], items["sub"] = d, sub
    items["vector"] = sub_vec[sub] + 0.15 * rng.normal(size=(m, DIM))
    items["quality"] = adv_quality[advertiser] + rng.normal(0.0, 0.6, m)
    items["price_level"] = rng.normal(size=m)
    return World(
        items=items,
        born=b,
        slot=s,
        slots=live,
        advertiser=advertiser.astype(np.int32),
        format=rng.integers(0, len(FORMATS), m).astype(np.int8),
        trend=rng.integers(0, n_sub, (c.demographics, periods)).astype(np.int16),
        trend_phase=rng.integers(0, c.trend_ms, c.demographics).astype(np.int64),
        hour_activity=hour_activity / hour_activity.max(),
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


def _best(score: Array, n: int) -> Array:
    """Columns of the `n` highest scores of each row, best first; all columns where there are fewer."""
    if n < score.shape[1]:
        some = np.argpartition(-score, n, axis=1)[:, :n]
    else:
        some = np.broadcast_to(np.arange(score.shape[1]), score.shape)
    order = np.argsort(-np.take_along_axis(score, some, axis=1), axis=1)
    return np.take_along_axis(some, order, axis=1)


def _users(c: SimulatorConfig, rng: np.random.Generator, begin: int, centre: Array, sub_vec: Array) -> Array:
    n_users = c.users
    users = np.zeros(n_users, USER)
    users["index"] = np.arange(n_users)
    users["demographic"] = rng.integers(0, c.demographics, n_users)
    step = 50_000  # users at a time: the scores of all sub-topics need not fit in memory together
    for i in range(0, n_users, step):
        part = users[i : i + step]
        taste = centre[part["demographic"]] + 0.8 * rng.normal(size=(len(part), DIM))
        part["taste"] = taste / 1.28
        score = taste @ sub_vec.T + 0.5 * rng.normal(size=(len(part), len(sub_vec)))
        best = _best(score, FAVOURITES)
        part["favourites"] = best[:, np.arange(FAVOURITES) % best.shape[1]]
    users["device"] = rng.choice(len(DEVICES), n_users, p=[0.65, 0.28, 0.07])
    users["level"] = rng.normal(0.0, 0.7, n_users)
    users["activity"] = np.exp(rng.normal(-0.125, 0.5, n_users))
    users["rng"] = rng.integers(0, 2**63, n_users, dtype=np.int64)
    users["next_ts"] = begin + rng.exponential(24 * HOUR_MS / c.sessions_per_day, n_users).astype(np.int64)
    users["shown"] = -1
    return users
