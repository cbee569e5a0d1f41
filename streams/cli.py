"""The `solaris` command. Each package brings its own commands; this file only puts them together."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from models import cli as models_cli
from state import cli as state_cli
from streams import backtest_cli, config_cli, demo_cli, monitor_cli, run_cli
from streams.orphan import stop_with_supervisor
from topics import broker_cli, consume_cli, log_cli, replay_cli, simulate_cli, topics_cli
from topics.errors import SolarisError

app = typer.Typer(
    name="solaris",
    help="Speculative foundation-model embeddings for ranking, on Kafka.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _common(
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", envvar="SOLARIS_LOG_LEVEL", show_default=True)
    ] = "info",
) -> None:
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(f"{log_level!r}: one of debug, info, warning, error", param_hint="--log-level")
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")


for _command in (run_cli.run, run_cli.verifier, run_cli.embedder, run_cli.ranker, run_cli.counter):
    app.command()(_command)
app.command()(broker_cli.up)
app.command()(broker_cli.down)
app.command()(broker_cli.status)
app.command()(broker_cli.broker)
app.command()(monitor_cli.monitor)
app.command()(demo_cli.demo)
app.command()(backtest_cli.backtest)
app.command()(backtest_cli.sweep)
app.command()(models_cli.train)
app.command()(models_cli.evaluate)
app.add_typer(models_cli.bundle_app, name="bundle")
app.add_typer(state_cli.state_app, name="state")
app.add_typer(state_cli.neighbours_app, name="neighbours")
app.command()(config_cli.config)
app.command()(simulate_cli.simulate)
app.command()(replay_cli.replay)
app.add_typer(log_cli.app, name="log")
app.add_typer(topics_cli.app, name="topics")
app.command()(consume_cli.tail)
app.add_typer(consume_cli.dlq_app, name="dlq")


def main() -> None:
    """Exit codes: 0 done, 1 an error of ours (one line on stderr), 2 wrong usage, 130 interrupted."""
    stop_with_supervisor()
    try:
        app()
    except SolarisError as e:
        print(f"solaris: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
