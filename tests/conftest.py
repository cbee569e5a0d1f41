"""Training tests need torch, which `make train-setup` brings. Without it they are left out by name; in CI never."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared: a slow draw is no finding. In CI the same examples every time; elsewhere new ones every run.
settings.register_profile(
    "solaris", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.register_profile("solaris-ci", parent=settings.get_profile("solaris"), derandomize=True)
settings.load_profile("solaris-ci" if os.environ.get("CI", "").lower() in ("1", "true", "yes") else "solaris")

_LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT_OUT] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    training = [item for item in items if item.get_closest_marker("train") is not None]
    if not training or find_spec("torch") is not None:
        return
    if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        raise pytest.UsageError(f"CI leaves no test out, but {len(training)} need torch: make train-setup")
    config.stash[_LEFT_OUT] = [item.nodeid for item in training]
    config.hook.pytest_deselected(items=training)
    items[:] = [item for item in items if item not in training]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash[_LEFT_OUT]:
        terminalreporter.write_line(f"left out, {len(left_out)} training tests need torch (make train-setup):")
        for nodeid in left_out:
            terminalreporter.write_line(f"  {nodeid}")
