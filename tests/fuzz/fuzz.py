"""Coverage-guided fuzzing of every decoder and of the bundle loader, by atheris (libFuzzer for Python).

    python tests/fuzz/fuzz.py --seconds 60             each target for a minute, on from the corpus
    python tests/fuzz/fuzz.py --target events --seconds 600
    python tests/fuzz/fuzz.py --minimise               the corpus again, no more than the coverage needs

A finding is an exception that is not one of our errors, a minute without an answer, or more than 2 GiB of memory; its
input is written to `reports/fuzz/` and the exit code is 1. Needs `pip install atheris` (Linux, CPython 3.11 to 3.13).
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]
CORPUS = HERE / "corpus"
FOUND = ROOT / "reports" / "fuzz"
MAX_LEN = 4096
LIMITS = ("-timeout=60", "-rss_limit_mb=2048", f"-max_len={MAX_LEN}", "-print_final_stats=0", "-verbosity=1")
PACKAGES = ["topics", "models", "state", "streams", "tomllib", "json"]
COMPILED = [
    "models.kernels", "models.runtime", "models.ratios", "state.jit", "state.kernels", "topics.readers.scan",
    "topics.simulator",
]  # fmt: skip
"""numba's own code must stay as it is"""


def one(target: str, arguments: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=PACKAGES, exclude=COMPILED, enable_loader_override=False):
        from targets import TARGETS

    function = TARGETS[target]
    function(b"")  # kernels compile once, before the clock of -timeout runs
    with tempfile.TemporaryDirectory() as folder:
        # A merge starts itself again, by its name.
        launcher = Path(folder) / target
        launcher.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} --run {target} "$@"\n'
        )
        launcher.chmod(0o755)
        atheris.Setup([str(launcher), *arguments], function)
        atheris.Fuzz()


def child(target: str, arguments: list[str]) -> int:
    command = [sys.executable, __file__, "--run", target, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def fuzz(target: str, seconds: float, work: Path) -> int:
    from seeds import seeds

    grown, begun = work / target, work / f"{target}-seeds"
    grown.mkdir(parents=True, exist_ok=True)
    begun.mkdir(parents=True, exist_ok=True)
    (CORPUS / target).mkdir(parents=True, exist_ok=True)
    for n, seed in enumerate(seeds(target)):
        (begun / f"seed{n}").write_bytes(seed[:MAX_LEN])
    FOUND.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    code = child(
        target,
        [str(grown), str(CORPUS / target), str(begun), f"-max_total_time={seconds:g}",
         f"-artifact_prefix={FOUND}/{target}-", *LIMITS],
    )  # fmt: skip
    print(
        f"fuzz: {target}: {time.monotonic() - began:.0f} s, {'clean' if code == 0 else f'exit code {code}'}", flush=True
    )
    return code


def minimise(target: str, work: Path) -> int:
    """Of what was found, committed and begun with, the fewest inputs with the same coverage."""
    aside = work / f"{target}-least"
    aside.mkdir(parents=True, exist_ok=True)
    sources = [work / target, CORPUS / target, work / f"{target}-seeds"]
    code = child(target, ["-merge=1", str(aside), *(str(s) for s in sources if s.is_dir()), *LIMITS])
    if code == 0 and any(aside.iterdir()):
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for old in (CORPUS / target).iterdir():
            old.unlink()
        for new in aside.iterdir():
            shutil.move(new, CORPUS / target / new.name[:16])
    return code


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        one(sys.argv[2], sys.argv[3:])
    from targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="may be given several times; all")
    parser.add_argument("--seconds", type=float, default=45.0, help="for each target")
    parser.add_argument("--minimise", action="store_true", help="merge what was found into the corpus instead")
    parser.add_argument("--work", type=Path, default=ROOT / "reports" / "fuzz-work", help="inputs found so far")
    a = parser.parse_args()
    chosen = a.target or list(TARGETS)
    codes = {t: minimise(t, a.work) if a.minimise else fuzz(t, a.seconds, a.work) for t in chosen}
    bad = [t for t, code in codes.items() if code]
    print(f"fuzz: {len(chosen) - len(bad)} of {len(chosen)} targets clean" + (f"; not {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
