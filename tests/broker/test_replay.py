"""Replay on a real Kafka: exact counts, exactly once through kill -9 and fencing, pacing, moved times."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from topics import admin
from topics.errors import BrokerError, ContractError
from topics.events import Candidates, Event, Feedback, Impression, Item, decode_event, encode
from topics.kafka import KafkaSettings, consumer
from topics.readers import BadLines, EventLog
from topics.replay import Replay, replay
from topics.replay_records import TOPIC_OF, TOPICS
from topics.replay_session import Hung, Saved, Session

pytestmark = pytest.mark.broker

DATA = Path(os.environ.get("SOLARIS_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
T0 = 1_700_000_000_000


def make_log(path: Path, users: int = 40, requests: int = 400, step_ms: int = 1_000) -> list[Event]:
    rng = random.Random(3)
    events: list[Event] = [Item(f"n{i}", 0, {"category": f"c{i % 5}"}) for i in range(50)]
    for i in range(requests):
        ts = T0 + i * step_ms
        user = f"u{rng.randrange(users)}"
        ads: list[str | int] = [f"n{rng.randrange(50)}" for _ in range(8)]
        features = {"history": ["n1", "n2"], "history_ts": [-1, ts - 5]}
        events.append(Candidates(f"c{i}", user, ts, ads, features=dict(features)))  # type: ignore[arg-type]
        events.append(Impression(f"i{i}", user, ts + 1, ads, features=dict(features)))  # type: ignore[arg-type]
        events.append(Feedback(f"i{i}", user, ts + 2, ads[:1]))
    path.write_bytes(b"".join(encode(e) + b"\n" for e in events))
    return events


def read_back(kafka: KafkaSettings) -> dict[tuple[str, int], list[tuple[bytes, bytes]]]:
    """(topic without prefix, partition) -> (key, value) of every committed record, in order."""
    reader = consumer(kafka, kafka.prefix + "check", enable_partition_eof=True)
    try:
        wanted = [
            tp
            for name, meta in reader.list_topics(timeout=300).topics.items()
            if name.startswith(kafka.prefix)
            for tp in _from_start(name, len(meta.partitions))
        ]
        reader.assign(wanted)
        out: dict[tuple[str, int], list[tuple[bytes, bytes]]] = defaultdict(list)
        ended: set[tuple[str, int]] = set()
        deadline = time.monotonic() + 240
        while len(ended) < len(wanted):
            assert time.monotonic() < deadline, f"{len(wanted) - len(ended)} partitions without an end"
            for message in reader.consume(1_000, 0.2):
                where = message.topic().removeprefix(kafka.prefix), message.partition()
                if message.error():
                    ended.add(where)
                else:
                    ended.discard(where)
                    out[where].append((message.key(), message.value()))
        return out
    finally:
        reader.close()


def _from_start(name: str, partitions: int):  # type: ignore[no-untyped-def]
    from confluent_kafka import OFFSET_BEGINNING, TopicPartition

    return [TopicPartition(name, p, OFFSET_BEGINNING) for p in range(partitions)]


def assert_exactly_once(kafka: KafkaSettings, values: list[bytes]) -> None:
    """Every value once, in its topic, under its key, and in the log's order within a partition."""
    want: dict[str, list[bytes]] = defaultdict(list)
    for value in values:
        want[TOPIC_OF[type(decode_event(value))]].append(value)
    got: dict[str, list[bytes]] = defaultdict(list)
    partition_of: dict[tuple[bytes, bool], int] = {}
    place = {value: n for n, value in enumerate(values)}
    for (topic, partition), rows in read_back(kafka).items():
        got[topic] += [value for _, value in rows]
        places = [place[value] for _, value in rows]
        assert places == sorted(places), f"{topic} {partition} is out of order"
        for key, value in rows:
            event = decode_event(value)
            assert key.decode() == (str(event.id) if isinstance(event, Item) else event.user)
            assert partition_of.setdefault((key, topic == "items"), partition) == partition
    assert {t: Counter(v) for t, v in got.items()} == {t: Counter(v) for t, v in want.items()}


@pytest.fixture
def bus(kafka: KafkaSettings) -> KafkaSettings:
    admin.create(kafka, TOPICS)
    return kafka


