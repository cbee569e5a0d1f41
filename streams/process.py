"""One process of one role: bundle, loops, health page, stats; stops in order on SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from streams.instance import Instance
from streams.settings import Settings

log = logging.getLogger(__name__)

_LIVE_S = 60.0


def run_role(role: str, settings: Settings) -> None:
    """Runs until a signal. Returns after a clean stop; raises what made it impossible to go on."""
    from models.runtime import open_runtime
    from streams.backlog import Backlog
    from streams.health import HealthServer
    from streams.loop import Loop
    from streams.reporter import Reporter
    from streams.roles import PairLane, RankerStep, StateLane, VerifierStep
    from topics.admin import require

    stopping = threading.Event()
    _on_signals(stopping)
    instance = Instance(settings.store.dir, role, settings.loop.instance_id)
    require(settings.kafka)
    runtime = open_runtime(settings.model.bundle, settings.model.device, settings.model.threads)
    backlog = None
    steps: list[Any]
    if role == "verifier":
        backlog = Backlog(settings.kafka)
        backlog.start()
        steps = [VerifierStep(runtime, settings, backlog)]
    elif role == "embedder":
        # A session of its own for the quick lane, so that it never waits for the heavy one.
        light = open_runtime(settings.model.bundle, settings.model.device, settings.model.threads)
        steps = [StateLane(light, settings), PairLane(runtime, settings)]
    else:
        steps = [RankerStep(runtime, settings)]
    for s in steps:
        s.runtime.warm_up()
    loops = [Loop(step, settings, instance.name) for step in steps]
    failures: list[BaseException] = []
    threads = [
        threading.Thread(target=_run_loop, args=(loop, failures, stopping), name=loop.step.role) for loop in loops
    ]

    def status() -> dict[str, Any]:
        now = time.monotonic()
        counters: dict[str, int] = {}
        for loop in loops:
            prefix = "" if len(loops) == 1 else f"{loop.step.role.replace('-', '_')}_"
            counters.update({prefix + k: v for k, v in loop.totals().items()})
        return {
            "role": role,
            "instance": instance.name,
            "pid": os.getpid(),
            "live": all(now - loop.heartbeat < _LIVE_S for loop in loops),
            "ready": all(loop.ready for loop in loops),
            "device": runtime.device,
            "vm": runtime.info.vm,
            "fm": runtime.info.fm,
            "partitions": {loop.step.role: loop.partitions for loop in loops},
            "counters": counters,
        }

    server = None
    if settings.http.port:
        server = HealthServer(settings.http.host, settings.http.port, status)
        server.start()
    reporter = Reporter(settings.kafka, role, status)
    reporter.start()
    log.info("%s: instance %s on %s, bundle %s", role, instance.name, runtime.device, settings.model.bundle)
    for t in threads:
        t.start()
    try:
        while any(t.is_alive() for t in threads):
            if stopping.wait(0.2):
                for loop in loops:
                    loop.stop()
                for t in threads:
                    t.join(settings.loop.shutdown_deadline_s + 5.0)
                break
            if any(loop.hung for loop in loops):
                log.critical("%s: the Kafka client does not come back from a call; leaving, nothing is committed", role)
                os._exit(3)
    finally:
        reporter.stop()
        if backlog is not None:
            backlog.stop()
        if server is not None:
            server.stop()
        instance.release()
    if failures:
        raise failures[0]
    if any(t.is_alive() for t in threads):
        log.error("%s: not stopped inside the deadline; leaving, nothing unfinished was committed", role)
        os._exit(1)


def _run_loop(loop: Any, failures: list[BaseException], stopping: threading.Event) -> None:
    try:
        loop.run()
    except BaseException as e:
        failures.append(e)
    finally:
        stopping.set()


def _on_signals(stopping: threading.Event) -> None:
    def handle(signum: int, frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
