"""`solaris simulate`: write a simulated event log with a known truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def simulate(
    out: Annotated[Path, typer.Option(help="Log to write: .jsonl or .parquet", show_default=False)],
    preset: Annotated[str, typer.Option(help="demo, day, week, sessions or tiny")] = "demo",
    users: Annotated[int | None, typer.Option(help="Users", show_default="of the preset")] = None,
    hours: Annotated[float | None, typer.Option(help="Hours of event time", show_default="of the preset")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same version: same bytes")] = 0,
    ads: Annotated[int | None, typer.Option(help="Ads of an impression", show_default="of the preset")] = None,
    candidates: Annotated[
        int | None, typer.Option(help="Items of a candidates event", show_default="of the preset")
    ] = None,
    live_items: Annotated[int | None, typer.Option(help="Items live at a time", show_default="of the preset")] = None,
    late_share: Annotated[float, typer.Option(help="Share of events that stand late in the log")] = 0.0,
    late_ms: Annotated[int, typer.Option(help="Greatest delay of a late event, ms")] = 600_000,
    disorder_ms: Annotated[int, typer.Option(help="Shift every event's place in the log by up to this, ms")] = 0,
    truth: Annotated[
        Path | None,
        typer.Option(help="Also write the true click probability of every ad: .npz or .parquet", show_default=False),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other field of the world, NAME=VALUE; may be repeated", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON")] = False,
) -> None:
    """Write a simulated event log: users whose interests move, items that come and go, retrieval, requests, clicks.

    Example: solaris simulate --out log.jsonl --preset demo --users 5000 --hours 24 --seed 1 --truth truth.npz
    """
    import time

    from topics.files import named
    from topics.simulator import preset as preset_of
    from topics.simulator import write

    changes: dict[str, Any] = {
        "users": users, "hours": hours, "ads": ads, "candidates": candidates, "live_items": live_items,
    }  # fmt: skip
    changes = {k: v for k, v in changes.items() if v is not None}
    changes |= {"seed": seed, "late_share": late_share, "late_ms": late_ms, "disorder_ms": disorder_ms}
    changes |= dict(map(_assignment, set_ or []))
    config = preset_of(preset).with_(**changes)
    begin = time.perf_counter()
    with named("--out", out):
        summary = write(config, out, truth)
    seconds = time.perf_counter() - begin
    report = {
        "out": str(out),
        "truth": None if truth is None else str(truth),
        "preset": preset,
        "seed": seed,
        **{name: getattr(summary, name) for name in summary.__struct_fields__},
        "ctr": round(summary.ctr, 5),
        "seconds": round(seconds, 3),
    }
    if as_json:
        typer.echo(json.dumps(report))
        return
    typer.echo(
        f"{out}: {summary.impressions:,} impressions of {summary.ads:,} ads, {summary.clicks:,} clicks "
        f"(CTR {summary.ctr:.2%}), {summary.candidates:,} candidates events of {summary.candidate_pairs:,} pairs, "
        f"{summary.items:,} items; {summary.bytes / 1e6:,.0f} MB in {seconds:.1f} s"
    )


def _assignment(text: str) -> tuple[str, Any]:
    from topics.errors import SettingsError

    name, equals, value = text.partition("=")
    if not equals:
        raise SettingsError("--set", text, "expected NAME=VALUE")
    try:
        return name.strip(), json.loads(value)
    except json.JSONDecodeError:
        raise SettingsError("--set", text, "the value must be a number, true or false") from None
