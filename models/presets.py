"""Sizes of the models by name."""

from __future__ import annotations

from models.nets import FmSize, VmSize
from topics.errors import SettingsError

FM: dict[str, FmSize] = {
    "tiny": FmSize(16, 32, 1, 4, 1024, 0, 512),
    "small": FmSize(24, 64, 2, 4, 2048, 0, 1024),
    "large": FmSize(128, 1664, 4, 8, 1 << 16, 1 << 18, 1 << 14),
    "xl": FmSize(384, 8960, 4, 16, 1 << 17, 1 << 20, 1 << 15),
}
"""tiny for tests, small for the demo, large about 20 MFLOP a pair, xl about 500."""

VM: dict[str, VmSize] = {
    "weak": VmSize((64, 32), 1024, 1 << 12, False),
    "strong": VmSize((64, 32), 1024, 1 << 12, True),
}
"""strong sees the hand counters: matches of the ad with the request's own history."""


def fm_size(name: str) -> FmSize:
    try:
        return FM[name]
    except KeyError:
        raise SettingsError("preset", name, f"one of {', '.join(FM)}") from None


def vm_size(name: str) -> VmSize:
    try:
        return VM[name]
    except KeyError:
        raise SettingsError("vm", name, f"one of {', '.join(VM)}") from None
