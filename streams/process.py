"""One process of one role: bundle, loops, health page, stats; stops in order on SIGTERM or Ctrl-C."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from streams.heap import bound_heaps
from streams.instance import Instance
from streams.settings import Settings
from topics.errors import IdentityLost

if TYPE_CHECKING:
    from models.api import Runtime
    from streams.backlog import Backlog
    from streams.bundles import BundleWatch

log = logging.getLogger(__name__)

_LIVE_S = 60.0
_REJOIN_S = 60.0


def run_role(role: str, settings: Settings) -> None:
    """Runs until a signal. Returns after a clean stop; raises what made it impossible to go on."""
    bound_heaps()
    from topics.admin import require
    from topics.rights import topics_of

    stopping = threading.Event()
    _on_signals(stopping)
    instance = Instance(settings.store.dir, role, settings.loop.instance_id)
    try:
        require(settings.kafka, topics_of(role))
        _serve_on(lambda: _serve(role, settings, instance.name, stopping), role, stopping.is_set)
    finally:
        instance.release()


def _serve_on(serve: Callable[[], bool], role: str, stopping: Callable[[], bool]) -> None:
    """Serves until that ends for good.

    A lost identity is taken again from here as a successor would take it: a new producer of the same name ends what the
    former one left open, a new member of the same name takes its place in the group, and work goes on from what is
    committed, with stores opened anew. That name is this process's own while it lives (`Instance`). Where another host
    was given the same one they would take it from each other for ever: twice in a minute ends the process.
    """
    rejoined_s = float("-inf")
    while True:
        try:
            if not serve():
                return
            log.warning("%s: starting again with a bundle that reads other features or topics", role)
        except IdentityLost as e:
            if stopping():
                raise
            if time.monotonic() - rejoined_s < _REJOIN_S:
                log.error(
                    "%s: twice in %g s. Processes of one role with different store.dir on one host, and hosts of the "
                    "same name, need a loop.instance_id each", role, _REJOIN_S,
                )  # fmt: skip
                raise
            rejoined_s = time.monotonic()
            log.error("%s; joining anew", e)


def _serve(role: str, settings: Settings, instance: str, stopping: threading.Event) -> bool:
    """Runs the role's loops until `stopping`. True: start again, the bundle reads other features or topics."""
    from streams.health import HealthServer
    from streams.loop import Loop
    from streams.reporter import Reporter
    from topics.admin import require
    from topics.rights import topics_of

    steps, backlog = _steps(role, settings)
    if any({"counts", "item-counts"} & {*s.follows, *s.broadcasts} for s in steps):
        require(settings.kafka, topics_of(role, counts=True))
    watch = _watch(settings, [s for s in steps if hasattr(s, "runtime")])
    if role == "counter":
        # What it writes adds up: a batch written twice would be counted twice.
        settings = replace(settings, loop=replace(settings.loop, guarantee="exactly_once"))
    loops = [Loop(step, settings, instance) for step in steps]
    device = steps[0].runtime.device if watch is not None else "cpu"
    failures: list[BaseException] = []
    started_ms = int(time.time() * 1000)
    ended = threading.Event()
    threads = [threading.Thread(target=_run_loop, args=(loop, failures, ended), name=loop.step.role) for loop in loops]

    def status() -> dict[str, Any]:
        now = time.monotonic()
        counters: dict[str, int] = {}
        if watch is not None:
            counters |= {"bundles_accepted": watch.accepted, "bundles_refused": watch.refused}
            counters |= {"bundles_failed": watch.failed}
        counters["stats_dropped"] = reporter.dropped
        for loop in loops:
            prefix = "" if len(loops) == 1 else f"{loop.step.role.replace('-', '_')}_"
            counters.update({prefix + k: v for k, v in loop.totals().items()})
        return {
            "role": role,
            "instance": instance,
            "pid": os.getpid(),
            "started_ms": started_ms,  # counters begin at zero with every start, also in the same process
            "live": all(now - loop.heartbeat < _LIVE_S for loop in loops),
            "ready": all(loop.ready for loop in loops),
            "stopping": stopping.is_set(),  # what is not heard of afterwards was meant to end
            "device": device,
            "vm": watch.info.vm if watch is not None else "",
            "fm": watch.info.fm if watch is not None else "",
            "partitions": {loop.step.role: loop.partitions for loop in loops},
            "counters": counters,
        }

    _calm_collector()
    server = None
    reporter = Reporter(settings.kafka, role, status)
    if settings.http.port:
        server = HealthServer(settings.http.host, settings.http.port, status)
        server.start()
        log.info("%s: http://%s:%d/status, also /live, /ready and /metrics", role, settings.http.host, server.port)
    reporter.start()
    if backlog is not None:
        backlog.start()
    if watch is not None:
        watch.start()
    bundle = settings.model.bundle if watch is not None else "none"
    log.info("%s: instance %s on %s, bundle %s", role, instance, device, bundle)
    for t in threads:
        t.start()
    hung = 0
    try:
        while any(t.is_alive() for t in threads):
            if stopping.wait(0.2) or ended.is_set() or (watch is not None and watch.restart_wanted.is_set()):
                for loop in loops:
                    loop.stop()
                for t in threads:
                    t.join(settings.loop.shutdown_deadline_s + 5.0)
                break
            # Seen for a second: a process that was frozen in a call and woken gets its answer at once.
            hung = hung + 1 if any(loop.hung for loop in loops) else 0
            if hung >= 5:
                log.critical("%s: the Kafka client does not come back from a call; leaving, nothing is committed", role)
                os._exit(3)
    finally:
        if watch is not None:
            watch.stop()
        reporter.stop()
        if backlog is not None:
            backlog.stop()
        if server is not None:
            server.stop()
    if any(t.is_alive() for t in threads):
        why = f" after {failures[0]}" if failures else ""
        log.error("%s: not stopped inside the deadline%s; leaving, nothing unfinished was committed", role, why)
        os._exit(1)
    if failures:
        raise failures[0]
    return watch is not None and watch.restart_wanted.is_set() and not stopping.is_set()


