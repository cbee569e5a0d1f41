"""`solaris up|down|status|broker`: have a broker and the roles on this host."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streams.config_cli import ConfigOption, SetOption
from topics.errors import BrokerError

if TYPE_CHECKING:
    from streams.settings import Settings
    from topics.brokers.local import Part
    from topics.kafka import KafkaSettings

DEFAULT_PORT = 9092

DirOption = Annotated[Path, typer.Option("--dir", help="Folder of data, logs and pid files.", envvar="SOLARIS_RUN_DIR")]
PortOption = Annotated[
    int, typer.Option(help="Port of Kafka on 127.0.0.1; 0: the last one used, else 9092.", min=0, max=65_535)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
JavaOption = Annotated[bool, typer.Option("--java", help="Use Kafka on Java even where Docker answers.")]


def up(
    folder: DirOption = Path(".run"),
    port: PortOption = 0,
    java: JavaOption = False,
    broker_only: Annotated[bool, typer.Option("--broker-only", help="Kafka and the topics, no roles.")] = False,
    monitor: Annotated[bool, typer.Option("--monitor/--no-monitor", help="The monitor and its page.")] = True,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for Kafka.", min=1)] = 120.0,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Start Kafka and the roles in the background: Docker Compose, else Apache Kafka on Java 17+.

    Where kafka.bootstrap is set (or KAFKA_BOOTSTRAP), no broker is started: the roles run on that cluster.
    What runs already is left as it is. Stop it with `solaris down`.

    Example: solaris up --port 19092
    """
    from dataclasses import replace

    from streams.bundles import wants_counter
    from streams.settings import load
    from topics import admin
    from topics.brokers import compose, wait_ready
    from topics.brokers.local import LocalStack

    settings = load(config, sets or [])
    own = settings.origin("kafka.bootstrap") != "default"
    in_docker = not own and not java and compose.available()
    counter = not broker_only and wants_counter(settings.model.bundle)
    if in_docker:
        docker = compose.ComposeStack(folder, port or DEFAULT_PORT)
        if not broker_only:
            docker.configure(settings)
        kafka = replace(settings.kafka, bootstrap=docker.bootstrap)
        _say("starting Kafka with Docker Compose")
        docker.start_kafka(timeout_s)
        _topics(kafka, timeout_s)
        if not broker_only:
            _say("building and starting the roles")
            docker.start_roles(timeout_s + 600, monitor, counter)
        _summary(kafka, docker.parts(), own)
        if monitor and not broker_only:
            print(f"  http://127.0.0.1:{docker.page_port}/ is the monitor's page")
        return
    stack = LocalStack(folder, port or (0 if (folder / "kafka" / "node.json").exists() else DEFAULT_PORT))
    began = False
    if own:
        kafka = settings.kafka
        wait_ready(kafka, timeout_s)
    else:
        kafka = replace(settings.kafka, bootstrap=stack.kafka.bootstrap)
        if not stack.kafka.running:
            _say(f"starting Apache Kafka on Java at {kafka.bootstrap} (the first time its jars are fetched, 44 MB)")
        began = stack.start_kafka(timeout_s)
    created = admin.create(kafka)
    if created:
        _say(f"topics created: {', '.join(created)}")
    admin.require(kafka)
    if not broker_only:
        arguments = _arguments(settings, folder, config, sets or [])
        arguments += [*(["--monitor"] if monitor else []), "--set", f"kafka.bootstrap={kafka.bootstrap}"]
        roles = ["verifier", "embedder", *(["counter"] if counter else []), "ranker", *(["monitor"] if monitor else [])]
        began = stack.start_roles(arguments, roles) or began
    if not began:
        _say("already up, nothing to do")
    _summary(kafka, stack.parts(), own)
    if monitor and not broker_only:
        print(f"  http://{settings.http.host}:{settings.http.monitor_port}/ is the monitor's page")


