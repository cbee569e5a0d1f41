"""Files that people name on the command line: what the system says about them, as errors of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from topics.errors import SettingsError


@contextmanager
def named(option: str, path: Path) -> Iterator[None]:
    """An `OSError` inside becomes a `SettingsError` with option, path and reason (a folder that is not there, no
    permission, a full disk)."""
    try:
        yield
    except OSError as e:
        raise SettingsError(option, str(path), f"cannot be used: {e.strerror or e}") from None
