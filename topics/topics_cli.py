"""`solaris topics`: create, check, list and describe the topics of the contracts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from streams.config_cli import ConfigOption, SetOption

app = typer.Typer(help="Create, check and describe the topics.", no_args_is_help=True)
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
NamesArgument = Annotated[list[str] | None, typer.Argument(help="Topics without the prefix; all when none is named.")]


@app.command()
def create(
    names: NamesArgument = None,
    alter: Annotated[bool, typer.Option("--alter", help="Also change existing topics that do not match.")] = False,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create the topics that are missing. Existing ones are compared, and changed only with --alter.

    Example: solaris topics create --set kafka.partitions=8
    """
    from streams.settings import load
    from topics import admin

    kafka = load(config, sets or []).kafka
    created = admin.create(kafka, names)
    altered = admin.alter(kafka, names) if alter else []
    report = admin.inspect(kafka, names)
    if as_json:
        print(json.dumps({"created": created, "altered": altered, **_report(report)}, indent=2))
    else:
        for name in created:
            print(f"created  {name}")
        for line in altered:
            print(f"altered  {line}")
        if not created and not altered:
            print(f"nothing to create at {kafka.bootstrap}")
        _print_report(report)
    raise typer.Exit(1 if report.mismatches else 0)


@app.command()
def check(
    names: NamesArgument = None, config: ConfigOption = None, sets: SetOption = None, as_json: JsonOption = False
) -> None:
    """Compare the topics with their contracts. Exit code 1 when one does not match.

    Example: solaris topics check --json
    """
    from streams.settings import load
    from topics import admin

    kafka = load(config, sets or []).kafka
    report = admin.inspect(kafka, names)
    if as_json:
        print(json.dumps(_report(report), indent=2))
    else:
        _print_report(report)
        if not report.mismatches:
            print(f"all topics at {kafka.bootstrap} match their contracts")
    raise typer.Exit(1 if report.mismatches else 0)


@app.command("list")
def list_(
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As the table of the documentation.")] = False,
) -> None:
    """The contracts: what each topic carries, how long it is kept, who writes and who reads it. Asks no broker.

    Example: solaris topics list
    """
    from streams.settings import load
    from topics import admin
    from topics.contracts import CONTRACTS

    if markdown:
        print(contracts_markdown())
        return
    kafka = load(config, sets or []).kafka
    if as_json:
        rows = [
            asdict(c)
            | {"topic": kafka.topic(c.name), "partitions": admin.partitions_of(kafka, c)}
            | {"config": admin.config_of(kafka, c)}
            for c in CONTRACTS
        ]
        print(json.dumps(rows, indent=2))
        return
    line = "{:<22} {:<12} {:<24} {:>5}  {:<9} {} -> {}"
    print(line.format("topic", "key", "value", "parts", "kept", "writes", "reads"))
    for c in CONTRACTS:
        kept = kept_text(kafka.retention_ms.get(c.name, c.retention_ms))
        parts = admin.partitions_of(kafka, c)
        print(line.format(kafka.topic(c.name), c.key, c.value, parts, kept, c.writes, c.reads))


@app.command()
def describe(
    names: NamesArgument = None, config: ConfigOption = None, sets: SetOption = None, as_json: JsonOption = False
) -> None:
    """What the topics hold now: offsets by partition, and the lag of the roles that read them.

    Example: solaris topics describe impressions
    """
    from streams.settings import load
    from topics import admin

    states = admin.describe(load(config, sets or []).kafka, names)
    if as_json:
        print(json.dumps([asdict(s) for s in states], indent=2))
        return
    for s in states:
        if not s.exists:
            print(f"{s.name}: missing (solaris topics create)")
            continue
        total = sum(p.high - p.low for p in s.partitions)
        settings = " ".join(f"{k}={v}" for k, v in s.config.items() if k in SHOWN)
        print(f"{s.name}: {len(s.partitions)} partitions, {total} offsets  {settings}".rstrip())
        for p in s.partitions:
            lag = "  ".join(f"{role} lag {n}" for role, n in p.lag.items())
            print(f"  {p.partition:>4}  {p.low}..{p.high}  {lag}".rstrip())


@app.command()
def schema(
    out: Annotated[Path, typer.Option("--out", help="Folder to write to.")] = Path("docs/schemas"),
    verify: Annotated[bool, typer.Option("--verify", help="Write nothing; exit 1 when a file is not current.")] = False,
) -> None:
    """Write the JSON Schema of every JSON topic, generated from the types.

    Example: solaris topics schema --out docs/schemas
    """
    from topics.schema import stale, write

    old = stale(out)
    if verify:
        for name in old:
            print(f"not current: {out / name}")
        raise typer.Exit(1 if old else 0)
    for path in write(out):
        print(path)


SHOWN = ("cleanup.policy", "retention.ms", "message.timestamp.type", "max.message.bytes")


def kept_text(retention_ms: int | None) -> str:
    if retention_ms is None:
        return "compacted"
    hours = retention_ms / 3_600_000
    return f"{hours / 24:g} days" if hours >= 48 else f"{hours:g} h"


def contracts_markdown() -> str:
    """The table of docs/topics.md, from the contracts."""
    from topics.contracts import CONTRACTS

    rows = ["| topic | key | value | kept | partitions | writes | reads |", "|---|---|---|---|---|---|---|"]
    for c in CONTRACTS:
        parts = "`kafka.partitions`" if c.aligned else "1"
        kept = kept_text(c.retention_ms)
        rows.append(f"| `{c.name}` | {c.key} | {c.value} | {kept} | {parts} | {c.writes} | {c.reads} |")
    return "\n".join(rows)


def _report(report: object) -> dict[str, object]:
    from topics.admin import Report

    assert isinstance(report, Report)
    return {"mismatches": [asdict(m) for m in report.mismatches], "notes": report.notes}


def _print_report(report: object) -> None:
    from topics.admin import Report

    assert isinstance(report, Report)
    for m in report.mismatches:
        print(f"mismatch {m}")
    for note in report.notes:
        print(f"note     {note}")