def down(
    folder: DirOption = Path(".run"),
    wipe: Annotated[bool, typer.Option("--wipe", help="Also remove Kafka's data and the stores.")] = False,
    java: JavaOption = False,
    deadline_s: Annotated[float, typer.Option(help="Seconds until what still runs is killed.", min=1)] = 60.0,
) -> None:
    """Stop what `solaris up` started, roles first. Data is kept unless --wipe is given.

    Example: solaris down --wipe
    """
    from topics.brokers import compose
    from topics.brokers.local import LocalStack

    stack = LocalStack(folder)
    if stack.exists or java or not compose.available():
        stopped = stack.down(deadline_s)
        _say(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")
        if wipe:
            stack.wipe()
            _say(f"removed Kafka's data and the stores in {folder}")
        elif stopped:
            _say(f"data is kept in {folder}; `solaris down --wipe` removes it")
    else:
        compose.ComposeStack(folder).down(deadline_s, wipe)


def status(folder: DirOption = Path(".run"), java: JavaOption = False, as_json: JsonOption = False) -> None:
    """What of `solaris up` runs on this host. Exit code 1 when a part does not.

    Example: solaris status --json
    """
    from topics.brokers import compose
    from topics.brokers.local import LocalStack

    stack = LocalStack(folder)
    local = stack.exists or java or not compose.available()
    parts = stack.parts() if local else compose.ComposeStack(folder).parts()
    if as_json:
        print(json.dumps([asdict(part) for part in parts], indent=2, default=str))
    else:
        _print_parts(parts)
    raise typer.Exit(0 if all(part.running for part in parts) else 1)


def broker(
    embedded: Annotated[
        bool, typer.Option("--embedded", help="The broker from the wheel; nothing but Python.")
    ] = False,
    port: PortOption = 0,
    data: Annotated[Path | None, typer.Option(help="Data folder; default .run/broker or .run/embedded.")] = None,
) -> None:
    """Run one broker in the foreground until Ctrl-C: Apache Kafka on Java, or with --embedded the one of a wheel.

    The embedded broker is for a first look only; docs/operating.md says what it cannot do.

    Example: solaris broker --embedded --port 9092 --data /tmp/look
    """
    import signal
    import threading

    from topics.brokers import EmbeddedBroker, JavaKafka

    folder = data or Path(".run") / ("embedded" if embedded else "broker")
    chosen = port or (0 if (folder / "node.json").exists() else DEFAULT_PORT)
    one = EmbeddedBroker(folder, chosen, tied=True) if embedded else JavaKafka(folder, chosen, tied=True)
    if one.running:
        raise BrokerError(f"a broker runs already on {folder} (process {one.pid}, {one.bootstrap})")
    ended = threading.Event()
    for caught in (signal.SIGINT, signal.SIGTERM):
        signal.signal(caught, lambda *_: ended.set())
    with one:
        _say(f"{'embedded broker' if embedded else 'Apache Kafka'} is ready at {one.bootstrap}; Ctrl-C stops it")
        _say(f"data in {folder}" + ("; for a first look only" if embedded else ""))
        while not ended.wait(0.5):
            if not one.running:
                raise BrokerError(f"the broker ended by itself; its last lines:\n{one.log_tail()}")


def _arguments(settings: Settings, folder: Path, config: Path | None, sets: list[str]) -> list[str]:
    """Of `solaris run`: the same settings, with the stores beside the broker's data unless they are set."""
    out = ["--config", str(config)] if config else []
    for one in sets:
        out += ["--set", one]
    if settings.origin("store.dir") == "default":
        out += ["--set", f"store.dir={folder.resolve() / 'state'}"]
    return out


def _topics(kafka: KafkaSettings, timeout_s: float) -> None:
    from topics import admin
    from topics.brokers import wait_ready

    wait_ready(kafka, timeout_s)
    created = admin.create(kafka)
    if created:
        _say(f"topics created: {', '.join(created)}")
    admin.require(kafka)


def _summary(kafka: KafkaSettings, parts: list[Part], own: bool) -> None:
    standard = own or kafka.bootstrap == f"127.0.0.1:{DEFAULT_PORT}"
    flag = "" if standard else f" --set kafka.bootstrap={kafka.bootstrap}"
    print(f"\nKafka at {kafka.bootstrap}, topics {kafka.prefix}*")
    _print_parts(parts)
    print("\nNext:")
    solaris = _called()
    print(f"  {solaris} replay LOG --speed 60{flag}")
    print(f"  {solaris} tail ranked-ads{flag}")
    print(f"  {solaris} down")


def _called() -> str:
    """How a person in this folder types our command: its name when that is on the PATH, else where it lies."""
    program = Path(sys.argv[0])
    found = shutil.which("solaris")
    if program.name != "solaris" or (found and Path(found).resolve() == program.resolve()):
        return "solaris"
    return min(str(program), os.path.relpath(program), key=len)


def _print_parts(parts: list[Part]) -> None:
    for part in parts:
        print(f"  {part.name:<11} {'runs' if part.running else 'DOWN'}  {part.detail}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
