"""Events as JSON lines, rendered in numba into the buffers of the `State`."""

from __future__ import annotations

from typing import Any

import numpy as np

from topics.simulator.behaviour import (
    _M1,
    click_logit,
    count_shown,
    exponential,
    fill_ads,
    fill_candidates,
    mark_lately,
    noise,
    normal,
    order_ads,
    rand,
    trend_of,
)
from topics.simulator.config import HOUR_MS
from topics.simulator.jit import inner
from topics.simulator.render import put, put_event_id, put_id, put_ids, put_int, put_numbers, text
from topics.simulator.world import CLICKS, PRICE_SCALE, PRICE_SD, SHOWN

KIND_CANDIDATES, KIND_IMPRESSION, KIND_FEEDBACK = 0, 1, 2
TODAY_SD = 0.15
"""price of an ad today = catalogue price x exp(normal x this), with `ad_prices`"""

_A, _C, _R, _U = ord("a"), ord("c"), ord("r"), ord("u")
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


@inner
def place(k: Any, me: Any, ts: int) -> int:
    """Where a record of time `ts` stands in the log. Drawn from a stream aside: the world is the same however late."""
    key = ts
    saved = me.rng
    me.rng = saved ^ _M1
    if k.p.disorder_ms > 0.0:
        key += int(rand(me) * k.p.disorder_ms)
    if k.p.late_share > 0.0 and rand(me) < k.p.late_share:
        key += int(rand(me) * k.p.late_ms)
    me.rng = saved
    return key


@inner
def begin_record(k: Any, me: Any, ts: int, kind: int, pairs: int) -> int:
    """Fills a record's columns; returns the position of its first byte."""
    r = k.n[0]
    k.records[r].key = place(k, me, ts)
    k.records[r].ts = ts
    k.records[r].kind = kind
    k.records[r].user = me.index
    k.records[r].sequence = me.sequence
    k.records[r].pairs = pairs
    k.records[r].offset = k.n[1]
    k.records[r].truth_offset = k.n[2]
    return k.n[1]


@inner
def end_record(k: Any, o: int) -> None:
    k.data[o] = 10
    r = k.n[0]
    k.records[r].length = o + 1 - k.records[r].offset
    k.n[0] = r + 1
    k.n[1] = o + 1


@inner
def put_head(k: Any, me: Any, o: int, letter: int, ts: int) -> int:
    o = put_event_id(k.data, o, letter, me.index, me.sequence)
    o = put(k.data, o, _USER)
    o = put_id(k.data, o, _U, me.index)
    o = put(k.data, o, _TS)
    return put_int(k.data, o, ts)


@inner
def wrapped(i: int, size: int) -> int:
    """i mod size for i < 2 size: a division costs more than the rest of an entry."""
    return i - size if i >= size else i


