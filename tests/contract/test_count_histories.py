"""Random histories, told to the serving counts and to the reference at once: the answers must be equal after every
step, whatever the order of the events, however often records come again, after restarts, kills and expiry."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from count_cases import HALF_HOUR, SETTINGS, T0, CountLog, Seen, assert_same, newest_bucket, question
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state.api import StoreSettings
from state.count_store import EXACT_MS, SILENT_MS, ItemCounts, PairCounts, parse_counts, store_settings
from state.counts import BUCKET_MS
from state.store import open_store

GRACE = HALF_HOUR
STORE = store_settings(
    StoreSettings(grace_ms=GRACE, segments_per_ttl=3, cache_bytes=1 << 20, lock_timeout_s=0), SETTINGS
)

# On a coarse grid, a bucket beside it, and one beside both, so that every limit is met from both sides.
times = st.builds(
    lambda h, b, d: T0 + h * HALF_HOUR + b * BUCKET_MS + d,
    st.integers(0, 56), st.sampled_from([0, 0, 1]), st.sampled_from([-1, 0, 1]),
)  # fmt: skip
nows = times.map(lambda t: t + SETTINGS.lag_ms)
users = st.integers(1, 3)
items = st.lists(st.integers(1, 6), max_size=5).map(tuple)
seen = st.builds(Seen, users, times, st.booleans(), items.filter(len))
questions = st.lists(st.tuples(users, items, nows), min_size=1, max_size=5)


@dataclass(frozen=True)
class Step:
    kind: str
    events: tuple[Seen, ...] = ()
    back: int = 0
    at: int = 0
    asked: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list)


steps = st.one_of(
    st.builds(lambda e: Step("write", events=tuple(e)), st.lists(seen, min_size=1, max_size=8)),
    st.builds(lambda e: Step("write", events=tuple(e)), st.lists(seen, min_size=1, max_size=8)),
    st.builds(lambda n: Step("again", back=n), st.integers(1, 9)),
    st.builds(lambda t: Step("expire", at=t), times),
    st.sampled_from([Step("restart"), Step("kill")]),
    st.builds(lambda q: Step("ask", asked=q), questions),
)


class Serving:
    """The counts of one partition in a process, fed from the log as the ranker's follower does."""

    def __init__(self, folder: Path, log: CountLog) -> None:
        self.folder, self.log, self.killed = folder, log, 0
        self._open()

    def _open(self) -> None:
        newest = -1

        def clock(ts: int) -> int:
            nonlocal newest
            newest = max(newest, ts)
            return newest

        self.items = ItemCounts(SETTINGS, clock, room=2)
        self.store = open_store(self.folder, STORE, parse_counts)
        self.counts = PairCounts(self.store, self.items, SETTINGS)
        self.items.restored = self.counts.restored = True
        self.follow()

    def follow(self, back: int = 0) -> None:
        """What is new, and the last `back` records of before."""
        position = self.store.position or 0
        new = [k for k, r in enumerate(self.log.chunks) if r.offset >= position]
        begin = max(0, (new[0] if new else len(self.log.chunks)) - back)
        self.store.apply(self.log.chunks[begin:])
        position = self.items.position.get(0, 0)
        new = [k for k, r in enumerate(self.log.deltas) if r.offset >= position]
        records = self.log.deltas[max(0, (new[0] if new else len(self.log.deltas)) - back) :]
        if records:
            self.items.apply(0, [r.offset for r in records], [r.value for r in records], records[-1].offset + 1)

    def restart(self, kill: bool) -> None:
        if kill:  # exactly the bytes that were handed to the operating system are there
            self.killed += 1
            copy = self.folder.with_name(f"{self.folder.name}-{self.killed}")
            shutil.copytree(self.folder, copy)
            self.store.close()
            self.folder = copy
        else:
            self.store.close()
        self._open()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=st.lists(steps, min_size=2, max_size=14), last=questions)
def test_serving_and_the_reference_count_alike(
    history: list[Step], last: list[tuple[int, tuple[int, ...], int]]
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        log, clock = CountLog(), -1
        serving = Serving(Path(scratch) / "store", log)
        for step in [*history, Step("ask", asked=last)]:
            if step.kind == "write":
                log.write(step.events)
                serving.follow()
            elif step.kind == "again":
                serving.follow(step.back)
            elif step.kind == "expire":
                clock = max(clock, step.at)
                serving.store.expire(clock)
            elif step.kind in ("restart", "kill"):
                serving.restart(step.kind == "kill")
            else:
                arguments = question(step.asked)
                got = serving.counts.lookup(*arguments)
                assert_same(got, log.reference.lookup(*arguments), arguments[1], step)
                newest, now = newest_bucket(log), arguments[3]
                asked = now - SETTINGS.lag_ms
                reach = (newest >= 0) & (asked <= newest + BUCKET_MS + SILENT_MS) & (asked >= newest - EXACT_MS)
                assert got.known.tolist() == (reach & (now >= clock - GRACE)).tolist()
                assert isinstance(got.known, np.ndarray)
        serving.store.close()
