"""`solaris verifier|embedder|ranker|counter|run`: the roles."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streams.config_cli import ConfigOption, SetOption

if TYPE_CHECKING:
    from streams.settings import Http

ROLES = ("verifier", "embedder", "ranker")
"""those of every installation; `counter` is started where the bundle's VM sees rolling counts"""


def _start(role: str, config: Path | None, sets: list[str] | None) -> None:
    gc.disable()  # imports and models make much and leave little: 0.1 to 0.2 s of a start; `process` enables it
    from streams.process import run_role
    from streams.settings import load

    run_role(role, load(config, sets or []))


def verifier(config: ConfigOption = None, sets: SetOption = None) -> None:
    """Run one verifier: decides which candidate pairs are worth the foundation model's time.

    Several processes share the partitions; start as many as there are partitions at most.

    Example: solaris verifier --set verifier.budget_pairs_per_s=5000
    """
    _start("verifier", config, sets)


def embedder(config: ConfigOption = None, sets: SetOption = None) -> None:
    """Run one embedder: computes user states and pair embeddings with the foundation model.

    Example: solaris embedder --set model.device=cuda --set embedder.batch_pairs=16384
    """
    _start("embedder", config, sets)


def ranker(config: ConfigOption = None, sets: SetOption = None) -> None:
    """Run one ranker: joins impressions with embeddings and writes ranked ads.

    Example: solaris ranker --set loop.guarantee=at_least_once --set http.port=8080
    """
    _start("ranker", config, sets)


def counter(config: ConfigOption = None, sets: SetOption = None) -> None:
    """Run one counter: impressions and clicks of items, users and pairs, for bundles whose VM sees rolling counts.

    It keeps nothing itself and needs no bundle; rankers build the counts from what it writes.

    Example: solaris counter --set counter.batch_age_ms=200
    """
    _start("counter", config, sets)


def run(
    config: ConfigOption = None,
    sets: SetOption = None,
    verifiers: Annotated[int, typer.Option(help="Verifier processes.", min=0)] = 1,
    embedders: Annotated[int, typer.Option(help="Embedder processes.", min=0)] = 1,
    rankers: Annotated[int, typer.Option(help="Ranker processes.", min=0)] = 1,
    counters: Annotated[
        int | None, typer.Option(help="Counter processes; by default 1 where the bundle sees rolling counts.", min=0)
    ] = None,
    monitor: Annotated[bool, typer.Option("--monitor/--no-monitor", help="Also the monitor; one a prefix.")] = False,
) -> None:
    """Run all roles on this host under supervision; one Ctrl-C stops them in order.

    Example: solaris run --set kafka.bootstrap=broker:9092 --rankers 2
    """
    from streams.bundles import wants_counter
    from streams.settings import load
    from streams.supervisor import Supervisor
    from topics.admin import require
    from topics.rights import topics_of

    settings = load(config, sets or [])  # wrong settings fail here, once, and not in every role
    arguments = [*(["--config", str(config)] if config else []), *(a for s in sets or [] for a in ("--set", s))]
    if counters is None:
        counters = int(wants_counter(settings.model.bundle))
    counts = {
        "verifier": verifiers, "embedder": embedders, "counter": counters, "ranker": rankers, "monitor": int(monitor)
    }  # fmt: skip
    counts = {role: n for role, n in counts.items() if n}
    supervisor = Supervisor(counts, arguments, settings.loop.shutdown_deadline_s, settings.http.port)
    _check_ports(supervisor.ports, settings.http, monitor)
    require(settings.kafka, {name for role in counts for name in topics_of(role)})
    logging.getLogger(__name__).info("roles on %s: %s", settings.kafka.bootstrap, counts)
    supervisor.run()


def _check_ports(ports: range, http: Http, monitor: bool) -> None:
    """Before anything is started: a process that cannot listen would be started again and again."""
    from streams.health import require_free
    from topics.errors import SettingsError

    if ports and ports[-1] > 65_535:
        raise SettingsError("http.port", http.port, f"the {len(ports)} processes need as many ports from it on")
    if monitor and http.monitor_port in ports:
        raise SettingsError(
            "http.monitor_port", http.monitor_port, f"is one of the processes', {ports[0]} to {ports[-1]}"
        )
    require_free(http.host, ports)
