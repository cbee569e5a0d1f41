"""`solaris demo`: the main job from end to end, with a report at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streams.config_cli import ConfigOption, SetOption

if TYPE_CHECKING:
    from streams.demo import Progress
    from topics.kafka import KafkaSettings


def demo(
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Event log to run instead of a simulated day.", show_default="simulated"),
    ] = None,
    broker: Annotated[
        str, typer.Option(help="embedded, java, or host:port of a running Kafka.", show_default=True)
    ] = "embedded",
    seconds: Annotated[float, typer.Option(help="About how long the replay may take.", min=1)] = 60.0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("reports/demo"),
    users: Annotated[int, typer.Option(help="Users of the simulated day.", min=10)] = 2_500,
    seed: Annotated[int, typer.Option(help="Seed of the simulated day.")] = 0,
    train_share: Annotated[
        float,
        typer.Option(
            help="With --log and torch: train on this first share of its span, judge on the rest; 0: do not.",
            min=0,
            max=0.95,
        ),
    ] = 2 / 3,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run the whole pipeline on one log: broker, roles, replay, report. Needs nothing but Python.

    Without --log a day of events is simulated. With it a bundle is trained on the first two thirds (where torch is
    installed: make train-setup) unless model.bundle names one. The embedded broker is for a first look only; `make up`
    starts a real Kafka.

    Example: solaris demo --log behaviors.tsv --broker java
    """
    logging.getLogger().setLevel(logging.WARNING)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr, flush=True)

    out.mkdir(parents=True, exist_ok=True)
    path = log
    if path is None:
        from topics.simulator import preset, write

        path = out / "simulated.jsonl"
        say(f"simulating a day of {users:,} users (a first run also compiles, some 20 s)")
        write(preset("demo").with_(users=users, seed=seed), path)
    from streams.demo import Progress, run
    from streams.settings import load
    from topics import admin
    from topics.readers import EventLog

    settings = load(config, sets or [])
    prefix = f"demo{int(time.time())}."
    settings = dataclasses.replace(
        settings, store=dataclasses.replace(settings.store, dir=(out / "state").resolve()),
        kafka=dataclasses.replace(settings.kafka, prefix=prefix),
    )  # fmt: skip
    source = EventLog(path)
    judged_from_ms = 0
    if log is not None and train_share and settings.origin("model.bundle") == "default":
        from streams.demo_training import can_train, train_first_part

        if can_train():
            bundle = (out / "bundle").resolve()
            judged_from_ms = train_first_part(source, train_share, bundle, seed, say)
            settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, bundle=bundle))
        else:
            say("torch is not installed (make train-setup): the demo bundle serves, which knows nothing of this log")
    with _broker(broker, settings.kafka, out, say) as kafka:
        admin.create(kafka)
        progress = Progress()
        with _display(progress):
            report = run(source, settings, kafka, sets or [], out, seconds, progress, say, judged_from_ms)
    from streams.conditions import conditions
    from streams.page import write_page

    report["conditions"] = conditions(settings.model.bundle, settings.model.device, {"broker": broker})
    target = out / "report.json"
    target.write_text(json.dumps(report, indent=2))
    write_page(report, target.with_suffix(".html"))
    _finish(report, target, as_json, time.monotonic() - began)


@contextlib.contextmanager
def _broker(kind: str, kafka: KafkaSettings, out: Path, say: Any) -> Iterator[KafkaSettings]:
    from topics.brokers import EmbeddedBroker, JavaKafka, wait_ready
    from topics.errors import SettingsError

    if kind in ("embedded", "java"):
        say(f"starting the {kind} broker" + (" (for a first look; real Kafka: make up)" if kind == "embedded" else ""))
        make: Any = EmbeddedBroker if kind == "embedded" else JavaKafka
        with make(out / f"{kind}-broker", tied=True) as started:
            yield dataclasses.replace(kafka, bootstrap=started.bootstrap, properties={})
        return
    if ":" not in kind:
        raise SettingsError("--broker", kind, "use embedded, java, or host:port")
    settings = dataclasses.replace(kafka, bootstrap=kind)
    wait_ready(settings, 30)
    yield settings


@contextlib.contextmanager
def _display(progress: Progress) -> Iterator[None]:
    """One line that lives while the run does: replay, rates, coverage. On a terminal it is redrawn, elsewhere a line
    every ten seconds."""
    stop = threading.Event()
    terminal = sys.stderr.isatty()

    def draw() -> None:
        before, at = 0, time.monotonic()
        last = ""
        while not stop.wait(0.5 if terminal else 10.0):
            state = progress.replay
            if state is None:
                continue
            now = time.monotonic()
            rate = (progress.ranked - before) / (now - at)
            before, at = progress.ranked, now
            ads = sum(progress.sources.values()) or 1
            sent = dict(state.by_topic)
            covered = " ".join(f"{s} {n / ads:.0%}" for s, n in progress.sources.most_common())
            text = (
                f"  replay {state.read:4.0%}  ranked {progress.ranked:,}/{progress.impressions:,} ({rate:,.0f}/s)  "
                f"lag {max(0, sent.get('impressions', 0) - progress.ranked):,} impressions, "
                f"{max(0, sent.get('candidates', 0) - progress.states):,} user events  {covered}"
            )
            if state.complete and text == last and not terminal:
                continue  # all is ranked; what goes on is said elsewhere
            last = text
            print(("\r\x1b[2K" if terminal else "") + text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    thread = threading.Thread(target=draw, name="display", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _finish(report: dict[str, Any], target: Path, as_json: bool, seconds: float) -> None:
    from streams.report import lines

    if as_json:
        print(json.dumps(report))
    else:
        print()
        for line in lines(report):
            print(line)
        print(f"\nwhole run {seconds:.0f} s; report: {target}, {target.with_suffix('.html')}")
        print("next: make up (a real Kafka), solaris demo --log YOUR.jsonl, README.md for your own model")
    raise typer.Exit(0 if report["audit"]["lost"] == report["audit"]["duplicated"] == 0 else 1)