def test_a_log_arrives_whole_byte_for_byte_and_counted(bus: KafkaSettings, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    events = make_log(path)
    state = replay(EventLog(path), bus)
    assert state.complete
    assert state.events == state.acknowledged == len(events)
    assert state.by_topic == {"items": 50, "candidates": 400, "impressions": 400, "feedback": 400}
    assert state.pairs == 400 * 16
    assert_exactly_once(bus, path.read_bytes().splitlines())
    again = replay(EventLog(path), bus, resume=True)
    assert (again.events, again.complete, again.resumed_events) == (0, True, len(events))


def test_only_the_topics_asked_for(bus: KafkaSettings, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    make_log(path, requests=20)
    assert replay(EventLog(path), bus, topics=["impressions", "items"]).by_topic == {"items": 50, "impressions": 20}


def test_bad_lines_are_skipped_counted_and_strict_stops(bus: KafkaSettings, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    make_log(path, requests=5)
    good = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*good[:52], b"{broken", *good[52:]]))
    with pytest.raises(ContractError, match="line 53"):
        replay(EventLog(path, bad=BadLines(strict=True)), bus)
    assert sum(map(len, read_back(bus).values())) == 0  # the open transaction was aborted
    log = EventLog(path)
    assert replay(log, bus, resume=True).complete
    assert [(b.line, b.reason) for b in log.bad.first] == [(53, "not_json")]
    assert_exactly_once(bus, good)


def test_stopped_and_resumed_with_derived_candidates(bus: KafkaSettings, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [e for e in make_log(path) if isinstance(e, Impression | Feedback)]
    path.write_bytes(b"".join(encode(e) + b"\n" for e in rows))
    want = [encode(e) for e in EventLog(path, "carry_over,touched,popular:5").events()]
    assert len(want) > 1_200
    runs = 0
    while True:
        stop = threading.Event()
        seen = 0

        def count(state, stop: threading.Event = stop) -> None:  # type: ignore[no-untyped-def]
            nonlocal seen
            seen = state.events
            if seen >= 100:
                stop.set()

        source = EventLog(path, "carry_over,touched,popular:5")
        run = Replay(source, bus, 400.0, resume=True, on_progress=count, stop=stop)
        state = run.run()
        assert state.events == state.acknowledged
        runs += 1
        if state.complete:
            break
    assert runs > 2
    assert_exactly_once(bus, want)


CHILD = """
import sys
from topics.kafka import KafkaSettings
from topics.readers import EventLog
from topics.replay import replay
path, bootstrap, prefix, speed = sys.argv[1:]
kafka = KafkaSettings(bootstrap=bootstrap, prefix=prefix)
def say(state): print(state.acknowledged, flush=True)
print("end", replay(EventLog(path), kafka, float(speed), resume=True, on_progress=say).complete, flush=True)
"""


def test_kill_9_and_resume_gives_every_event_exactly_once(bus: KafkaSettings, tmp_path: Path) -> None:
    if bus.properties:
        pytest.skip("the child process is given an address only")
    path = tmp_path / "log.jsonl"
    make_log(path, requests=3_000)
    rng = random.Random(11)
    kills = 0
    for _ in range(30):
        speed = "600" if kills < 5 else "1e6"
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), bus.bootstrap, bus.prefix, speed],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("end"):
                assert line.strip() == "end True"
                break
            if kills < 5 and int(line) > 100:
                time.sleep(rng.random() * 0.2)
                child.send_signal(signal.SIGKILL)
                break
        code = child.wait(300)
        child.stdout.close()
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
    assert kills == 5
    assert_exactly_once(bus, path.read_bytes().splitlines())


