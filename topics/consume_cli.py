"""`solaris tail` and `solaris dlq`: looking into topics, and dealing with what was rejected."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from streams.config_cli import ConfigOption, SetOption

dlq_app = typer.Typer(help="What was rejected: list it, look at it, put it back.", no_args_is_help=True)
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
ReasonOption = Annotated[str | None, typer.Option("--reason", help="Only this reason code.")]
SourceOption = Annotated[str | None, typer.Option("--topic", help="Only what came from this topic (without prefix).")]


def tail(
    topic: Annotated[str, typer.Argument(help="Topic without the prefix, or the full name of any other.")],
    start: Annotated[
        str,
        typer.Option("--from", help="beginning, latest, recent (last few), ms, 2019-11-14T03:00:00Z or -15m."),
    ] = "recent",
    user: Annotated[str | None, typer.Option("--user", help="Only records with this key.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Stop after so many records.")] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for more at the end, or stop.")] = True,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Print the records of a topic, readably or as JSON lines. Commits nothing; shows committed records only.

    Example: solaris tail ranked-ads --from beginning --user u1 --limit 5
    """
    from streams.settings import load
    from topics import tail as tails

    kafka = load(config, sets or []).kafka
    with pipe_friendly():
        for record in tails.records(kafka, topic, start, user, limit, follow):
            if record is None:
                sys.stdout.flush()
                if reader_gone():
                    return
            elif as_json:
                print(json.dumps(tails.to_json(record), ensure_ascii=False))
            else:
                print(tails.to_text(record, int(time.time() * 1000)))


@dlq_app.command("list")
def list_(
    reason: ReasonOption = None,
    topic: SourceOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Records shown at most.")] = 100,
    every: Annotated[bool, typer.Option("--all", help="Also those that `retry` has dealt with.")] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """List the rejected records that are left, oldest first in each partition, and count them by reason.

    Example: solaris dlq list --reason not_json
    """
    from streams.settings import load
    from topics import tail as tails
    from topics.dlq_retry import positions

    kafka = load(config, sets or []).kafka
    done = {} if every else positions(kafka)
    counts: Counter[str] = Counter()
    with pipe_friendly():
        for record in tails.records(kafka, "dlq", "beginning", follow=False):
            if record is None:
                continue
            letter = tails.dead_letter_of(record)
            if record.offset < done.get(record.partition, 0) and not letter.parked:
                continue
            if (reason and letter.reason != reason) or (topic and letter.source_topic != kafka.topic(topic)):
                continue
            counts[letter.reason] += 1
            if counts.total() > limit:
                continue
            if as_json:
                print(json.dumps(tails.to_json(record), ensure_ascii=False))
            else:
                print(tails.to_text(record, int(time.time() * 1000)))
        if not as_json:
            total = counts.total()
            by = ", ".join(f"{name} {n}" for name, n in counts.most_common())
            print(f"{total} rejected{': ' + by if by else ''}" + (f" ({limit} shown)" if total > limit else ""))


@dlq_app.command()
def show(
    place: Annotated[str, typer.Argument(metavar="PARTITION@OFFSET", help="As `solaris dlq list` prints it.")],
    raw: Annotated[bool, typer.Option("--raw", help="Only the bytes of the value, as received.")] = False,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Show one rejected record: why, where it came from, and its bytes.

    Example: solaris dlq show 0@17
    """
    from streams.settings import load
    from topics import tail as tails
    from topics.errors import ContractError, SettingsError

    partition, at, offset = place.partition("@")
    if not (at and partition.isdigit() and offset.isdigit()):
        raise SettingsError("PARTITION@OFFSET", place, "write it as 0@17")
    kafka = load(config, sets or []).kafka
    record = tails.one(kafka, "dlq", int(partition), int(offset))
    if record is None:
        raise ContractError(f"there is no record at {place} of {kafka.topic('dlq')}")
    with pipe_friendly():
        if raw:
            sys.stdout.buffer.write(record.value or b"")
            return
        letter = tails.dead_letter_of(record)
        print(f"reason     {letter.reason}\ndetail     {tails.printable(letter.detail)}")
        print(f"source     {letter.source_topic} partition {letter.source_partition} offset {letter.source_offset}")
        print(f"role       {letter.role}\nrejected   {tails.time_text(letter.timestamp_ms)}")
        print(f"attempts   {letter.attempt}" + (f", parked: {letter.parked}" if letter.parked else ""))
        print(f"key        {letter.key!r}\nsize       {letter.size} bytes" + (" (cut)" if letter.cut else ""))
        print(tails.hexdump(letter.value or b"", 1024))


@dlq_app.command()
def retry(
    reason: ReasonOption = None,
    topic: SourceOption = None,
    max_attempts: Annotated[int, typer.Option("--max-attempts", min=1, help="Then a record is parked.")] = 3,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Put rejected records back to the topics they came from, exactly once, with their attempt raised by one.

    Records that were tried too often, or of which only the beginning was kept, are parked. Records not chosen stay.

    Example: solaris dlq retry --reason unknown_type --max-attempts 3
    """
    from dataclasses import asdict

    from streams.settings import load
    from topics.dlq import DeadLetter
    from topics.dlq_retry import retry as put_back

    kafka = load(config, sets or []).kafka

    def chosen(letter: DeadLetter) -> bool:
        return (not reason or letter.reason == reason) and (not topic or letter.source_topic == kafka.topic(topic))

    counts = put_back(kafka, chosen, max_attempts)
    if as_json:
        print(json.dumps(asdict(counts)))
    else:
        print(
            f"{counts.retried} put back, {counts.parked} parked, {counts.kept} not chosen and kept,"
            f" {counts.already_parked} parked before"
        )


def reader_gone() -> bool:
    """Whether our output is a pipe that nobody reads any more: seen here without writing, since a quiet topic may give
    nothing to write for hours."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


@contextmanager
def pipe_friendly() -> Iterator[None]:
    """Ends quietly when the reader of our output has gone (`solaris tail ... | head`)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at exit, which would print a second complaint.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
