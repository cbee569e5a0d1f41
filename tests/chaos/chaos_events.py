"""The events of a chaos run: what is done, to whom, and how long to wait for it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from chaos_fleet import Fleet

from streams.failpoints import POINTS
from topics.brokers import JavaKafka

ROLES = ("verifier", "embedder", "ranker")
SESSION_S = 6.0
FROZEN_S = 12.0
FROZEN_PAST_THE_LOCK_S = 26.0
"""long enough for the successor to give up waiting for the frozen process's store"""
POINT_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Event:
    what: str
    where: str
    detail: str = ""


@dataclass(slots=True)
class Actions:
    """Does one event and returns when its fault is over (not when the roles have recovered)."""

    fleet: Fleet
    broker: JavaKafka
    rng: random.Random
    say: Callable[[str], None]
    unreachable_s: float
    broker_kills: int = 0

    def do(self, e: Event) -> None:
        getattr(self, f"_{e.what}")(e)

    @property
    def kills(self) -> int:
        return self.fleet.kills + self.broker_kills

    def _kill(self, e: Event) -> None:
        self.fleet.kill(e.where)

    def _kill_lose(self, e: Event) -> None:
        """kill -9, and the disk with the stores is gone."""
        self.fleet.kill(e.where, held=True)
        if e.where != "verifier":
            self.fleet.lose_state(e.where)
        self.fleet.release(e.where)

    def _kill_broker(self, e: Event) -> None:
        self.broker.kill()
        self.broker_kills += 1
        time.sleep(self.rng.uniform(0.0, 3.0))
        self.broker.start(300)

    def _kill_all(self, e: Event) -> None:
        self.broker.kill()
        self.broker_kills += 1
        for name in list(self.fleet.members):
            self.fleet.kill(name, held=True)
        self.broker.start(300)
        for name in list(self.fleet.members):
            self.fleet.release(name)

    def _point(self, e: Event) -> None:
        """The process is replaced by one that dies at a named point; a second one joins where only that leads there."""
        name, point = e.where, e.detail.partition(":")[0]
        self.fleet.arm(name, {"SOLARIS_FAILPOINT": e.detail}, gently=self.rng.random() < 0.5)
        armed = self.fleet.deaths(name)
        joined = False
        deadline = time.monotonic() + POINT_WAIT_S
        while self.fleet.deaths(name) == armed:
            if point == "in_revoke" and not joined and time.monotonic() > deadline - POINT_WAIT_S + 6.0:
                self.fleet.add(f"{name}-b", name)
                joined = True
            if time.monotonic() > deadline:
                self.say(f"{name} did not come to {e.detail}; killed where it was")
                self.fleet.kill(name)
                break
            time.sleep(0.05)
        if joined:
            time.sleep(2.0)
            self.fleet.leave(f"{name}-b")

    def _zombie(self, e: Event) -> None:
        """Frozen for longer than its session while a second process takes over, then woken."""
        other = f"{e.where}-b"
        self.fleet.add(other, e.where)
        time.sleep(6.0 + self.rng.uniform(0.0, 2.0))
        frozen = self.fleet.roles.processes.get(e.where)
        self.fleet.signal(e.where, signal.SIGSTOP)
        time.sleep(float(e.detail or FROZEN_S))
        if frozen is not None and frozen.poll() is None:
            frozen.send_signal(signal.SIGCONT)
        time.sleep(4.0)
        self.fleet.leave(other)

    def _freeze_alone(self, e: Event) -> None:
        """Frozen for longer than its session with nobody to take over."""
        self.fleet.signal(e.where, signal.SIGSTOP)
        time.sleep(SESSION_S + 3.0)
        self.fleet.signal(e.where, signal.SIGCONT)

    def _swap(self, e: Event) -> None:
        """A second process joins, the first leaves, a new first joins, the second leaves; all in mid-stream."""
        other = f"{e.where}-b"
        self.fleet.add(other, e.where)
        time.sleep(5.0)
        self.fleet.leave(e.where)
        time.sleep(1.0)
        self.fleet.add(e.where, e.where)
        time.sleep(5.0)
        self.fleet.leave(other)

    def _broker_restart(self, e: Event) -> None:
        self.broker.restart(300)

    def _broker_frozen(self, e: Event) -> None:
        """Unreachable: connections stand, nothing answers."""
        pid = self.broker.pid
        assert pid is not None
        process = psutil.Process(pid)
        process.suspend()
        time.sleep(self.unreachable_s)
        process.resume()

    def _broker_full(self, e: Event) -> None:
        """Its disk takes no more: files may not grow, which ends it. Then there is room again."""
        pid = self.broker.pid
        assert pid is not None
        psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (4_096, 4_096))
        until = time.monotonic() + 15.0
        while self.broker.running and time.monotonic() < until:
            time.sleep(0.1)
        self.say("the broker ended over its full disk" if not self.broker.running else "the broker bears a full disk")
        self.broker.kill()
        self.broker.start(300)

    def _broker_slow(self, e: Event) -> None:
        """Runs a third of the time for ten seconds."""
        pid = self.broker.pid
        assert pid is not None
        process = psutil.Process(pid)
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            process.suspend()
            time.sleep(0.2)
            process.resume()
            time.sleep(0.1)


def points_of(role: str) -> list[str]:
    """Points that a role comes to. The verifier has no store."""
    without = ("after_apply", "in_write", "in_restore") if role == "verifier" else ()
    return [p for p in POINTS if p not in without]


def quick(rng: random.Random) -> list[Event]:
    """At least ten kills, every kind of fault that fits, inside three minutes of replay."""
    point_role, other_role = rng.sample(("embedder", "ranker"), 2)
    inner = rng.choice(["after_produce", "before_commit", "after_commit", "in_write"])
    events = [
        *(Event("kill", role) for role in ROLES),
        Event("kill_broker", "broker"),
        _point(rng, point_role, inner),
        _point(rng, other_role, rng.choice(["in_restore", "in_assign", "in_revoke"])),
        Event("kill_lose", "ranker"),
        Event("zombie", rng.choice(["embedder", "ranker"])),
        Event("kill_all", "all"),
    ]
    rng.shuffle(events)
    return events


def long(rng: random.Random, kills: int) -> list[Event]:
    """Every point of every role, every kind of fault, then kills at random up to `kills`."""
    events = [_point(rng, role, point) for role in ROLES for point in points_of(role)]
    for role in ROLES:
        frozen = [
            Event("zombie", role),
            Event("zombie", role, str(FROZEN_PAST_THE_LOCK_S)),
            Event("freeze_alone", role),
        ]
        events += [*frozen, Event("swap", role), Event("kill", role)]
    events += [Event("kill_lose", "embedder"), Event("kill_lose", "ranker")]
    events += [Event("kill_broker", "broker")] * 3 + [Event("kill_all", "all")] * 2
    events += [Event("broker_restart", "broker"), Event("broker_frozen", "broker"), Event("broker_slow", "broker")]
    events += [Event("broker_full", "broker")]
    sure = sum({"kill_all": 4, "point": 1, "kill": 1, "kill_lose": 1, "kill_broker": 1}.get(e.what, 0) for e in events)
    events += [Event("kill", rng.choice(ROLES)) for _ in range(max(0, kills - sure))]
    rng.shuffle(events)
    return events


def _point(rng: random.Random, role: str, point: str) -> Event:
    times = 1 if point in ("in_assign", "in_revoke") else rng.randint(1, 3)
    return Event("point", role, f"{point}:{times}")
