"""What the readers of foreign logs share: clicks that become feedback a little later, and histories that grow by them.

Public logs say what was clicked in an impression, seldom when. A feedback event is made for the impression's id, at the
impression's time plus a delay, and held back until the stream has reached that time, so that the order stays that of
event time. A history column that the log gives once per user is extended by the clicks the user made in the log so far.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from topics.events import MAX_HISTORY, Event, Features, Feedback, Impression, Scalar

CLICK_DELAY_MS = 30_000
"""from impression to click where the log does not say"""
MAX_CLICK_DELAY_MS = 600_000
MAX_USERS = 200_000
MAX_CLICKS = 200


class ClickStream:
    """Turns impressions in time order, each with its clicks, into impressions and feedback in event-time order.

    Memory: feedback of at most `MAX_CLICK_DELAY_MS` of stream time, and the newest `MAX_CLICKS` clicks of the
    `max_users` users seen last (`evicted` counts the users that went).
    """

    def __init__(self, max_users: int = MAX_USERS) -> None:
        self._due: list[tuple[int, int, Feedback]] = []
        self._seq = 0
        self._clicks: OrderedDict[str, list[tuple[int, str]]] = OrderedDict()
        self._max_users = max_users
        self.evicted = 0

    def add(self, impression: Impression, clicked: list[str] | None, delay_ms: int) -> Iterator[Event]:
        """`clicked` None: the log has no labels for this row, so there is no feedback. Call in order of time."""
        yield from self.until(impression.ts)
        seen = self._clicks.get(impression.user)
        if seen is not None:
            self._clicks.move_to_end(impression.user)
            extend_history(impression.features, seen)
        yield impression
        if clicked is not None:
            ts = impression.ts + min(max(delay_ms, 1), MAX_CLICK_DELAY_MS)
            feedback = Feedback(impression.id, impression.user, ts, list(clicked))
            self._seq += 1
            heapq.heappush(self._due, (ts, self._seq, feedback))

    def until(self, ts: int | None) -> Iterator[Event]:
        """Feedback due at or before `ts`; all that is left with None."""
        due = self._due
        while due and (ts is None or due[0][0] <= ts):
            feedback = heapq.heappop(due)[2]
            self._remember(feedback)
            yield feedback

    def _remember(self, feedback: Feedback) -> None:
        if not feedback.clicked:
            return
        clicks = self._clicks.setdefault(feedback.user, [])
        clicks.extend((feedback.ts, str(item)) for item in feedback.clicked)
        del clicks[:-MAX_CLICKS]
        self._clicks.move_to_end(feedback.user)
        if len(self._clicks) > self._max_users:
            self._clicks.popitem(last=False)
            self.evicted += 1


def extend_history(features: Features, clicks: Sequence[tuple[int, str]]) -> None:
    """Appends clicks that the history does not hold yet. What the log says stays first and untouched;
    `history_ts` is -1 where the time of an entry is not known."""
    given = features.get("history")
    history: list[Scalar] = given if isinstance(given, list) else []
    known = set(history)
    new = [(ts, item) for ts, item in clicks if item not in known]
    if not new:
        return
    times = features.get("history_ts")
    history_ts: list[Scalar] = times if isinstance(times, list) else [-1] * len(history)
    features["history"] = (history + [item for _, item in new])[-MAX_HISTORY:]
    features["history_ts"] = (history_ts + [ts for ts, _ in new])[-MAX_HISTORY:]
