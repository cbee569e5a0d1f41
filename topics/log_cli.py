"""`solaris log`: look into an event log, or write it in the documented format."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from topics.log_check import LogReport

app = typer.Typer(help="Check and convert event logs.", no_args_is_help=True)
LogArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="Event log (.jsonl, .parquet), MIND .tsv, or a data set's folder.")
]
SourcesOption = Annotated[
    str,
    typer.Option(
        help="Candidate sources for logs without candidates events, such as carry_over,touched:20,popular:50; "
        "off; or auto: the default mix if the log has none of its own."
    ),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Stop at the first bad line.")]


@app.command()
def check(
    file: LogArgument,
    sources: SourcesOption = "auto",
    strict: StrictOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Count what a log holds, and find what is wrong with it. Exit code 1 when it has bad lines.

    Example: solaris log check events.jsonl --json
    """
    from dataclasses import asdict

    from topics.log_check import check_log
    from topics.readers import BadLines, EventLog

    report = check_log(EventLog(file, sources, BadLines(strict)))
    if as_json:
        print(json.dumps({"file": str(file), "ok": report.ok, **asdict(report)}, indent=2))
    else:
        _show(file, report)
    raise typer.Exit(1 if report.bad_lines else 0)


@app.command()
def convert(
    file: LogArgument,
    out: Annotated[Path, typer.Argument(help="File to write: .jsonl, .jsonl.gz or .parquet.")],
    sources: SourcesOption = "off",
    sort: Annotated[bool, typer.Option("--sort", help="Put late events in their place.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT when it exists.")] = False,
    strict: StrictOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Write a log in the documented format. Bad lines are counted, shown and left out.

    Example: solaris log convert MINDsmall_train/behaviors.tsv mind.parquet --sources carry_over,popular:50
    """
    from topics.files import named
    from topics.log_convert import write_log
    from topics.readers import BadLines, EventLog

    log = EventLog(file, sources, BadLines(strict))
    with named("OUT", out):
        count = write_log(log.events(), out, force, sort)
    if as_json:
        print(json.dumps({"events": count, "out": str(out), "bad_lines": log.bad.count, "reasons": log.bad.reasons}))
        return
    print(f"{count:,} events written to {out}")
    if log.bad.count:
        print(f"{log.bad.count:,} bad lines left out; the first:")
        for bad in log.bad.first:
            print(f"  line {bad.line}: {bad.detail}")


def _show(file: Path, r: LogReport) -> None:
    about = "" if r.exact else "about "
    print(f"{file}  ({r.format})")
    for kind, n in r.rows.items():
        if n:
            print(f"  {kind + ' rows':<24}{n:>14,}")
    if r.sources is not None:
        print(f"  {'derived candidates':<24}{r.derived_candidates:>14,}  from {r.sources}")
    print(f"  {'users':<24}{about + format(r.users, ','):>14}")
    print(f"  {'items':<24}{about + format(r.items, ','):>14}")
    if r.first_ts is not None and r.last_ts is not None:
        print(f"  {'span':<24}{_time(r.first_ts)} .. {_time(r.last_ts)}  ({(r.last_ts - r.first_ts) / 3.6e6:,.1f} h)")
    print(f"  {'ads per impression':<24}{r.ads_per_impression:>14.1f}")
    print(f"  {'candidates per request':<24}{r.candidates_per_request:>14.1f}")
    if r.click_rate is not None:
        print(f"  {'click rate':<24}{r.click_rate:>14.2%}  {r.clicks:,} clicks of {r.pairs:,} pairs")
    for ttl, share in r.coverage_ceiling.items():
        part = "" if r.coverage_user_share == 1 else f" ({r.coverage_user_share:.1%} of the users looked at)"
        print(f"  {'coverage ceiling ' + ttl:<24}{share:>14.1%}{part}")
    late = f"  (at most {r.largest_lateness_ms / 1000:,.1f} s late)" if r.order_violations else ""
    print(f"  {'order violations':<24}{r.order_violations:>14,}{late}")
    print(f"  {'duplicate ids':<24}{about + format(sum(r.duplicate_ids.values()), ','):>14}")
    for name in ("cut", "users_evicted", "popular_overflow"):
        if r.source_counts.get(name):
            print(f"  {'sources: ' + name:<24}{r.source_counts[name]:>14,}")
    print(f"  {'bad lines':<24}{r.bad_lines:>14,}  {r.bad_reasons or ''}".rstrip())
    for bad in r.first_bad_lines:
        print(f"    line {bad['line']}: {bad['detail']}\n      {bad['text']!r}")


def _time(ts: int) -> str:
    return datetime.fromtimestamp(ts / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
