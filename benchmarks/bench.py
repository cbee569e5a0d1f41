"""Every role beside its floor and beside what people would use instead, on one Apache Kafka, on 2 cores.

    python benchmarks/bench.py [--quick] [--json] [--only CASE,...] [--keep]

The broker is the one at KAFKA_BOOTSTRAP, if that is set (one that nobody else uses), else Apache Kafka on Java, started
for the run.

Prints one table, writes `reports/bench.json` and `docs/benchmarks.md` (a quick run writes the first only). CPU time is
that of the role's own process, user + system, from the operating system: the broker, the load and the reader run on
the same cores and do not count. Quick: under 4 minutes, without Quix Streams and Kafka Streams.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Python puts this folder first, where `state.py` hides the package of the same name.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import page  # noqa: E402
from benchmarks.harness.cases import CASES, QUICK  # noqa: E402
from benchmarks.harness.cluster import BenchError, NotMeasured  # noqa: E402
from benchmarks.harness.figures import Figures, table  # noqa: E402
from benchmarks.harness.run import Run  # noqa: E402
from topics.brokers.java import SERVER_JVM, JavaKafka  # noqa: E402
from topics.errors import BrokerError  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
HEAP_MB = 1024
CASE_LIMIT_S = 600
"""far above what any case takes: a case that hangs must not cost the others their figures"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short form, under 4 minutes")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    parser.add_argument("--only", default="", help=f"comma-separated cases of {', '.join(CASES)}")
    parser.add_argument("--keep", action="store_true", help="keep the run's folder, with the logs of all processes")
    parser.add_argument("--page", action="store_true", help="write docs/benchmarks.md after a quick or partial run too")
    parser.add_argument(
        "--render", action="store_true", help="only write docs/benchmarks.md again, from reports/bench.json"
    )
    given = parser.parse_args()
    if given.render:
        result = json.loads((ROOT / "reports" / "bench.json").read_text())
        (ROOT / "docs" / "benchmarks.md").write_text(page.page(Figures.of_detail(result["detail"]), result))
        return 0
    logging.getLogger("topics.kafka").setLevel(logging.CRITICAL)
    names = [n for n in given.only.split(",") if n] or list(QUICK if given.quick else CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join(CASES)}")
    folder = Path(tempfile.mkdtemp(prefix="solaris-bench-"))
    began = time.monotonic()
    machine = {"at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), **page.machine()}

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    def write(run: Run, failures: dict[str, str]) -> dict[str, Any]:
        """After every case, so that a run that is cut short leaves what it has."""
        result = {
            **run.figures.nested(), "failures": failures, "not_measured": run.not_measured, "quick": given.quick,
            "arguments": sys.argv[1:], "took_s": round(time.monotonic() - began, 1),
            "machine": {**machine, "load_after": page.load()},
        }  # fmt: skip
        reports = ROOT / "reports"
        reports.mkdir(exist_ok=True)
        (reports / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
        return result

    failures: dict[str, str] = {}
    try:
        with _broker(folder) as bootstrap:
            run = Run(bootstrap, folder, given.quick, say=say)
            for name in names:
                say(name)
                try:
                    with _at_most(name, CASE_LIMIT_S):
                        CASES[name](run)
                except NotMeasured as e:
                    run.not_measured[name] = str(e)
                    say(f"{name} not measured: {e}")
                except Exception as e:  # one case that fails must not cost the others' figures; the exit code tells
                    failures[name] = f"{type(e).__name__}: {e}"
                    say(f"{name} failed: {failures[name]}")
                result = write(run, failures)
    except BrokerError as e:
        print(f"bench: not measured: {e}; or set KAFKA_BOOTSTRAP to a Kafka that nobody else uses", file=sys.stderr)
        return 2
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if given.page or (not given.quick and not given.only):
        (ROOT / "docs" / "benchmarks.md").write_text(page.page(run.figures, result))
    took = f"{result['took_s']:.0f} s, reports/bench.json"
    print(json.dumps(result, indent=1) if given.json else f"{table(run.figures)}\n\n{took}")
    for kind, cases in (("failed", failures), ("not measured", run.not_measured)):
        for name, why in cases.items():
            print(f"{name} {kind}: {why.splitlines()[0]}", file=sys.stderr)
    if given.keep:
        print(f"logs: {folder}", file=sys.stderr)
    return 1 if failures else 0


@contextmanager
def _broker(folder: Path) -> Iterator[str]:
    """Its bootstrap address. Raises `BrokerError` where there is none and none can be started."""
    if given := os.environ.get("KAFKA_BOOTSTRAP"):
        yield given
        return
    with JavaKafka(folder / "kafka", heap_mb=HEAP_MB, jvm=SERVER_JVM, tied=True) as broker:
        yield broker.bootstrap


@contextmanager
def _at_most(name: str, seconds: int) -> Iterator[None]:
    """Raises `BenchError` in a case that takes longer."""

    def late(*_: object) -> None:
        raise BenchError(f"{name} was not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
