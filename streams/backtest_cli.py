"""`solaris backtest` and `solaris sweep`: the production cores over an event log in virtual time."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topics.log_cli import LogArgument, SourcesOption, StrictOption

if TYPE_CHECKING:
    from streams.backtest import BacktestConfig
    from streams.settings import Settings

BundleOption = Annotated[Path | None, typer.Option(help="Folder of the model bundle.", show_default="the demo bundle")]
TtlOption = Annotated[str | None, typer.Option(help="How long an embedding is live: 90s, 15m, 6h.", show_default="6h")]
WindowOption = Annotated[
    str | None, typer.Option(help="Window of the aggregates; at least the TTL.", show_default="24h")
]
BudgetOption = Annotated[
    float | None,
    typer.Option(help="Pairs accepted per second of event time; 0: no limit.", min=0, show_default="0"),
]
BurstOption = Annotated[
    str | None,
    typer.Option(
        help="How much of the budget may be saved up for one moment; small logs need more than 10s.",
        show_default="10s",
    ),
]
ShareOption = Annotated[
    float | None,
    typer.Option(help="Share of the pairs seen that may be accepted.", min=0, max=1, show_default="1"),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        help="Pairs accepted at most per candidates event; 0: no limit (a service has 100).", min=0, show_default="0"
    ),
]
CapOption = Annotated[
    int | None,
    typer.Option(
        help="Pairs accepted at most per user and hour; 0: no limit (a service has 2000).", min=0, show_default="0"
    ),
]
ThresholdOption = Annotated[
    float | None, typer.Option(help="Least pCTR that is worth an FM call.", min=0, max=1, show_default="0")
]
PairDelayOption = Annotated[str, typer.Option(help="From an event to its embeddings being servable.")]
StateDelayOption = Annotated[str, typer.Option(help="From an event to the user's new state being servable.")]
CountLagOption = Annotated[
    str | None,
    typer.Option(
        help="Rolling counts leave out what is newer, for a bundle whose VM sees them.", show_default="as in training"
    ),
]
RefreshOption = Annotated[
    str | None,
    typer.Option(
        help="on_change: embed a live pair again when the user's history moved; ttl: only after its TTL.",
        show_default="on_change",
    ),
]
NeighboursOption = Annotated[
    int | None,
    typer.Option(
        help="Similar users asked for a user without an aggregate, where the bundle uses them.",
        min=0, show_default="16",
    ),
]  # fmt: skip
StartOption = Annotated[
    str | None,
    typer.Option(help="Report impressions from here on (ISO time or ms); earlier events still fill state and counts."),
]
NoFmOption = Annotated[bool, typer.Option("--no-fm", help="Do not score with the FM: faster, no transfer ratio.")]
ServiceConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="Take a service's settings, from this TOML file: its limits too, defaults included. Other flags go first.",
    ),
]
ServiceSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="GROUP.KEY=VALUE",
        help="Take a service's settings, with this one; repeatable.",
    ),
]
THREADS = 1


def backtest(
    log: LogArgument,
    bundle: BundleOption = None,
    ttl: TtlOption = None,
    window: WindowOption = None,
    budget: BudgetOption = None,
    burst: BurstOption = None,
    share: ShareOption = None,
    top_k: TopKOption = None,
    per_user_cap: CapOption = None,
    threshold: ThresholdOption = None,
    pair_delay: PairDelayOption = "0",
    state_delay: StateDelayOption = "0",
    count_lag: CountLagOption = None,
    refresh: RefreshOption = None,
    neighbours: NeighboursOption = None,
    start: StartOption = None,
    no_fm: NoFmOption = False,
    config: ServiceConfigOption = None,
    sets: ServiceSetOption = None,
    sources: SourcesOption = "auto",
    strict: StrictOption = False,
    device: Annotated[str | None, typer.Option(help="Device of the FM: cpu or cuda.", show_default="cpu")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and report.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, without a progress bar.")] = False,
) -> None:
    """Run the verifier, the embedder and the ranker over a log in virtual time, without a broker. Deterministic.

    Example: solaris backtest events.jsonl --ttl 6h --budget 50 --pair-delay 3s --state-delay 1s --out reports/backtest
    """
    from models.runtime import open_runtime
    from streams.backtest import backtest as run
    from streams.backtest_report import summarise, table
    from streams.backtest_settings import Flags, configure, describe
    from streams.conditions import conditions
    from topics.readers import BadLines, EventLog

    _quiet()
    settings = _settings(config, sets)
    flags = Flags(
        ttl, window, budget, burst, share, top_k, per_user_cap, threshold, pair_delay, state_delay, count_lag, refresh,
        neighbours, start, not no_fm,
    )  # fmt: skip
    tried = configure(_base(settings), flags)
    path = _bundle(bundle, settings)
    runtime = open_runtime(path, device or (settings.model.device if settings else "cpu"), THREADS)
    source = EventLog(log, sources, BadLines(strict))
    began = time.monotonic()
    with _Bar("backtest", quiet=as_json) as bar:

        def shown(events: int, ts_ms: int) -> None:
            bar.set(source.progress.done, source.progress.total, f"{events:,} events, at {_time(ts_ms)}")

        result = run(source.events(), runtime, tried, progress=shown)
        bar.set(1, 1, "intervals")
        report = summarise(result)
    seconds = time.monotonic() - began
    info = runtime.info
    report["models"] = {"vm": info.vm, "fm": info.fm, "device": runtime.device}
    report["config"] = describe(tried)
    report["log"] = str(source.path)
    report["bad_lines"] = source.bad.count
    if out is not None:
        from streams.page import write_page

        out.mkdir(parents=True, exist_ok=True)
        kept = {**report, "conditions": conditions(path, runtime.device, {"wall time": f"{seconds:.1f} s"})}
        (out / "report.json").write_text(json.dumps(kept, indent=2, allow_nan=False) + "\n")
        write_page(kept, out / "report.html")
    if as_json:
        print(json.dumps(report, allow_nan=False))
        return
    print(table(report))
    print(f"\n{seconds:.1f} s" + (f"; {out / 'report.json'}, {out / 'report.html'}" if out else ""))
    if source.bad.count:
        print(f"{source.bad.count:,} bad lines left out; solaris log check {log} shows them", file=sys.stderr)


def sweep(
    log: LogArgument,
    grid: Annotated[
        list[str], typer.Option(help="Axes and values: budget=10,100,0,ttl=1h,6h; repeatable. See docs/backtest.md.")
    ],
    bundle: BundleOption = None,
    each: Annotated[
        bool,
        typer.Option(
            "--each", help="Vary one axis at a time, the others as the options say, instead of all combinations."
        ),
    ] = False,
    ttl: TtlOption = None,
    window: WindowOption = None,
    budget: BudgetOption = None,
    burst: BurstOption = None,
    share: ShareOption = None,
    top_k: TopKOption = None,
    per_user_cap: CapOption = None,
    threshold: ThresholdOption = None,
    pair_delay: PairDelayOption = "0",
    state_delay: StateDelayOption = "0",
    count_lag: CountLagOption = None,
    refresh: RefreshOption = None,
    neighbours: NeighboursOption = None,
    start: StartOption = None,
    no_fm: NoFmOption = False,
    config: ServiceConfigOption = None,
    sets: ServiceSetOption = None,
    sources: SourcesOption = "auto",
    processes: Annotated[int, typer.Option(help="Processes, one thread each; 0: as many as cores.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder for sweep.json and sweep.html.")] = Path("reports/sweep"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, without a progress bar.")] = False,
) -> None:
    """Backtest a grid of settings over processes, and draw the curves: coverage, loss, hits per FM call.

    The numbers do not depend on the number of processes.

    Example: solaris sweep events.jsonl --grid budget=5,20,80,0 --grid ttl=1h,3h,6h --each --out reports/sweep
    """
    from streams import sweep as sweeps
    from streams.backtest_settings import Flags, configure, describe

    _quiet()
    settings = _settings(config, sets)
    flags = Flags(
        ttl, window, budget, burst, share, top_k, per_user_cap, threshold, pair_delay, state_delay, count_lag, refresh,
        neighbours, start, not no_fm,
    )  # fmt: skip
    base = configure(_base(settings), flags)
    axes = sweeps.parse_grid(grid)
    points = sweeps.points(axes, each)
    with _Bar("sweep", quiet=as_json) as bar:
        result = sweeps.run(
            log,
            sources,
            _bundle(bundle, settings),
            base,
            points,
            processes,
            lambda done, of: bar.set(done, of, f"{done}/{of}"),
        )
    result = {"axes": axes, "each": each, "base": describe(base), **result}
    from streams.sweep_page import write_sweep_page

    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep.json").write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    write_sweep_page(result, out / "sweep.html")
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return
    print(sweeps.table(result))
    print(f"\n{out / 'sweep.json'}, {out / 'sweep.html'}")


def _quiet() -> None:
    """The stores' opening and closing is not news here, unless somebody asked for debug."""
    root = logging.getLogger()
    if root.level == logging.INFO:
        root.setLevel(logging.WARNING)


def _time(ts_ms: int) -> str:
    from datetime import UTC

    return datetime.fromtimestamp(ts_ms / 1000, UTC).strftime("%m-%d %H:%M")


def _settings(config: Path | None, sets: list[str] | None) -> Settings | None:
    """Those of a service when they are asked for; else neither a file that lies here nor the environment is heeded."""
    from streams.settings import load

    return load(config, sets or []) if config is not None or sets else None


def _base(settings: Settings | None) -> BacktestConfig:
    from streams.backtest import BacktestConfig
    from streams.backtest_settings import service

    return BacktestConfig() if settings is None else service(settings)


def _bundle(path: Path | None, settings: Settings | None) -> Path:
    from streams.settings import DEMO_BUNDLE

    return path or (settings.model.bundle if settings else DEMO_BUNDLE)


class _Bar:
    """One progress bar on stderr; nothing when `quiet`."""

    def __init__(self, name: str, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn(name), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), disable=quiet)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def set(self, done: int, of: int, text: str) -> None:
        self._progress.update(self._task, completed=done, total=of or None, description=text)
