"""The environment of the Quix Streams peers: its own, since Quix 3.x wants confluent-kafka below 2.13.

Made once in the benchmark's cache folder; beside Quix it has what the cores of our verifier and ranker import, at the
versions of this program's own environment.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.harness.bundle import cache_folder
from benchmarks.harness.cluster import NotMeasured

QUIX = "3.28.1"
CORE = ("numpy", "numba", "msgspec", "xxhash", "hnswlib", "psutil", "rocksdict")
MARK = ".solaris-ready"


def quix_python() -> Path:
    """Its interpreter; made on first use (about 100 MB to fetch). Raises `NotMeasured` where it cannot be made."""
    folder = cache_folder() / f"quix-{QUIX}"
    python, mark = folder / "bin" / "python", folder / MARK
    wanted = [f"{name}=={version(name)}" for name in CORE]
    wanted += [f"onnxruntime=={_onnxruntime()}", f"quixstreams=={QUIX}", "confluent-kafka<2.13"]
    if not mark.exists() or mark.read_text().split() != wanted:
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                tail = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
                raise NotMeasured(f"the environment of Quix Streams could not be made:\n{tail}")
        mark.write_text("\n".join(wanted) + "\n")
    return python


def _onnxruntime() -> str:
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise PackageNotFoundError("onnxruntime")
