"""What users, retrieval and the ad server do: random numbers, interests, user events, lists, and the truth of a click.

In numba. `k` is the `State`, `me` the record of one user; times are int64 ms.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from topics.simulator.config import HOUR_MS
from topics.simulator.jit import inner
from topics.simulator.world import DIM, FAVOURITES, SHOWN

SEARCH, VIEW, CLICK = 1, 2, 3
"""values of `history_kind`"""
TOUCHED = 5
"""newest items of the history that are always candidates"""
TOUCH_MS = 1_800_000
"""an item touched so recently is wanted more"""

_GOLD = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@inner
def rand(me: Any) -> float:
    """Uniform in [0, 1) of user u's splitmix64."""
    me.rng = me.rng + _GOLD
    z = me.rng
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    z = z ^ (z >> _S31)
    return float(np.int64(z >> _S11)) * (1.0 / 9007199254740992.0)


@inner
def randint(me: Any, n: int) -> int:
    return int(rand(me) * n)


@inner
def exponential(me: Any, mean: float) -> float:
    return -mean * np.log(1.0 - rand(me))


@inner
def normal(me: Any) -> float:
    r = np.sqrt(-2.0 * np.log(1.0 - rand(me)))
    return r * np.cos(2.0 * np.pi * rand(me))


@inner
def noise(me: Any) -> float:
    """About normal, of variance 1, and cheap: the sum of four uniforms."""
    return (rand(me) + rand(me) + rand(me) + rand(me) - 2.0) * 1.7320508075688772


