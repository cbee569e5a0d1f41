"""What users, retrieval and the ad server do, one action at a time, in numba.

An action is one step of one user: a user event (search or view), a request, or what follows a click. Users do not
influence each other, so each is run to the end of the window in turn, with random numbers of its own; the writer puts
the records of all users in order afterwards. Times are int64 ms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from topics.simulator.config import HOUR_MS, SimulatorConfig
from topics.simulator.jit import inner, outer
from topics.simulator.render import put, put_event_id, put_id, put_ids, put_int, put_numbers, text
from topics.simulator.world import CLICKS, FAVOURITES, SHOWN

START, STEP, AFTER_EVENT, AFTER_CLICK = 0, 1, 2, 3
SEARCH, VIEW, CLICK = 1, 2, 3
"""values of `history_kind`"""
KIND_CANDIDATES, KIND_IMPRESSION, KIND_FEEDBACK = 0, 1, 2
TOUCH_MS = 1_800_000
"""an item touched so recently is wanted more"""
PRICE_SCALE = 40.0
PRICE_SD = 0.6
TODAY_SD = 0.15
"""price of an ad today = catalogue price x exp(normal x this), with `ad_prices`"""

_A, _C, _R, _U = ord("a"), ord("c"), ord("r"), ord("u")


class Params(NamedTuple):
    """The numbers of the config that the kernels read."""

    n_sub: int
    subtopics: int
    emit_from: int
    end: int
    trend_begin: int
    trend_ms: int
    session_gap_ms: float
    stop: float
    event_share: float
    step_gap_ms: float
    serve_delay_ms: float
    switch_ms: float
    trend_share: float
    reveal: float
    intent_price_sd: float
    candidates: int
    candidates_share: float
    carry: float
    ads: int
    repeat: float
    ad_prices: bool
    base: float
    w_quality: float
    w_affinity: float
    w_match: float
    w_topic: float
    w_product: float
    w_price: float
    w_touch: float
    w_trend: float
    w_fatigue: float
    w_position: float
    late_share: float
    late_ms: float
    disorder_ms: float


class Out(NamedTuple):
    """Records rendered and not yet written. `n` = [records, bytes, truth values]."""

    data: Any
    key: Any
    """int64: place in the log; equals ts unless late or disordered"""
    ts: Any
    offset: Any
    length: Any
    kind: Any
    user: Any
    sequence: Any
    pairs: Any
    """candidates or ads of the record; for feedback, clicks"""
    truth: Any
    """float32 click probabilities of impressions, end to end"""
    truth_offset: Any
    n: Any


def params(c: SimulatorConfig, trend_begin: int, mean_activity: float) -> Params:
    return Params(
        n_sub=c.topics * c.subtopics, subtopics=c.subtopics, emit_from=c.start_ms, end=c.end_ms,
        trend_begin=trend_begin, trend_ms=c.trend_ms,
        session_gap_ms=24.0 * HOUR_MS * mean_activity / c.sessions_per_day, stop=1.0 / max(c.steps_per_session, 1.0),
        event_share=c.event_share, step_gap_ms=float(c.step_gap_ms), serve_delay_ms=float(c.serve_delay_ms),
        switch_ms=float(c.switch_ms), trend_share=c.trend_share, reveal=c.reveal, intent_price_sd=c.intent_price_sd,
        candidates=c.candidates, candidates_share=c.candidates_share, carry=c.carry, ads=c.ads, repeat=c.repeat,
        ad_prices=c.ad_prices, base=c.base_logit, w_quality=c.w_quality, w_affinity=c.w_affinity, w_match=c.w_match,
        w_topic=c.w_topic, w_product=c.w_product, w_price=c.w_price, w_touch=c.w_touch, w_trend=c.w_trend,
        w_fatigue=c.w_fatigue, w_position=c.w_position, late_share=c.late_share, late_ms=float(c.late_ms),
        disorder_ms=float(c.disorder_ms),
    )  # fmt: skip


_CANDIDATES = text('{"type":"candidates","id":')
_IMPRESSION = text('{"type":"impression","id":')
_FEEDBACK = text('{"type":"feedback","id":')
_USER = text(',"user":')
_TS = text(',"ts":')
_FEATURES = text(',"features":{"demographic":"d')
_DEVICE = text('","device":')
_HOUR = text(',"hour":')
_HISTORY = text(',"history":[')
_HISTORY_TS = text('],"history_ts":[')
_HISTORY_KIND = text('],"history_kind":[')
_END_FEATURES = text("]}")
_ITEMS = text(',"items":')
_SCORES = text(',"scores":')
_ADS = text(',"ads":')
_BIDS = text(',"bids":')
_PRICES = text(',"ad_features":{"price":')
_CLICKED = text(',"clicked":')
_CONVERTED = text(',"converted":')
_MOBILE, _DESKTOP, _TABLET = text('"mobile"'), text('"desktop"'), text('"tablet"')

_GOLD = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@inner
def rand(state: Any, u: int) -> float:
    """Uniform in [0, 1) of user u's splitmix64."""
    state[u] = state[u] + _GOLD
    z = state[u]
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    z = z ^ (z >> _S31)
    return float(z >> _S11) * (1.0 / 9007199254740992.0)


