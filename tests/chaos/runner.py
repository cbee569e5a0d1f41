"""Chaos: a log is replayed into a real Kafka while the roles and the broker are killed, frozen and replaced; afterwards
every topic and store is read back and held to the guarantee.

    python tests/chaos/runner.py            the long form: every named point of every role, at least 50 kills
    python tests/chaos/runner.py --quick    at least 5 kills in a few minutes

Writes `reports/chaos.json`. Exits 1 when anything is wrong. The same seed gives the same log and the same events, in
the same order; when exactly each one falls is up to the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `pipeline`, as pytest does it

from chaos_events import Event, long, quick
from chaos_run import Run
from pipeline import ROOT

LEAST_KILLS_QUICK, LEAST_KILLS = 5, 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=55, help="of the long form, at least")
    parser.add_argument("--users", type=int, default=0, help="of the simulated log; 0: fit for the form")
    parser.add_argument("--only", default="", help="comma-separated what[:where[:detail]]: these events instead")
    parser.add_argument("--unreachable-s", type=float, default=60.0, help="how long the broker is frozen")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "chaos.json")
    parser.add_argument("--folder", type=Path, default=None, help="kept after the run; default: a temporary one")
    a = parser.parse_args()
    rng = random.Random(a.seed)
    short = a.quick or bool(a.only)
    events = quick(rng) if a.quick else long(rng, a.kills)
    if a.only:
        events = [Event(*[*part.split(":", 2), ""][:3]) for part in a.only.split(",")]
    folder = a.folder or Path(tempfile.mkdtemp(prefix="solaris-chaos-"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = Run(folder, a.seed, events, a.users or (200 if short else 1_000), 2.5 if short else 2.0, a.unreachable_s)
    report = run.run()
    least = LEAST_KILLS_QUICK if a.quick else LEAST_KILLS
    if not a.only and report["kills"] < least:
        run.wrong.append(f"only {report['kills']} kills, {least} are wanted")
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "events"}, indent=1))
    if run.wrong:
        print(f"chaos: {len(run.wrong)} things are wrong; logs are in {folder}", file=sys.stderr)
        return 1
    if a.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"chaos: {report['kills']} kills, nothing lost, nothing twice; report in {a.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
