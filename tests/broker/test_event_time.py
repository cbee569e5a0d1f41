"""Time on a real broker, one run of the roles through all of it: late, out-of-order, repeated and far-future events, an
absurd jump, idle partitions, a downtime longer than the TTL, and an old log replayed into a store that has seen a newer
one. What holds is docs/reliability.md's table of time; every case is counted."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
from pipeline import Roles

from streams.audit import audit, read_all
from streams.settings import load
from topics import admin
from topics.events import Candidates, Impression, RankedAds, decode_ranked_ads, encode
from topics.kafka import KafkaSettings, producer

pytestmark = pytest.mark.broker
BUNDLE = load(environment={}).model.bundle
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
TTL, WINDOW, GRACE = 2 * HOUR, 4 * HOUR, HOUR // 2
SETS = (
    f"store.ttl_ms={TTL}", f"store.window_ms={WINDOW}", f"store.grace_ms={GRACE}", "verifier.top_k=1000",
    "verifier.backlog_high_pairs=1000000000",
)  # fmt: skip
ITEMS: list[str | int] = [f"i{k}" for k in range(5)]


class World:
    """Sends events and reads answers back."""

    def __init__(self, kafka: KafkaSettings, roles: Roles) -> None:
        self.kafka, self.roles = kafka, roles
        self.t = (int(time.time() * 1000) // HOUR) * HOUR - 3 * DAY
        self._out = producer(kafka)
        self._offered = self._answers = 0

    def offer(self, *offers: tuple[str, int], saved: int = 0) -> None:
        """(user, event time from the start) each. Waits until a state of each is in the changelog, and the pairs of
        all but those `saved`."""
        for user, at in offers:
            self._offered += 2
            event = Candidates(f"c{self._offered}", user, self.t + at, list(ITEMS))
            self._out.produce(self.kafka.topic("candidates"), encode(event), user.encode())
        self._offered -= saved
        assert self._out.flush(120) == 0
        self.roles.wait_records("embeddings", self._offered)

    def followed(self) -> None:
        """Until the ranker has taken every record of the changelog: each is applied, expired or rejected once."""
        deadline = time.monotonic() + 240
        while sum(self.counted("ranker", f"chunks_{w}") for w in ("applied", "expired", "rejected")) < self._offered:
            assert time.monotonic() < deadline, self.roles.logs()
            time.sleep(0.5)

    def show(self, *shown: tuple[str, str, int], dead: int = 0) -> None:
        """(id, user, event time from the start) each. Waits for the answers of all but those `dead`."""
        for impression, user, at in shown:
            event = Impression(impression, user, self.t + at, list(ITEMS))
            self._out.produce(self.kafka.topic("impressions"), encode(event), user.encode())
        assert self._out.flush(120) == 0
        self._answers += len(shown) - dead
        self.roles.wait_ranked(self._answers)

    def answers(self) -> dict[str, list[RankedAds]]:
        found: dict[str, list[RankedAds]] = defaultdict(list)
        for r in read_all(self.kafka, "ranked-ads"):
            a = decode_ranked_ads(r.value or b"")
            found[a.id].append(a)
        return found

    def counted(self, role: str, name: str) -> int:
        """Over all processes of the role so far, each one's last word."""
        last: dict[int, int] = {}
        for r in read_all(self.kafka, "stats"):
            said = msgspec.json.decode(r.value or b"{}")
            if said["role"] == role:
                last[said["pid"]] = said["counters"].get(name, 0)
        return sum(last.values())


def same_partition(kafka: KafkaSettings) -> tuple[str, str, str]:
    """Two users of one partition, and one of another, among those offered."""
    of: dict[int, list[str]] = defaultdict(list)
    for r in read_all(kafka, "candidates"):
        of[r.partition].append((r.key or b"").decode())
    many = max(of.values(), key=len)
    other = next(users for users in of.values() if users is not many)
    return many[0], many[1], other[0]


def sources(answers: list[RankedAds]) -> set[str]:
    return {s for a in answers for s in a.sources}


def test_time_in_every_direction(kafka: KafkaSettings, tmp_path: Path) -> None:
    admin.create(kafka)
    with Roles(kafka, tmp_path / "roles", BUNDLE, SETS) as roles:
        roles.start_all()
        roles.wait_ready()
        world = World(kafka, roles)
        world.offer(*((f"u{k}", 0) for k in range(12)))
        a, b, c = same_partition(kafka)
        world.offer((a, 0), saved=1)
        world.followed()
        # A store's clock begins with some events that agree. From then on it moves by an hour at most at once.
        begin = [(f"begin{k}", b, k) for k in range(10)]
        world.show(
            *begin, ("before", a, -10 * MINUTE), ("direct", a, MINUTE), ("direct", a, MINUTE), ("future", a, 5 * DAY),
            ("jump", b, 20 * HOUR), ("after the jump", a, 2 * MINUTE),
            ("b1", b, HOUR), ("b2", b, 2 * HOUR), ("b3", b, 3 * HOUR), dead=1,
        )  # fmt: skip
        # The clock of c's partition stands meanwhile.
        world.show(("expired", a, TTL), ("stepped back", a, MINUTE), ("idle", c, MINUTE))
        assert roles.stop(["ranker"]) == {"ranker": 0}, roles.logs()
        world.offer((a, 4 * HOUR), (a, 8 * HOUR))
        roles.start("ranker")
        world.followed()
        world.show(("after the downtime", a, 8 * HOUR + MINUTE), ("missed", c, 8 * HOUR))
        world.show(*((f"on{k}", b, 8 * HOUR + k) for k in range(20)))
        world.offer((a, 2 * MINUTE), (a, 3 * MINUTE), saved=2)
        world.followed()
        world.show(("old log", a, 4 * MINUTE), ("newest", a, 8 * HOUR + 2 * MINUTE))
        assert set(roles.stop().values()) == {0}, roles.logs()
    found = world.answers()
    shown = len(read_all(kafka, "impressions"))
    assert (shown, len(read_all(kafka, "dlq")), sum(map(len, found.values()))) == (shown, 1, shown - 1)
    # Late, or before its data: served as of its own time, which knows nothing of what came later.
    assert sources(found["before"]) == {"none"}
    assert [(set(x.sources), set(x.ages_ms)) for x in found["direct"]] == [({"direct"}, {MINUTE})] * 2
    assert "future" not in found
    assert sources(found["jump"]).isdisjoint({"direct", "state"})
    assert sources(found["after the jump"]) == {"direct"}
    assert sources(found["expired"]).isdisjoint({"direct", "state"})
    assert sources(found["stepped back"]).isdisjoint({"direct", "state"})
    assert sources(found["idle"]) == {"direct"}
    assert [(set(x.sources), set(x.ages_ms)) for x in found["after the downtime"]] == [({"direct"}, {MINUTE})]
    assert sources(found["missed"]) == {"none"}
    assert sources(found["old log"]) == {"none"}
    assert [(set(x.sources), set(x.ages_ms)) for x in found["newest"]] == [({"direct"}, {2 * MINUTE})]
    assert audit(kafka, TTL).clean
    assert world.counted("embedder", "embedder_pairs_saved") >= len(ITEMS), "repeated candidates"
    assert world.counted("ranker", "rejected_far_future") == 1
    for name in ("events_late", "jumps_doubted", "chunks_expired", "segments_dropped"):
        assert world.counted("ranker", name) > 0, name