@inner
def trend_of(k: Any, me: Any, ts: int) -> int:
    return k.trend[me.demographic, (ts - k.p.trend_begin + k.trend_phase[me.demographic]) // k.p.trend_ms]


@inner
def advance_interest(k: Any, me: Any, ts: int) -> None:
    """Redraws the current interest when its time is over. The gap may hold many switches: exponential times have no
    memory, so the last of them is enough."""
    if me.switch_ts > ts:
        return
    if rand(me) < k.p.trend_share:
        me.current = trend_of(k, me, ts)
    elif rand(me) < 0.7:
        me.current = me.favourites[randint(me, FAVOURITES)]
    else:
        me.current = randint(me, k.p.n_sub)
    me.current_level = me.level + k.p.intent_price_sd * normal(me)
    me.switch_ts = ts + 1 + int(exponential(me, k.p.switch_ms))


@inner
def item_of(k: Any, me: Any, sub: int) -> int:
    """A random live item of a sub-topic."""
    return k.slot_item[sub + k.p.n_sub * randint(me, k.p.items_per_sub)]


@inner
def popular(k: Any, me: Any) -> int:
    """The best quality of four live items."""
    best = k.slot_item[randint(me, len(k.slot_item))]
    for _ in range(3):
        i = k.slot_item[randint(me, len(k.slot_item))]
        if k.items[i].quality > k.items[best].quality:
            best = i
    return best


@inner
def history_at(k: Any, me: Any, back: int) -> int:
    """Ring index of the entry `back` steps before the newest."""
    i = me.history_n % k.history.shape[1] - 1 - back
    return i if i >= 0 else i + k.history.shape[1]


@inner
def push_history(k: Any, me: Any, item: int, ts: int, kind: int) -> None:
    i = me.history_n % k.history.shape[1]
    k.history[me.index, i].item = item
    k.history[me.index, i].ts = ts
    k.history[me.index, i].kind = kind
    me.history_n += 1


@inner
def touch(k: Any, me: Any, ts: int) -> None:
    """A search or view, about the current interest with probability `reveal`."""
    kind = SEARCH if rand(me) < 0.3 else VIEW
    held = min(me.history_n, k.history.shape[1])
    if held > 0 and rand(me) < 0.12:
        back = randint(me, min(held, 3))
        item = k.history[me.index, history_at(k, me, back)].item
        if k.items[item].dies > ts and k.items[item].sub == me.current:
            push_history(k, me, item, ts, VIEW)
            return
    if rand(me) < k.p.reveal:
        item = item_of(k, me, me.current)
        for _ in range(2):
            other = item_of(k, me, me.current)
            better = k.items[other].quality - k.items[item].quality
            level = me.current_level
            better += abs(k.items[item].price_level - level) - abs(k.items[other].price_level - level)
            if better > 0.0:
                item = other
    elif rand(me) < 0.5:
        item = item_of(k, me, me.favourites[randint(me, FAVOURITES)])
    else:
        item = popular(k, me)
    push_history(k, me, item, ts, kind)


@inner
def retrieve(k: Any, me: Any, interest_known: float) -> int:
    """One item as a retrieval stage would find it: the current interest where the request says it, sub-topics and
    topics of recent events, long-term taste, popularity. It does not see the truth but for `interest_known`."""
    if rand(me) < interest_known:
        return item_of(k, me, me.current)
    r = rand(me)
    held = min(me.history_n, k.history.shape[1])
    if r < 0.50 and held > 0:
        back = 0
        while back < held - 1 and rand(me) < 0.6:
            back += 1
        sub = k.items[k.history[me.index, history_at(k, me, back)].item].sub
        if r < 0.13:
            sub = k.topic[sub] * k.p.subtopics + randint(me, k.p.subtopics)
        return item_of(k, me, sub)
    if r < 0.70:
        return item_of(k, me, me.favourites[randint(me, FAVOURITES)])
    return popular(k, me)


@inner
def take(k: Any, ids: Any, n: int, item: int) -> int:
    """Appends `item` unless the list under way holds it; returns the new length."""
    if k.stamp[item] == k.stamp_now[0]:
        return n
    k.stamp[item] = k.stamp_now[0]
    ids[n] = item
    return n + 1


@inner
def relevance(k: Any, me: Any, item: int) -> float:
    """Long-term affinity of user and item, about N(0, 1)."""
    a = 0.0
    for d in range(DIM):
        a += me.taste[d] * k.items[item].vector[d]
    return a


@inner
def keep_probability(share: float, gap: int) -> float:
    return share * np.exp(-gap / (8.0 * HOUR_MS))


@inner
def fill_touched(k: Any, me: Any, ts: int, n: int, most: int) -> int:
    """Adds the items touched lately to `k.ids`."""
    for back in range(min(me.history_n, k.history.shape[1], most)):
        item = k.history[me.index, history_at(k, me, back)].item
        if k.items[item].dies > ts and n < k.p.candidates:
            n = take(k, k.ids, n, item)
    return n


@inner
def fill_candidates(k: Any, me: Any, ts: int, whole: bool) -> int:
    """Fills `k.ids` and `k.scores` with what may be ranked in the next hours: items touched lately and, if `whole`,
    what is kept of the last list, then fresh ones. Returns how many."""
    ids, scores = k.ids, k.scores
    k.stamp_now[0] += 1
    n = fill_touched(k, me, ts, 0, TOUCHED if whole else k.p.touched)
    if whole:
        keep = keep_probability(k.p.carry, ts - me.list_ts)
        for i in range(me.list_n):
            item = k.listed[me.index, i]
            if n < k.p.candidates and k.items[item].dies > ts and rand(me) < keep:
                n = take(k, ids, n, item)
        for _ in range(4 * k.p.candidates):
            if n == k.p.candidates:
                break
            n = take(k, ids, n, retrieve(k, me, 0.0))
        for i in range(n):
            k.listed[me.index, i] = ids[i]
        me.list_n = n
        me.list_ts = ts
    newest = k.items[k.history[me.index, history_at(k, me, 0)].item].sub if me.history_n > 0 else -1
    second = k.items[k.history[me.index, history_at(k, me, 1)].item].sub if me.history_n > 1 else -1
    for i in range(n):
        item = ids[i]
        x = 0.3 * relevance(k, me, item) + 0.4 * k.items[item].quality + 0.6 * noise(me)
        x += 0.8 * (k.items[item].sub == newest) + 0.5 * (k.items[item].sub == second)
        scores[i] = 1.0 / (1.0 + np.exp(1.5 - x))
    return n


@inner
def fill_ads(k: Any, me: Any, ts: int, ids: Any) -> int:
    """Ads of a request: some touched lately, a share of the last candidates, the rest found now."""
    k.stamp_now[0] += 1
    n = 0
    held = min(me.history_n, k.history.shape[1])
    for back in range(min(held, 3)):
        item = k.history[me.index, history_at(k, me, back)].item
        if k.items[item].dies > ts and n < k.p.ads and rand(me) < 0.5:
            n = take(k, ids, n, item)
    listed = me.list_n
    if listed > 0:
        quota = int(keep_probability(k.p.repeat, ts - me.list_ts) * k.p.ads + rand(me))
        quota = min(quota + n, k.p.ads)
        first = randint(me, listed)
        for i in range(listed):
            if n >= quota:
                break
            item = k.listed[me.index, (first + i) % listed]
            if k.items[item].dies > ts:
                n = take(k, ids, n, item)
    for _ in range(4 * k.p.ads):
        if n == k.p.ads:
            break
        n = take(k, ids, n, retrieve(k, me, 0.1))
    return n


@inner
def order_ads(k: Any, me: Any, n: int) -> None:
    """Puts `k.ids[:n]` into the order shown: best first by what the production ranker, a noisy one, makes of them."""
    ids, scores = k.ids, k.scores
    for i in range(n):
        item = ids[i]
        x = 0.4 * k.items[item].quality + 0.4 * relevance(k, me, item) + 0.8 * noise(me)
        j = i
        while j > 0 and scores[j - 1] < x:
            scores[j] = scores[j - 1]
            ids[j] = ids[j - 1]
            j -= 1
        scores[j] = x
        ids[j] = item


@inner
def count_shown(k: Any, me: Any, step: int) -> None:
    """Adds `step` to `k.times_shown` of each of the user's newest impressions: +1 before its use, -1 after."""
    for i in range(min(me.shown_n, SHOWN)):
        k.times_shown[me.shown[i]] += step


@inner
def mark_lately(k: Any, me: Any, ts: int, value: int) -> None:
    """Sets `k.lately` of the items touched in the last half hour: 1 before its use, 0 after."""
    for back in range(min(me.history_n, k.history.shape[1])):
        h = history_at(k, me, back)
        if ts - k.history[me.index, h].ts > TOUCH_MS:
            break
        k.lately[k.history[me.index, h].item] = value


@inner
def click_logit(k: Any, me: Any, item: int, position: int, price: float, trend: int) -> float:
    """The truth. Non-linear: the match with the current interest multiplies with long-term affinity.

    `k.times_shown` and `k.lately` hold what the user's newest impressions and touches say of the item."""
    affinity = relevance(k, me, item)
    sub, current = k.items[item].sub, me.current
    z = k.p.base + k.p.w_quality * k.items[item].quality + k.p.w_affinity * affinity
    if sub == current:
        z += k.p.w_match + k.p.w_product * np.tanh(affinity)
    elif k.topic[sub] == k.topic[current]:
        z += k.p.w_topic
    if sub == trend:
        z += k.p.w_trend
    z -= k.p.w_price * abs(price - me.current_level)
    z += k.p.w_touch * k.lately[item]
    z -= k.p.w_fatigue * k.log1p[k.times_shown[item]]
    z -= k.p.w_position * k.log1p[position]
    if me.device == 1:
        z -= 0.2
    return z