@inner
def put_features(k: Any, me: Any, o: int, ts: int) -> int:
    o = put(k.data, o, _FEATURES)
    o = put_int(k.data, o, me.demographic)
    o = put(k.data, o, _DEVICE)
    if me.device == 0:
        o = put(k.data, o, _MOBILE)
    elif me.device == 1:
        o = put(k.data, o, _DESKTOP)
    else:
        o = put(k.data, o, _TABLET)
    o = put(k.data, o, _HOUR)
    o = put_int(k.data, o, ts // HOUR_MS % 24)
    held = min(me.history_n, k.history.shape[1])
    size = k.history.shape[1]
    first = me.history_n % size if held == size else 0
    o = put(k.data, o, _HISTORY)
    for i in range(held):
        if i:
            k.data[o] = 44
            o += 1
        o = put_id(k.data, o, _A, k.history[me.index, wrapped(first + i, size)].item)
    o = put(k.data, o, _HISTORY_TS)
    for i in range(held):
        if i:
            k.data[o] = 44
            o += 1
        o = put_int(k.data, o, k.history[me.index, wrapped(first + i, size)].ts)
    o = put(k.data, o, _HISTORY_KIND)
    for i in range(held):
        if i:
            k.data[o] = 44
            o += 1
        o = put_int(k.data, o, k.history[me.index, wrapped(first + i, size)].kind)
    return put(k.data, o, _END_FEATURES)


@inner
def emit_candidates(k: Any, me: Any, ts: int) -> None:
    """What a user event or a click triggers: a whole retrieval, or the items touched lately only."""
    whole = rand(me) < k.p.candidates_share
    if not whole and k.p.touched == 0:
        return
    me.sequence += 1
    n = fill_candidates(k, me, ts, whole)
    if n == 0 or ts < k.p.emit_from:
        return
    o = begin_record(k, me, ts, KIND_CANDIDATES, n)
    o = put(k.data, o, _CANDIDATES)
    o = put_head(k, me, o, _C, ts)
    o = put_features(k, me, o, ts)
    o = put(k.data, o, _ITEMS)
    o = put_ids(k.data, o, _A, k.ids, n)
    o = put(k.data, o, _SCORES)
    o = put_numbers(k.data, o, k.scores, n, 3)
    k.data[o] = 125
    end_record(k, o + 1)


@inner
def emit_impression(k: Any, me: Any, ts: int) -> int:
    """A request, its clicks and its feedback; returns the time of the feedback."""
    me.sequence += 1
    n = fill_ads(k, me, ts, k.ids)
    order_ads(k, me, n)
    price = np.empty(n)
    bid = np.empty(n)
    prob = np.empty(n)
    clicked = np.empty(n, np.int32)
    converted = np.empty(n, np.int32)
    n_clicked = 0
    n_converted = 0
    me.pending_n = 0
    count_shown(k, me, 1)
    mark_lately(k, me, ts, 1)
    trend = trend_of(k, me, ts)
    for i in range(n):
        item = k.ids[i]
        level = k.items[item].price_level
        if k.p.ad_prices:
            level += TODAY_SD / PRICE_SD * normal(me)
            price[i] = PRICE_SCALE * np.exp(PRICE_SD * level)
        bid[i] = 0.05 + 0.6 * np.exp(0.4 * k.items[item].price_level + 0.35 * noise(me))
        prob[i] = 1.0 / (1.0 + np.exp(-click_logit(k, me, item, i, level, trend)))
        if rand(me) < prob[i]:
            clicked[n_clicked] = item
            n_clicked += 1
            if me.pending_n < CLICKS:
                me.pending[me.pending_n] = item
                me.pending_n += 1
            match = 0.8 if k.items[item].sub == me.current else 0.0
            if rand(me) < 1.0 / (1.0 + np.exp(2.8 - match + 0.8 * abs(level - me.current_level))):
                converted[n_converted] = item
                n_converted += 1
    count_shown(k, me, -1)
    mark_lately(k, me, ts, 0)
    for i in range(n):
        me.shown[me.shown_n % SHOWN] = k.ids[i]
        me.shown_n += 1
    feedback_ts = ts + 1_000 + int(exponential(me, min(k.p.step_gap_ms * 0.2, 8_000.0)))
    if ts < k.p.emit_from:
        return feedback_ts
    o = begin_record(k, me, ts, KIND_IMPRESSION, n)
    o = put(k.data, o, _IMPRESSION)
    o = put_head(k, me, o, _R, ts)
    o = put_features(k, me, o, ts)
    o = put(k.data, o, _ADS)
    o = put_ids(k.data, o, _A, k.ids, n)
    o = put(k.data, o, _BIDS)
    o = put_numbers(k.data, o, bid, n, 2)
    if k.p.ad_prices:
        o = put(k.data, o, _PRICES)
        o = put_numbers(k.data, o, price, n, 2)
        k.data[o] = 125
        o += 1
    for i in range(n):
        k.truth[k.n[2] + i] = prob[i]
    k.n[2] += n
    k.data[o] = 125
    end_record(k, o + 1)

    o = begin_record(k, me, feedback_ts, KIND_FEEDBACK, n_clicked)
    o = put(k.data, o, _FEEDBACK)
    o = put_head(k, me, o, _R, feedback_ts)
    o = put(k.data, o, _CLICKED)
    o = put_ids(k.data, o, _A, clicked, n_clicked)
    if n_converted:
        o = put(k.data, o, _CONVERTED)
        o = put_ids(k.data, o, _A, converted, n_converted)
    k.data[o] = 125
    end_record(k, o + 1)
    return feedback_ts
