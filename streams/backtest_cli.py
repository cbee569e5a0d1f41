"""`solaris backtest` and `solaris sweep`: the production cores over an event log in virtual time."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topics.log_cli import LogArgument, SourcesOption, StrictOption

if TYPE_CHECKING:
    from streams.backtest import BacktestConfig

BundleOption = Annotated[Path | None, typer.Option(help="Folder of the model bundle.", show_default="the demo bundle")]
TtlOption = Annotated[str, typer.Option(help="How long an embedding is live: 90s, 15m, 6h.")]
WindowOption = Annotated[str, typer.Option(help="Window of the aggregates; at least the TTL.")]
BudgetOption = Annotated[float, typer.Option(help="Pairs accepted per second of event time; 0: no limit.", min=0)]
BurstOption = Annotated[
    str, typer.Option(help="How much of the budget may be saved up for one moment; small logs need more than 10s.")
]
ShareOption = Annotated[float, typer.Option(help="Share of the pairs seen that may be accepted.", min=0, max=1)]
TopKOption = Annotated[int, typer.Option(help="Pairs accepted at most per candidates event; 0: no limit.", min=0)]
ThresholdOption = Annotated[float, typer.Option(help="Least pCTR that is worth an FM call.", min=0, max=1)]
DelayOption = Annotated[str, typer.Option(help="From an event to its embeddings being servable.")]
CountLagOption = Annotated[
    str | None,
    typer.Option(
        help="Rolling counts leave out what is newer, for a bundle whose VM sees them.", show_default="as in training"
    ),
]
RefreshOption = Annotated[
    str, typer.Option(help="on_change: embed a live pair again when the user's history moved; ttl: only after its TTL.")
]
NeighboursOption = Annotated[
    int, typer.Option(help="Similar users asked for a user without an aggregate, where the bundle uses them.", min=0)
]
StartOption = Annotated[
    str | None, typer.Option(help="Report impressions from here on (ISO time or ms); the ones before warm nothing up.")
]
NoFmOption = Annotated[bool, typer.Option("--no-fm", help="Do not score with the FM: faster, no transfer ratio.")]
THREADS = 1


def backtest(
    log: LogArgument,
    bundle: BundleOption = None,
    ttl: TtlOption = "6h",
    window: WindowOption = "24h",
    budget: BudgetOption = 0.0,
    burst: BurstOption = "10s",
    share: ShareOption = 1.0,
    top_k: TopKOption = 0,
    threshold: ThresholdOption = 0.0,
    pair_delay: DelayOption = "0",
    state_delay: DelayOption = "0",
    count_lag: CountLagOption = None,
    refresh: RefreshOption = "on_change",
    neighbours: NeighboursOption = 16,
    start: StartOption = None,
    no_fm: NoFmOption = False,
    sources: SourcesOption = "auto",
    strict: StrictOption = False,
    device: Annotated[str, typer.Option(help="Device of the FM: cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and report.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, without a progress bar.")] = False,
) -> None:
    """Run the verifier, the embedder and the ranker over a log in virtual time, without a broker. Deterministic.

    Example: solaris backtest events.jsonl --ttl 6h --budget 50 --pair-delay 3s --state-delay 1s --out reports/backtest
    """
    from models.runtime import open_runtime
    from streams.backtest import backtest as run
    from streams.backtest_report import summarise, table
    from streams.conditions import conditions
    from topics.readers import BadLines, EventLog

    _quiet()
    config = configure(
        ttl, window, budget, burst, share, top_k, threshold, pair_delay, state_delay, refresh, neighbours, start,
        not no_fm, count_lag,
    )  # fmt: skip
    path = _bundle(bundle)
    runtime = open_runtime(path, device, THREADS)
    source = EventLog(log, sources, BadLines(strict))
    began = time.monotonic()
    with _Bar("backtest", quiet=as_json) as bar:

        def shown(events: int, ts_ms: int) -> None:
            bar.set(source.progress.done, source.progress.total, f"{events:,} events, at {_time(ts_ms)}")

        result = run(source.events(), runtime, config, progress=shown)
        bar.set(1, 1, "intervals")
        report = summarise(result)
    seconds = time.monotonic() - began
    info = runtime.info
    report["models"] = {"vm": info.vm, "fm": info.fm, "device": runtime.device}
    report["config"] = describe(config)
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
    ttl: TtlOption = "6h",
    window: WindowOption = "24h",
    budget: BudgetOption = 0.0,
    burst: BurstOption = "10s",
    share: ShareOption = 1.0,
    top_k: TopKOption = 0,
    threshold: ThresholdOption = 0.0,
    pair_delay: DelayOption = "0",
    state_delay: DelayOption = "0",
    count_lag: CountLagOption = None,
    refresh: RefreshOption = "on_change",
    neighbours: NeighboursOption = 16,
    start: StartOption = None,
    no_fm: NoFmOption = False,
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

    _quiet()
    base = configure(
        ttl, window, budget, burst, share, top_k, threshold, pair_delay, state_delay, refresh, neighbours, start,
        not no_fm, count_lag,
    )  # fmt: skip
    axes = sweeps.parse_grid(grid)
    points = sweeps.points(axes, each)
    with _Bar("sweep", quiet=as_json) as bar:
        result = sweeps.run(
            log, sources, _bundle(bundle), base, points, processes, lambda done, of: bar.set(done, of, f"{done}/{of}")
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


def configure(
    ttl: str, window: str, budget: float, burst: str, share: float, top_k: int, threshold: float, pair_delay: str,
    state_delay: str, refresh: str, neighbours: int, start: str | None, with_fm: bool, count_lag: str | None = None,
) -> BacktestConfig:  # fmt: skip
    """Raises `SettingsError` naming the flag."""
    from state.api import StoreSettings
    from state.counts import CountSettings
    from streams.backtest import BacktestConfig
    from streams.durations import parse_ms
    from streams.gate import GateSettings
    from topics.errors import SettingsError

    if refresh not in ("on_change", "ttl"):
        raise SettingsError("--refresh", refresh, "use on_change or ttl")
    ttl_ms, window_ms = parse_ms("--ttl", ttl), parse_ms("--window", window)
    if ttl_ms < 1:
        raise SettingsError("--ttl", ttl, "must be above 0")
    return BacktestConfig(
        store=StoreSettings(ttl_ms=ttl_ms, window_ms=window_ms),
        gate=GateSettings(
            threshold=threshold,
            top_k=top_k,
            budget_pairs_per_s=budget,
            budget_share=share,
            budget_burst_s=parse_ms("--burst", burst) / 1000,
        ),
        counts=None if count_lag is None else CountSettings(lag_ms=parse_ms("--count-lag", count_lag)),
        refresh=refresh,  # type: ignore[arg-type]
        pair_delay_ms=parse_ms("--pair-delay", pair_delay),
        state_delay_ms=parse_ms("--state-delay", state_delay),
        neighbours=neighbours,
        start_ms=_start(start),
        with_fm=with_fm,
    )


def describe(config: BacktestConfig) -> dict[str, Any]:
    """What of a config changes the result."""
    gate, store = config.gate, config.store
    return {
        "ttl_ms": store.ttl_ms, "window_ms": store.window_ms, "budget_pairs_per_s": gate.budget_pairs_per_s,
        "burst_ms": round(gate.budget_burst_s * 1000), "budget_share": gate.budget_share, "top_k": gate.top_k,
        "threshold": gate.threshold,
        "pair_delay_ms": config.pair_delay_ms, "state_delay_ms": config.state_delay_ms, "refresh": config.refresh,
        "neighbours": config.neighbours,
        **({} if config.counts is None else {"count_lag_ms": config.counts.lag_ms}),
        "start_ms": config.start_ms,
    }  # fmt: skip


def _quiet() -> None:
    """The stores' opening and closing is not news here, unless somebody asked for debug."""
    root = logging.getLogger()
    if root.level == logging.INFO:
        root.setLevel(logging.WARNING)


def _start(text: str | None) -> int:
    from datetime import UTC

    from topics.errors import SettingsError

    if text is None:
        return 0
    if text.isdigit():
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError("--start", text, "an ISO time such as 2019-11-14T16:00 (UTC) or milliseconds") from None
    return round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)


def _time(ts_ms: int) -> str:
    from datetime import UTC

    return datetime.fromtimestamp(ts_ms / 1000, UTC).strftime("%m-%d %H:%M")


def _bundle(path: Path | None) -> Path:
    from streams.settings import DEMO_BUNDLE

    return DEMO_BUNDLE if path is None else path


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
