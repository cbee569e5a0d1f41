"""The `solaris` command. Each package brings its own commands; this file only puts them together."""

from __future__ import annotations

import sys

import typer

from topics.errors import SolarisError

app = typer.Typer(
    name="solaris",
    help="Speculative foundation-model embeddings for ranking, on Kafka.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Exit codes: 0 done, 1 an error of ours (one line on stderr), 2 wrong usage, 130 interrupted."""
    try:
        app()
    except SolarisError as e:
        print(f"solaris: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
