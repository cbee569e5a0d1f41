"""Simulated event logs with a known truth. See docs/simulator.md.

``SimulatorConfig`` and ``PRESETS`` are light; ``simulate``, ``lines`` and ``write`` load numba when first used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from topics.events import Event
from topics.simulator.config import PRESETS, SimulatorConfig, preset

if TYPE_CHECKING:
    from topics.simulator.writer import Summary

__all__ = ["PRESETS", "SimulatorConfig", "lines", "preset", "simulate", "write"]


def lines(config: SimulatorConfig) -> Iterator[bytes]:
    """The log as JSON Lines, in blocks of whole lines: items first, then the other events in log order."""
    from topics.simulator.writer import blocks

    for block in blocks(config):
        yield bytes(block.data)


def simulate(config: SimulatorConfig) -> Iterator[Event]:
    """The same log as decoded events; slower, for tests and small worlds."""
    from topics.events import decode_event

    for block in lines(config):
        for line in block.splitlines():
            yield decode_event(line)


def write(config: SimulatorConfig, path: str | Path, truth: str | Path | None = None) -> Summary:
    """Writes the log to `path` (.jsonl or .parquet) and, where asked, the truth to `truth` (.npz or .parquet)."""
    from topics.simulator.writer import write_log

    return write_log(config, Path(path), None if truth is None else Path(truth))
