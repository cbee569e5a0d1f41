"""One step of a user at a time: a user event (search or view), a request, or what follows a click.

Users do not influence each other, so each is run to the end of the window in turn, with random numbers of its own; the
writer puts the records of all users in order afterwards.
"""

from __future__ import annotations

from typing import Any

from topics.simulator.behaviour import CLICK, advance_interest, exponential, push_history, rand, touch
from topics.simulator.config import HOUR_MS
from topics.simulator.emit import emit_candidates, emit_impression
from topics.simulator.jit import inner, outer

START, STEP, AFTER_EVENT, AFTER_CLICK = 0, 1, 2, 3
"""phases of a user"""


@inner
def next_session(k: Any, me: Any, ts: int) -> int:
    """Start of the user's next session: a Poisson process thinned by the hour of the day."""
    t = float(ts)
    for _ in range(1_000):
        t += exponential(me, k.p.session_gap_ms / me.activity)
        if rand(me) < k.hour_activity[int(t) // HOUR_MS % 24]:
            break
    return int(t)


@inner
def act(k: Any, me: Any) -> None:
    """One step of user `u` at its `next_ts`, and when the next one is."""
    ts = me.next_ts
    advance_interest(k, me, ts)
    phase = me.phase
    if phase == START:
        n = 1
        while n < 1_000 and rand(me) >= k.p.stop:
            n += 1
        me.steps_left = n
    if phase == AFTER_CLICK or rand(me) < k.p.event_share:
        if phase == AFTER_CLICK:
            for i in range(me.pending_n):
                push_history(k, me, me.pending[i], ts, CLICK)
            me.pending_n = 0
            me.phase = STEP
        else:
            me.steps_left -= 1
            touch(k, me, ts)
            me.phase = AFTER_EVENT
        emit_candidates(k, me, ts)
    else:
        me.steps_left -= 1
        feedback_ts = emit_impression(k, me, ts)
        if me.pending_n > 0:
            me.phase = AFTER_CLICK
            me.next_ts = feedback_ts
            return
        me.phase = STEP
    if me.steps_left <= 0:
        me.phase = START
        me.next_ts = next_session(k, me, ts + 30_000)
    else:
        mean = k.p.serve_delay_ms if me.phase == AFTER_EVENT and rand(me) < 0.5 else k.p.step_gap_ms
        me.next_ts = ts + 500 + int(exponential(me, mean))


@outer
def run_users(k: Any, first: int, until: int, record_bytes: int) -> int:
    """Runs users first.. up to `until`. Returns the user it stopped at for want of room, else the number of users."""
    for u in range(first, len(k.users)):
        me = k.users[u]
        while me.next_ts < until:
            full = k.n[0] + 2 > len(k.records) or k.n[1] + 2 * record_bytes > len(k.data)
            if full or k.n[2] + k.p.ads > len(k.truth):
                return u
            act(k, me)
    return len(k.users)


@outer
def gather(records: Any, data: Any, order: Any, target: Any) -> int:
    """Copies the bytes of the records of `order` end to end into `target`; returns how many."""
    o = 0
    for r in order:
        a = records[r].offset
        n = records[r].length
        for i in range(n):  # a slice would compile to the same copy, and bring in numpy's shape errors: 2 s more
            target[o + i] = data[a + i]
        o += n
    return o