def _steps(role: str, settings: Settings) -> tuple[list[Any], Backlog | None]:
    """The role's steps, each for a loop of its own; a step with a model has a runtime of its own."""
    if role == "counter":
        from streams.counter_steps import ClickedLane, ShownLane

        return [ShownLane(settings), ClickedLane(settings)], None
    from streams.backlog import Backlog
    from streams.roles import PairLane, RankerStep, StateLane, VerifierStep

    if role == "verifier":
        backlog = Backlog(settings.kafka)
        return [VerifierStep(_load(settings), settings, backlog)], backlog
    if role == "embedder":
        # A session of its own for the quick lane, so that it never waits for the heavy one.
        return [StateLane(_load(settings), settings), PairLane(_load(settings), settings)], None
    return [RankerStep(_load(settings), settings)], None


def _watch(settings: Settings, steps: list[Any]) -> BundleWatch | None:
    """Gives the steps that have a model its replacements; None where none has."""
    from streams.bundles import BundleWatch

    if not steps:
        return None
    model = settings.model
    watch = BundleWatch(model.bundle, [s.runtime for s in steps], lambda: _load(settings), model.reload_s)
    for k, s in enumerate(steps):
        s.next_runtime = partial(watch.take, k)
        s.warm()
    return watch


def _load(settings: Settings) -> Runtime:
    from models.runtime import open_runtime

    runtime = open_runtime(settings.model.bundle, settings.model.device, settings.model.threads)
    if runtime.info.rolling:
        settings.counter.counts(runtime.info.count_lag_ms)  # refuses a bundle that was trained with another lag
    return runtime


def _calm_collector() -> None:
    """What is loaded by now stays: the collector need not look at it again and again. Batches make thousands of
    objects that all die young, without cycles; looking through them as often as by default costs 5 % and pauses."""
    gc.unfreeze()  # what a restart in place left, with its models and clients
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def _run_loop(loop: Any, failures: list[BaseException], ended: threading.Event) -> None:
    try:
        loop.run()
    except BaseException as e:
        failures.append(e)
    finally:
        ended.set()


def _on_signals(stopping: threading.Event) -> None:
    def handle(signum: int, frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
