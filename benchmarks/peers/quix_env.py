"""The environment of the Quix Streams peers: its own, since Quix 3.x wants confluent-kafka below 2.13.

Made once in the benchmark's cache folder; beside Quix it has what our verifier's core imports, at the versions of this
program's own environment.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.harness.bundle import cache_folder

QUIX = "3.28.1"
CORE = ("numpy", "numba", "msgspec", "xxhash")
MARK = ".solaris-ready"


def quix_python() -> Path:
    """Its interpreter; made on first use (about 100 MB to fetch)."""
    folder = cache_folder() / f"quix-{QUIX}"
    python = folder / "bin" / "python"
    if not (folder / MARK).exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        wanted = [f"{name}=={version(name)}" for name in CORE]
        wanted += [f"onnxruntime=={_onnxruntime()}", f"quixstreams=={QUIX}", "confluent-kafka<2.13"]
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted], check=True)
        (folder / MARK).touch()
    return python


def _onnxruntime() -> str:
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise PackageNotFoundError("onnxruntime")
