"""Under which conditions figures were measured: machine, versions, command. Secrets on the command line are masked."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from topics.kafka import is_secret

PACKAGES = ("solaris-pipeline", "confluent-kafka", "numpy", "onnxruntime", "onnxruntime-gpu", "rocksdict")


def conditions(bundle: Path, device: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What to print beside figures so that they can be compared. `more` is added at the front."""
    return {
        **(more or {}),
        "command": command(sys.argv),
        "machine": f"{cores()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB memory, {_processor()}",
        "system": platform.platform(terse=True),
        "bundle": bundle.name,
        "device": device,
        "python": platform.python_version(),
        "packages": {p: v for p in PACKAGES if (v := _version(p)) is not None},
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def command(argv: Sequence[str]) -> str:
    """The command line as typed, values of secret keys replaced."""
    shown = []
    for i, argument in enumerate(argv):
        text = os.path.basename(argument) if i == 0 else argument
        key, equals, _ = text.partition("=")
        shown.append(f"{key}=******" if equals and is_secret(key) else text)
    return shlex.join(shown)


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
