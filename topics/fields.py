"""One setting of a group: a dataclass field that says what it is for and what it may be.

`streams.layers` reads this from the groups; it is here so that `topics` and `state` can declare theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def setting(
    default: Any, help: str, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """One setting: its default, what it is for, and its bounds (`above` excludes the bound itself)."""
    return dataclasses.field(default=default, metadata=_metadata(help, low, high, above))


def table(default: Callable[[], Any], help: str, repr: bool = True) -> Any:
    """A setting that is a table of names and values. `repr=False`: some of them may be secrets."""
    return dataclasses.field(default_factory=default, repr=repr, metadata=_metadata(help))


def _metadata(
    help: str, low: float | None = None, high: float | None = None, above: float | None = None
) -> dict[str, Any]:
    return {"help": help, "low": low, "high": high, "above": above}