def test_a_zombie_is_fenced(bus: KafkaSettings, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    make_log(path)
    going = threading.Event()
    failed: list[BaseException] = []

    def old() -> None:
        try:
            replay(EventLog(path), bus, 20.0, on_progress=lambda s: going.set() if s.acknowledged else None)
        except BrokerError as e:
            failed.append(e)

    thread = threading.Thread(target=old)
    thread.start()
    assert going.wait(300)
    state = replay(EventLog(path), bus, resume=True)
    thread.join(300)
    assert state.complete
    assert state.resumed_events > 0
    assert "taken over" in str(failed[0])
    assert_exactly_once(bus, path.read_bytes().splitlines())


def test_times_move_to_now_and_stay_moved_on_resume(bus: KafkaSettings, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    make_log(path, requests=200)
    stop = threading.Event()
    now = int(time.time() * 1000)
    source = EventLog(path)
    first = Replay(
        source, bus, 1_000.0, shift_to_now=True, stop=stop,
        on_progress=lambda s: stop.set() if s.acknowledged > 60 else None,
    ).run()  # fmt: skip
    assert not first.complete
    second = replay(EventLog(path), bus, resume=True)
    assert second.complete
    assert second.shift_ms == first.shift_ms
    assert abs(first.shift_ms - (now - T0)) < 20_000
    shifts = set()
    for (topic, _), rows in read_back(bus).items():
        for _, value in rows:
            event = decode_event(value)
            if topic == "items":
                assert event.ts == 0
            elif isinstance(event, Impression | Candidates):
                times = event.features["history_ts"]
                assert isinstance(times, list)
                assert times[0] == -1
                extra = 1 if isinstance(event, Impression) else 0
                assert times[1] == event.ts - extra - 5
                shifts.add(event.ts - T0 - extra - int(event.id[1:]) * 1_000)
    assert shifts == {first.shift_ms}


def test_paced_replay_keeps_event_time_and_shows_events_as_they_are_due(bus: KafkaSettings, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    make_log(path, requests=20)  # 19 s of event time
    at: list[tuple[float, int]] = []
    started = time.monotonic()
    state = replay(EventLog(path), bus, 10.0, on_progress=lambda s: at.append((time.monotonic(), s.acknowledged)))
    took = time.monotonic() - started
    assert state.complete
    assert took >= 1.9
    assert len({n for _, n in at}) > 2, "as they are due, not all at once"
    # However slow the machine is, nothing comes before its time: 50 items at once, then three events each 0.1 s.
    assert all(n <= 50 + 3 * (2 + (t - started) * 10) for t, n in at)


@pytest.mark.skipif(not (DATA / "mind_20191114").is_dir(), reason="the MIND day is not here; see docs/data.md")
def test_the_mind_day_arrives_whole(bus: KafkaSettings) -> None:
    source = EventLog(DATA / "mind_20191114")
    state = replay(source, bus)
    assert state.complete
    assert state.by_topic == {"impressions": 4_532, "candidates": 9_064, "feedback": 4_532}
    assert_exactly_once(bus, [encode(e) for e in EventLog(DATA / "mind_20191114").events()])


@pytest.mark.parametrize("committed", [False, True], ids=["before the commit", "after the commit"])
def test_a_producer_that_hangs_is_replaced_and_nothing_is_sent_twice(
    bus: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    path = tmp_path / "log.jsonl"
    make_log(path, requests=300)
    first = replay(EventLog(path), bus)  # the broker holds the position of an earlier run: not to be taken for ours
    assert first.complete
    commit, calls = Session.commit, 0

    def fails(self: Session, saved: Saved, meanwhile: Callable[[], bool]) -> None:
        nonlocal calls
        calls += 1
        if calls % 4 == 0 or saved.done:
            if committed:
                commit(self, saved, meanwhile)
            if calls < 40:
                self.hung = True
                raise Hung("no answer")
            if committed:
                return
        commit(self, saved, meanwhile)

    monkeypatch.setattr(Session, "commit", fails)
    monkeypatch.setattr("topics.replay.MAX_SESSIONS", 100)
    state = Replay(EventLog(path), bus, 150.0).run()  # 2 s, some 40 transactions
    assert state.complete
    assert state.retried > 2
    assert state.acknowledged == 50 + 3 * 300
    got = Counter(value for rows in read_back(bus).values() for _, value in rows)
    assert set(got.values()) == {2}  # once by each of the two replays
    assert sorted(got) == sorted(path.read_bytes().splitlines())


def test_producers_are_not_replaced_for_ever(
    bus: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    make_log(path, requests=20)

    def hangs(self: Session, saved: Saved, meanwhile: Callable[[], bool]) -> None:
        self.hung = True
        raise Hung("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Session, "commit", hangs)
        patched.setattr("topics.replay.MAX_SESSIONS", 3)
        with pytest.raises(BrokerError, match="no answer; --resume goes on there"):
            replay(EventLog(path), bus)
    assert replay(EventLog(path), bus, resume=True).complete
    assert_exactly_once(bus, path.read_bytes().splitlines())
