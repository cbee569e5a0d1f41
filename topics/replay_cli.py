"""`solaris replay`: send an event log to its topics."""

from __future__ import annotations

import json
import signal
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streams.config_cli import ConfigOption, SetOption
from topics.log_cli import LogArgument, SourcesOption, StrictOption

if TYPE_CHECKING:
    from topics.readers import BadLines
    from topics.replay import ReplayState


def replay(
    log: LogArgument,
    speed: Annotated[str, typer.Option(help="Times real time (1, 60, 0.5), or max.")] = "max",
    topics: Annotated[
        str, typer.Option(help="Comma-separated: candidates,impressions,feedback,items.")
    ] = "candidates,impressions,feedback,items",
    sources: SourcesOption = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last acknowledged event.")] = False,
    shift_to_now: Annotated[
        bool, typer.Option("--shift-to-now", help="Move event times so that the first event is now.")
    ] = False,
    strict: StrictOption = False,
    create: Annotated[bool, typer.Option(help="Create the topics that are missing.")] = True,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="No progress bar; one JSON object at the end.")] = False,
) -> None:
    """Send an event log to its topics, paced by event time. Interrupted, it goes on with --resume, and every event is
    in its topic exactly once for a read_committed reader.

    Example: solaris replay events.jsonl --speed 60 --shift-to-now

    Exit codes: 0 the whole log is in, 1 an error, 130 interrupted.
    """
    from dataclasses import asdict

    from streams.settings import load
    from topics import admin
    from topics.errors import ContractError, SettingsError
    from topics.readers import BadLines, EventLog
    from topics.replay import Replay

    try:
        factor: Any = "max" if speed == "max" else float(speed)
    except ValueError:
        raise SettingsError("speed", speed, "a number above 0 (1 is real time) or max") from None
    kafka = load(config, sets or []).kafka
    source = EventLog(log, sources, BadLines(strict))
    names = [name.strip() for name in topics.split(",") if name.strip()]
    stop = _stop_on_signal()
    with _Bar(as_json) as bar:
        run = Replay(source, kafka, factor, names, resume, shift_to_now, bar.show, stop)
        if create:
            admin.create(kafka, run.topics)
        admin.require(kafka, run.topics, any_partitions=True)
        state = run.run()
    if as_json:
        bad = {"bad_lines": source.bad.count, "bad_reasons": source.bad.reasons}
        print(json.dumps({"log": str(log), **asdict(state), **bad}))
    else:
        _summary(state, source.bad, kafka.bootstrap)
    if not state.complete:
        raise typer.Exit(130)
    if not state.events and not state.resumed_events:
        if source.bad.count:
            raise ContractError(f"nothing in {log} is an event: `solaris log check {log}` shows what is wrong")
        print(f"solaris: {log} has no events for these topics", file=sys.stderr)


def _stop_on_signal() -> threading.Event:
    """The first Ctrl-C or SIGTERM ends the replay cleanly; a second one as usual."""
    stop = threading.Event()

    def handle(number: int, _frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stop


class _Bar:
    """Events, pairs, event-time clock, rate and time left, on stderr; nothing when it is not a terminal or --json."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.fields[text]}"),
            BarColumn(24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(compact=True),
            console=console,
            refresh_per_second=5,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0, text="starting")

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, state: ReplayState) -> None:
        if self._bar.disable:
            return
        elapsed = self._bar.tasks[0].elapsed or 1e-9
        clock = "-" if state.clock_ms < 0 else _clock(state.clock_ms)
        text = (
            f"{state.resumed_events + state.events:,} events  {state.pairs:,} pairs  {clock}  "
            f"{state.events / elapsed:,.0f}/s"
        )
        self._bar.update(self._task, completed=state.read, text=text)


def _summary(state: ReplayState, bad: BadLines, bootstrap: str) -> None:
    rate = state.acknowledged / state.seconds if state.seconds else 0.0
    end = "complete" if state.complete else "interrupted; --resume goes on here"
    print(
        f"{state.acknowledged:,} events ({state.pairs:,} pairs) acknowledged by {bootstrap} "
        f"in {state.seconds:.1f} s, {rate:,.0f}/s: {end}"
    )
    if state.resumed_events:
        print(f"{state.resumed_events:,} events were there from before")
    for topic, n in state.by_topic.items():
        print(f"  {topic:<14}{n:>12,}")
    if bad.count:
        print(f"{bad.count:,} bad lines skipped; the first:", file=sys.stderr)
        for line in bad.first:
            print(f"  line {line.line}: {line.detail}", file=sys.stderr)


def _clock(ts: int) -> str:
    return datetime.fromtimestamp(ts / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