@inner
def randint(state: Any, u: int, n: int) -> int:
    return int(rand(state, u) * n)


@inner
def exponential(state: Any, u: int, mean: float) -> float:
    return -mean * np.log(1.0 - rand(state, u))


@inner
def normal(state: Any, u: int) -> float:
    r = np.sqrt(-2.0 * np.log(1.0 - rand(state, u)))
    return r * np.cos(2.0 * np.pi * rand(state, u))


@inner
def trend_of(w: Any, p: Any, demographic: int, ts: int) -> int:
    return w.trend[demographic, (ts - p.trend_begin + w.trend_phase[demographic]) // p.trend_ms]


@inner
def advance_interest(w: Any, s: Any, p: Any, u: int, ts: int) -> None:
    """Redraws the current interest when its time is over. The gap may hold many switches: exponential times have no
    memory, so the last of them is enough."""
    if s.switch_ts[u] > ts:
        return
    if rand(s.rng, u) < p.trend_share:
        s.current[u] = trend_of(w, p, s.demographic[u], ts)
    elif rand(s.rng, u) < 0.7:
        s.current[u] = s.favourites[u, randint(s.rng, u, FAVOURITES)]
    else:
        s.current[u] = randint(s.rng, u, p.n_sub)
    s.current_level[u] = s.level[u] + p.intent_price_sd * normal(s.rng, u)
    s.switch_ts[u] = ts + 1 + int(exponential(s.rng, u, p.switch_ms))


@inner
def item_of(w: Any, s: Any, p: Any, u: int, sub: int) -> int:
    """A random live item of a sub-topic."""
    per = len(w.slot_item) // p.n_sub
    return w.slot_item[sub + p.n_sub * randint(s.rng, u, per)]


@inner
def popular(w: Any, s: Any, u: int) -> int:
    """The best quality of four live items."""
    best = w.slot_item[randint(s.rng, u, len(w.slot_item))]
    for _ in range(3):
        i = w.slot_item[randint(s.rng, u, len(w.slot_item))]
        if w.quality[i] > w.quality[best]:
            best = i
    return best


@inner
def history_at(s: Any, u: int, back: int) -> int:
    """Ring index of the entry `back` steps before the newest."""
    return (s.history_n[u] - 1 - back) % s.history_item.shape[1]


@inner
def push_history(s: Any, u: int, item: int, ts: int, kind: int) -> None:
    i = s.history_n[u] % s.history_item.shape[1]
    s.history_item[u, i] = item
    s.history_ts[u, i] = ts
    s.history_kind[u, i] = kind
    s.history_n[u] += 1


@inner
def touch(w: Any, s: Any, p: Any, u: int, ts: int) -> None:
    """A search or view, about the current interest with probability `reveal`."""
    kind = SEARCH if rand(s.rng, u) < 0.3 else VIEW
    held = min(s.history_n[u], s.history_item.shape[1])
    if held > 0 and rand(s.rng, u) < 0.12:
        back = randint(s.rng, u, min(held, 3))
        item = s.history_item[u, history_at(s, u, back)]
        if w.dies[item] > ts and w.sub[item] == s.current[u]:
            push_history(s, u, item, ts, VIEW)
            return
    if rand(s.rng, u) < p.reveal:
        item = item_of(w, s, p, u, s.current[u])
        for _ in range(2):
            other = item_of(w, s, p, u, s.current[u])
            better = w.quality[other] - w.quality[item]
            level = s.current_level[u]
            better += abs(w.price_level[item] - level) - abs(w.price_level[other] - level)
            if better > 0.0:
                item = other
    elif rand(s.rng, u) < 0.5:
        item = item_of(w, s, p, u, s.favourites[u, randint(s.rng, u, FAVOURITES)])
    else:
        item = popular(w, s, u)
    push_history(s, u, item, ts, kind)


@inner
def retrieve(w: Any, s: Any, p: Any, u: int, interest_known: float) -> int:
    """One item as a retrieval stage would find it: the current interest where the request says it, sub-topics and
    topics of recent events, long-term taste, popularity. It does not see the truth but for `interest_known`."""
    if rand(s.rng, u) < interest_known:
        return item_of(w, s, p, u, s.current[u])
    r = rand(s.rng, u)
    held = min(s.history_n[u], s.history_item.shape[1])
    if r < 0.50 and held > 0:
        back = min(int(exponential(s.rng, u, 2.0)), held - 1)
        sub = w.sub[s.history_item[u, history_at(s, u, back)]]
        if r < 0.13:
            topic = sub // p.subtopics
            sub = topic * p.subtopics + randint(s.rng, u, p.subtopics)
        return item_of(w, s, p, u, sub)
    if r < 0.70:
        return item_of(w, s, p, u, s.favourites[u, randint(s.rng, u, FAVOURITES)])
    return popular(w, s, u)


@inner
def take(w: Any, ids: Any, n: int, item: int) -> int:
    """Appends `item` unless the list under way holds it; returns the new length."""
    if w.stamp[item] == w.stamp_now[0]:
        return n
    w.stamp[item] = w.stamp_now[0]
    ids[n] = item
    return n + 1


@inner
def relevance(w: Any, s: Any, u: int, item: int) -> float:
    """Long-term affinity of user and item, about N(0, 1)."""
    a = 0.0
    for k in range(s.taste.shape[1]):
        a += s.taste[u, k] * w.vector[item, k]
    return a


@inner
def keep_probability(p: Any, share: float, gap: int) -> float:
    return share * np.exp(-gap / (8.0 * HOUR_MS))


@inner
def fill_candidates(w: Any, s: Any, p: Any, u: int, ts: int, ids: Any, scores: Any) -> int:
    """Retrieval for the next hours: items touched lately, then what is kept of the last list, then fresh ones."""
    w.stamp_now[0] += 1
    n = 0
    held = min(s.history_n[u], s.history_item.shape[1])
    for back in range(min(held, 5)):
        item = s.history_item[u, history_at(s, u, back)]
        if w.dies[item] > ts and n < p.candidates:
            n = take(w, ids, n, item)
    keep = keep_probability(p, p.carry, ts - s.list_ts[u])
    for i in range(s.list_n[u]):
        item = s.list_item[u, i]
        if n < p.candidates and w.dies[item] > ts and rand(s.rng, u) < keep:
            n = take(w, ids, n, item)
    for _ in range(4 * p.candidates):
        if n == p.candidates:
            break
        n = take(w, ids, n, retrieve(w, s, p, u, 0.0))
    for i in range(n):
        x = 0.3 * relevance(w, s, u, ids[i]) + 0.4 * w.quality[ids[i]] + 0.6 * normal(s.rng, u)
        for back in range(min(held, 3)):
            if w.sub[ids[i]] == w.sub[s.history_item[u, history_at(s, u, back)]]:
                x += 0.6
        scores[i] = 1.0 / (1.0 + np.exp(1.5 - x))
    for i in range(n):
        s.list_item[u, i] = ids[i]
    s.list_n[u] = n
    s.list_ts[u] = ts
    return n


@inner
def fill_ads(w: Any, s: Any, p: Any, u: int, ts: int, ids: Any) -> int:
    """Ads of a request: some touched lately, a share of the last candidates, the rest found now."""
    w.stamp_now[0] += 1
    n = 0
    held = min(s.history_n[u], s.history_item.shape[1])
    for back in range(min(held, 3)):
        item = s.history_item[u, history_at(s, u, back)]
        if w.dies[item] > ts and n < p.ads and rand(s.rng, u) < 0.5:
            n = take(w, ids, n, item)
    listed = s.list_n[u]
    if listed > 0:
        quota = int(keep_probability(p, p.repeat, ts - s.list_ts[u]) * p.ads + rand(s.rng, u))
        quota = min(quota + n, p.ads)
        first = randint(s.rng, u, listed)
        for i in range(listed):
            if n >= quota:
                break
            item = s.list_item[u, (first + i) % listed]
            if w.dies[item] > ts:
                n = take(w, ids, n, item)
    for _ in range(4 * p.ads):
        if n == p.ads:
            break
        n = take(w, ids, n, retrieve(w, s, p, u, 0.1))
    return n


@inner
def times_shown(s: Any, u: int, item: int) -> int:
    n = 0
    for i in range(min(s.shown_n[u], SHOWN)):
        if s.shown[u, i] == item:
            n += 1
    return n


@inner
def click_logit(w: Any, s: Any, p: Any, u: int, ts: int, item: int, position: int, price: float) -> float:
    """The truth. Non-linear: the match with the current interest multiplies with long-term affinity."""
    affinity = relevance(w, s, u, item)
    sub, current = w.sub[item], s.current[u]
    z = p.base + p.w_quality * w.quality[item] + p.w_affinity * affinity
    if sub == current:
        z += p.w_match + p.w_product * np.tanh(affinity)
    elif sub // p.subtopics == current // p.subtopics:
        z += p.w_topic
    if sub == trend_of(w, p, s.demographic[u], ts):
        z += p.w_trend
    z -= p.w_price * abs(price - s.current_level[u])
    held = min(s.history_n[u], s.history_item.shape[1])
    for back in range(held):
        h = history_at(s, u, back)
        if ts - s.history_ts[u, h] > TOUCH_MS:
            break
        if s.history_item[u, h] == item:
            z += p.w_touch
            break
    z -= p.w_fatigue * np.log1p(times_shown(s, u, item))
    z -= p.w_position * np.log1p(position)
    if s.device[u] == 1:
        z -= 0.2
    return z


@inner
def place(s: Any, p: Any, u: int, ts: int) -> int:
    """Where a record of time `ts` stands in the log."""
    key = ts
    if p.disorder_ms > 0.0:
        key += int(rand(s.rng, u) * p.disorder_ms)
    if p.late_share > 0.0 and rand(s.rng, u) < p.late_share:
        key += int(rand(s.rng, u) * p.late_ms)
    return key


@inner
def begin_record(s: Any, p: Any, out: Any, u: int, ts: int, kind: int, pairs: int) -> int:
    """Fills a record's columns; returns the position of its first byte."""
    r = out.n[0]
    out.key[r] = place(s, p, u, ts)
    out.ts[r] = ts
    out.kind[r] = kind
    out.user[r] = u
    out.sequence[r] = s.sequence[u]
    out.pairs[r] = pairs
    out.offset[r] = out.n[1]
    out.truth_offset[r] = out.n[2]
    return out.n[1]


@inner
def end_record(out: Any, o: int) -> None:
    out.data[o] = 10
    r = out.n[0]
    out.length[r] = o + 1 - out.offset[r]
    out.n[0] = r + 1
    out.n[1] = o + 1


@inner
def put_head(s: Any, buf: Any, o: int, letter: int, u: int, ts: int) -> int:
    o = put_event_id(buf, o, letter, u, s.sequence[u])
    o = put(buf, o, _USER)
    o = put_id(buf, o, _U, u)
    o = put(buf, o, _TS)
    return put_int(buf, o, ts)


@inner
def put_features(s: Any, buf: Any, o: int, u: int, ts: int) -> int:
    o = put(buf, o, _FEATURES)
    o = put_int(buf, o, s.demographic[u])
    o = put(buf, o, _DEVICE)
    if s.device[u] == 0:
        o = put(buf, o, _MOBILE)
    elif s.device[u] == 1:
        o = put(buf, o, _DESKTOP)
    else:
        o = put(buf, o, _TABLET)
    o = put(buf, o, _HOUR)
    o = put_int(buf, o, ts // HOUR_MS % 24)
    held = min(s.history_n[u], s.history_item.shape[1])
    o = put(buf, o, _HISTORY)
    for i in range(held):
        if i:
            buf[o] = 44
            o += 1
        o = put_id(buf, o, _A, s.history_item[u, history_at(s, u, held - 1 - i)])
    o = put(buf, o, _HISTORY_TS)
    for i in range(held):
        if i:
            buf[o] = 44
            o += 1
        o = put_int(buf, o, s.history_ts[u, history_at(s, u, held - 1 - i)])
    o = put(buf, o, _HISTORY_KIND)
    for i in range(held):
        if i:
            buf[o] = 44
            o += 1
        o = put_int(buf, o, s.history_kind[u, history_at(s, u, held - 1 - i)])
    return put(buf, o, _END_FEATURES)


@inner
def emit_candidates(w: Any, s: Any, p: Any, out: Any, u: int, ts: int, ids: Any, scores: Any) -> None:
    s.sequence[u] += 1
    n = fill_candidates(w, s, p, u, ts, ids, scores)
    if ts < p.emit_from:
        return
    o = begin_record(s, p, out, u, ts, KIND_CANDIDATES, n)
    o = put(out.data, o, _CANDIDATES)
    o = put_head(s, out.data, o, _C, u, ts)
    o = put_features(s, out.data, o, u, ts)
    o = put(out.data, o, _ITEMS)
    o = put_ids(out.data, o, _A, ids, n)
    o = put(out.data, o, _SCORES)
    o = put_numbers(out.data, o, scores, n, 3)
    out.data[o] = 125
    end_record(out, o + 1)


@inner
def emit_impression(w: Any, s: Any, p: Any, out: Any, u: int, ts: int, ids: Any, order: Any) -> int:
    """A request, its clicks and its feedback; returns the time of the feedback."""
    s.sequence[u] += 1
    n = fill_ads(w, s, p, u, ts, order)
    noisy = np.empty(n)
    for i in range(n):
        x = 0.4 * w.quality[order[i]] + 0.4 * relevance(w, s, u, order[i])
        noisy[i] = -(x + 0.8 * normal(s.rng, u))
    rank = np.argsort(noisy)
    price = np.empty(n)
    bid = np.empty(n)
    prob = np.empty(n)
    clicked = np.empty(n, np.int32)
    converted = np.empty(n, np.int32)
    n_clicked = 0
    n_converted = 0
    s.pending_n[u] = 0
    for i in range(n):
        item = order[rank[i]]
        ids[i] = item
        level = w.price_level[item]
        if p.ad_prices:
            level += TODAY_SD / PRICE_SD * normal(s.rng, u)
        price[i] = PRICE_SCALE * np.exp(PRICE_SD * level)
        bid[i] = 0.05 + 0.6 * np.exp(0.4 * w.price_level[item] + 0.35 * normal(s.rng, u))
        prob[i] = 1.0 / (1.0 + np.exp(-click_logit(w, s, p, u, ts, item, i, level)))
        if rand(s.rng, u) < prob[i]:
            clicked[n_clicked] = item
            n_clicked += 1
            if s.pending_n[u] < CLICKS:
                s.pending[u, s.pending_n[u]] = item
                s.pending_n[u] += 1
            match = 0.8 if w.sub[item] == s.current[u] else 0.0
            if rand(s.rng, u) < 1.0 / (1.0 + np.exp(2.8 - match + 0.8 * abs(level - s.current_level[u]))):
                converted[n_converted] = item
                n_converted += 1
    for i in range(n):
        s.shown[u, s.shown_n[u] % SHOWN] = ids[i]
        s.shown_n[u] += 1
    feedback_ts = ts + 1_000 + int(exponential(s.rng, u, min(p.step_gap_ms * 0.2, 8_000.0)))
    if ts < p.emit_from:
        return feedback_ts
    o = begin_record(s, p, out, u, ts, KIND_IMPRESSION, n)
    o = put(out.data, o, _IMPRESSION)
    o = put_head(s, out.data, o, _R, u, ts)
    o = put_features(s, out.data, o, u, ts)
    o = put(out.data, o, _ADS)
    o = put_ids(out.data, o, _A, ids, n)
    o = put(out.data, o, _BIDS)
    o = put_numbers(out.data, o, bid, n, 2)
    if p.ad_prices:
        o = put(out.data, o, _PRICES)
        o = put_numbers(out.data, o, price, n, 2)
        out.data[o] = 125
        o += 1
    for i in range(n):
        out.truth[out.n[2] + i] = prob[i]
    out.n[2] += n
    out.data[o] = 125
    end_record(out, o + 1)

    o = begin_record(s, p, out, u, feedback_ts, KIND_FEEDBACK, n_clicked)
    o = put(out.data, o, _FEEDBACK)
    o = put_head(s, out.data, o, _R, u, feedback_ts)
    o = put(out.data, o, _CLICKED)
    o = put_ids(out.data, o, _A, clicked, n_clicked)
    if n_converted:
        o = put(out.data, o, _CONVERTED)
        o = put_ids(out.data, o, _A, converted, n_converted)
    out.data[o] = 125
    end_record(out, o + 1)
    return feedback_ts


@inner
def next_session(w: Any, s: Any, p: Any, u: int, ts: int) -> int:
    """Start of the user's next session: a Poisson process thinned by the hour of the day."""
    t = float(ts)
    for _ in range(1_000):
        t += exponential(s.rng, u, p.session_gap_ms / s.activity[u])
        if rand(s.rng, u) < w.hour_activity[int(t) // HOUR_MS % 24]:
            break
    return int(t)


@inner
def act(w: Any, s: Any, p: Any, out: Any, u: int, ids: Any, order: Any, scores: Any) -> None:
    """One step of user `u` at its `next_ts`, and when the next one is."""
    ts = s.next_ts[u]
    advance_interest(w, s, p, u, ts)
    phase = s.phase[u]
    if phase == START:
        n = 1
        while n < 1_000 and rand(s.rng, u) >= p.stop:
            n += 1
        s.steps_left[u] = n
    if phase == AFTER_CLICK:
        for i in range(s.pending_n[u]):
            push_history(s, u, s.pending[u, i], ts, CLICK)
        s.pending_n[u] = 0
        if rand(s.rng, u) < p.candidates_share:
            emit_candidates(w, s, p, out, u, ts, ids, scores)
        s.phase[u] = STEP
    else:
        s.steps_left[u] -= 1
        if rand(s.rng, u) < p.event_share:
            touch(w, s, p, u, ts)
            if rand(s.rng, u) < p.candidates_share:
                emit_candidates(w, s, p, out, u, ts, ids, scores)
            s.phase[u] = AFTER_EVENT
        else:
            feedback_ts = emit_impression(w, s, p, out, u, ts, ids, order)
            if s.pending_n[u] > 0:
                s.phase[u] = AFTER_CLICK
                s.next_ts[u] = feedback_ts
                return
            s.phase[u] = STEP
    if s.steps_left[u] <= 0:
        s.phase[u] = START
        s.next_ts[u] = next_session(w, s, p, u, ts + 30_000)
    else:
        mean = p.serve_delay_ms if s.phase[u] == AFTER_EVENT and rand(s.rng, u) < 0.5 else p.step_gap_ms
        s.next_ts[u] = ts + 500 + int(exponential(s.rng, u, mean))


@outer
def run_users(w: Any, s: Any, p: Any, out: Any, first: int, until: int, ids: Any, order: Any, scores: Any,
              record_bytes: int) -> int:  # fmt: skip
    """Runs users first.. up to `until`. Returns the user it stopped at for want of room, else the number of users."""
    for u in range(first, len(s.next_ts)):
        while s.next_ts[u] < until:
            full = out.n[0] + 2 > len(out.key) or out.n[1] + 2 * record_bytes > len(out.data)
            if full or out.n[2] + p.ads > len(out.truth):
                return u
            act(w, s, p, out, u, ids, order, scores)
    return len(s.next_ts)


@outer
def gather(out: Any, order: Any, target: Any) -> int:
    """Copies the records of `order` end to end into `target`; returns the bytes copied."""
    o = 0
    for r in order:
        a = out.offset[r]
        for i in range(out.length[r]):
            target[o + i] = out.data[a + i]
        o += out.length[r]
    return o
