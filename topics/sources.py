"""Candidate sources: what a retrieval stage would have announced, for logs that carry impressions only.

A *user event* (an impression, or a click) makes one `candidates` event, 1 ms later, from a mix of sources:

- ``carry_over``: the user's last list again;
- ``touched[:N]``: the N (20) items the user touched last: history and clicks, newest first;
- ``popular[:K]``: the K (50) items shown most in the past hour, to anybody.

written as ``"carry_over,touched,popular:50"``; the order is that of preference when `max_items` cuts the list. Items
come once. The list of an impression is known only from that impression on: 1 ms too late to be its own.

`features` are those of the user's last impression, with `history` as it is at that moment: for a click, the clicked
item last. `history_ts` goes with it where it is known of any entry (-1 for the others).

Memory is bounded: the `max_users` users seen last, `MAX_HISTORY` history entries each, and a sliding hour of at most
`max_popular` distinct items. What is left out is counted in `SourceCounts`. Same log and mix, same events.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from topics.errors import SettingsError
from topics.events import Candidates, Event, Features, Feedback, Impression, Scalar
from topics.ids import ItemId

DEFAULT_MIX = "carry_over,touched,popular:50"
DELAY_MS = 1
HOUR_MS = 3_600_000
MINUTE_MS = 60_000
MAX_HISTORY = 200
DEFAULT_SIZES = {"carry_over": 1_000, "touched": 20, "popular": 50}
_MAX_JUMP_MINUTES = 24 * 60
_REFRESH_MS = 10_000
"""the popular list is made anew at most this often, in event time"""


@dataclass(slots=True)
class SourceCounts:
    events: int = 0
    pairs: int = 0
    cut: int = 0
    """pairs beyond `max_items`"""
    users_evicted: int = 0
    popular_overflow: int = 0
    """shown items not counted since the hour already held `max_popular` distinct ones"""


@dataclass(frozen=True, slots=True)
class Mix:
    parts: tuple[tuple[str, int], ...]
    """(source, size) in order of preference"""

    @classmethod
    def parse(cls, text: str) -> Mix:
        """Raises `SettingsError`."""
        parts: list[tuple[str, int]] = []
        for word in text.split(","):
            name, colon, size = word.strip().partition(":")
            if name not in DEFAULT_SIZES:
                raise SettingsError("candidate_sources", text, f"{name!r} is none of {', '.join(DEFAULT_SIZES)}")
            if colon and (not size.isdigit() or int(size) < 1):
                raise SettingsError("candidate_sources", text, f"size {size!r}; expected a number from 1")
            if any(name == other for other, _ in parts):
                raise SettingsError("candidate_sources", text, f"{name} is there twice")
            parts.append((name, int(size) if colon else DEFAULT_SIZES[name]))
        return cls(tuple(parts))


@dataclass(slots=True)
class _User:
    ads: list[ItemId] = field(default_factory=list)
    features: Features = field(default_factory=dict)
    history: list[Scalar] = field(default_factory=list)
    history_ts: list[Scalar] | None = None
    clicks: list[tuple[ItemId, int]] = field(default_factory=list)
    """clicks since the last impression that brought a history"""


class CandidateSources:
    """`derive` turns a stream in event-time order into the same stream with candidates events merged in."""

    def __init__(
        self,
        mix: Mix | str = DEFAULT_MIX,
        max_items: int = 300,
        max_users: int = 200_000,
        max_popular: int = 500_000,
    ) -> None:
        self.mix = Mix.parse(mix) if isinstance(mix, str) else mix
        self.counts = SourceCounts()
        self._max_items = max_items
        self._max_users = max_users
        self._users: OrderedDict[str, _User] = OrderedDict()
        self._popular = Popular(max_popular)
        self._counts_popular = any(name == "popular" for name, _ in self.mix.parts)

    def derive(self, events: Iterable[Event]) -> Iterator[Event]:
        """A derived event comes before the first event of a later time; with input out of order it comes at once when
        the stream has passed its time."""
        due: list[tuple[int, int, Candidates]] = []
        seq = 0
        for event in events:
            while due and due[0][0] <= event.ts:
                yield heapq.heappop(due)[2]
            yield event
            made = self.observe(event)
            if made is not None:
                seq += 1
                heapq.heappush(due, (made.ts, seq, made))
        while due:
            yield heapq.heappop(due)[2]

    def observe(self, event: Event) -> Candidates | None:
        """Takes one event in; the candidates event it causes, if any."""
        if isinstance(event, Impression):
            if self._counts_popular:
                self._popular.add(event.ts, event.ads)
                self.counts.popular_overflow = self._popular.overflow
            user = self._user(event.user)
            _see_impression(user, event)
            return self._make(user, event.user, event.ts, f"{event.id}:shown:{event.ts}")
        if isinstance(event, Feedback) and event.clicked:
            user = self._user(event.user)
            for item in event.clicked:
                _touch(user, item, event.ts)
            return self._make(user, event.user, event.ts, f"{event.id}:clicked:{event.ts}")
        return None

    def _user(self, name: str) -> _User:
        users = self._users
        user = users.get(name)
        if user is None:
            user = users[name] = _User()
            if len(users) > self._max_users:
                users.popitem(last=False)
                self.counts.users_evicted += 1
        else:
            users.move_to_end(name)
        return user

    def _make(self, user: _User, name: str, ts: int, event_id: str) -> Candidates | None:
        wanted: dict[ItemId, None] = {}
        for source, size in self.mix.parts:
            if source == "carry_over":
                wanted.update(dict.fromkeys(user.ads[:size]))
            elif source == "touched":
                wanted.update(dict.fromkeys(_newest(user.history, size)))
            else:
                wanted.update(dict.fromkeys(self._popular.top(ts, size)))
        if not wanted:
            return None
        items = list(wanted)
        self.counts.cut += max(0, len(items) - self._max_items)
        del items[self._max_items :]
        features = dict(user.features)
        if user.history:
            features["history"] = list(user.history)
            if user.history_ts is not None:
                features["history_ts"] = list(user.history_ts)
        self.counts.events += 1
        self.counts.pairs += len(items)
        return Candidates(event_id, name, ts + DELAY_MS, items, features=features)


class Popular:
    """Items shown most in a sliding hour of event time, kept as one count table a minute."""

    def __init__(self, max_items: int, span_ms: int = HOUR_MS) -> None:
        self.overflow = 0
        self._max_items = max_items
        self._minutes = max(1, span_ms // MINUTE_MS)
        self._buckets: deque[tuple[int, dict[ItemId, int]]] = deque()
        self._totals: dict[ItemId, int] = {}
        self._top: dict[int, tuple[int, list[ItemId]]] = {}
        self._suspect = False

    def add(self, ts: int, ads: Iterable[ItemId]) -> None:
        minute = ts // MINUTE_MS
        buckets = self._buckets
        if not buckets:
            buckets.append((minute, {}))
        elif minute > buckets[-1][0]:
            # one wrong time must not empty the hour: a jump of over a day needs a second event that agrees
            jump = minute - buckets[-1][0] > _MAX_JUMP_MINUTES
            if not jump or self._suspect:
                self._expire(minute)
                buckets.append((minute, {}))
            self._suspect = jump and not self._suspect
        else:
            self._suspect = False
        # a late event counts in the newest minute: the hour never has holes to search
        counts, totals = buckets[-1][1], self._totals
        for item in ads:
            n = totals.get(item)
            if n is None:
                if len(totals) >= self._max_items:
                    self.overflow += 1
                    continue
                n = 0
            totals[item] = n + 1
            counts[item] = counts.get(item, 0) + 1

    def top(self, ts: int, k: int) -> list[ItemId]:
        """At most k ids, most shown first, ties by id."""
        made = self._top.get(k)
        if made is not None and -HOUR_MS < ts - made[0] < _REFRESH_MS:
            return made[1]
        if not self._suspect:
            self._expire(ts // MINUTE_MS)
        best = heapq.nsmallest(k, self._totals.items(), key=lambda pair: (-pair[1], str(pair[0])))
        items = [item for item, _ in best]
        if not self._suspect:
            self._top[k] = (ts, items)
        return items

    def _expire(self, minute: int) -> None:
        totals = self._totals
        while self._buckets and self._buckets[0][0] <= minute - self._minutes:
            for item, n in self._buckets.popleft()[1].items():
                left = totals[item] - n
                if left:
                    totals[item] = left
                else:
                    del totals[item]


def _see_impression(user: _User, event: Impression) -> None:
    features = {k: v for k, v in event.features.items() if k not in ("history", "history_ts", "history_kind")}
    user.ads, user.features = event.ads, features
    given = event.features.get("history")
    if not isinstance(given, list):
        return
    times = event.features.get("history_ts")
    history = given[-MAX_HISTORY:]
    history_ts = times[-MAX_HISTORY:] if isinstance(times, list) else None
    user.history, user.history_ts = list(history), None if history_ts is None else list(history_ts)
    # the log's own history may lag behind the clicks already seen
    pending, user.clicks = user.clicks, []
    known = set(given)
    for item, ts in pending:
        if item not in known:
            _touch(user, item, ts)


def _touch(user: _User, item: ItemId, ts: int) -> None:
    if user.history and user.history[-1] == item:
        # touched again: its time moves, the history does not repeat it
        if user.history_ts is not None:
            user.history_ts[-1] = ts
        return
    if user.history_ts is None:
        user.history_ts = [-1] * len(user.history)
    user.history.append(item)
    user.history_ts.append(ts)
    del user.history[:-MAX_HISTORY], user.history_ts[:-MAX_HISTORY]
    user.clicks.append((item, ts))
    del user.clicks[:-MAX_HISTORY]


def _newest(history: list[Scalar], n: int) -> list[ItemId]:
    """The n distinct items touched last, newest first."""
    seen: dict[ItemId, None] = {}
    for item in reversed(history):
        if type(item) is str or type(item) is int:
            seen[item] = None
            if len(seen) == n:
                break
    return list(seen)
