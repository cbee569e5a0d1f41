"""Spans of time on the command line: ``90s``, ``1.5h``, ``250ms``."""

from __future__ import annotations

import math
import re

from topics.errors import SettingsError

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_FORM = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_ms(key: str, text: str) -> int:
    """Milliseconds of ``<number><ms|s|m|h|d>``; a bare 0 is 0. Raises `SettingsError` naming `key`."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        if text.strip() == "0":
            return 0
        raise SettingsError(key, text, "give a number and a unit, as in 250ms, 90s, 15m, 6h or 1d")
    value = float(found[1]) * _UNITS_MS[found[2]]
    if not math.isfinite(value) or value > 366 * _UNITS_MS["d"]:
        raise SettingsError(key, text, "give at most 366 days")
    return round(value)


def show_ms(ms: float) -> str:
    """The shortest form: 250ms, 1.5s, 15m, 6h."""
    for unit in ("d", "h", "m", "s"):
        size = _UNITS_MS[unit]
        if ms >= size and (ms / size * 100) % 1 == 0:
            return f"{ms / size:g}{unit}"
    return "0" if ms == 0 else f"{ms:g}ms"
