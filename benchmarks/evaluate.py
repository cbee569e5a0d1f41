"""The evaluation campaign whose figures are committed under docs/evaluate: worlds that no setting was chosen on.

    python benchmarks/evaluate.py --out docs/evaluate

For every seed a world is simulated and evaluated, FM, VM and all, in each of `WORLDS`; a seed that is done is not run
again, so a campaign that was broken off goes on. Then the seeds of each world are put together: table, JSON and plots.
Settings are chosen on seeds 0-9; 10 and above are for reporting.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its state.py would hide the package

WORLDS: dict[str, tuple[str, int, float, str]] = {
    "demo-weak": ("demo", 600, 48.0, "weak"),
    "demo-strong": ("demo", 600, 48.0, "strong"),
    "sessions-weak": ("sessions", 2000, 24.0, "weak"),
}
"""name -> preset of the simulator, users, hours, VM"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("reports/evaluate"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14])
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--preset", default="tiny", help="size of the FM")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    for seed in given.seeds:
        for world in given.worlds:
            file = given.out / world / f"seed-{seed}.json"
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                began = time.monotonic()
                result = one(world, seed, given.preset, given.threads)
                result["runs"][0]["wall_s"] = round(time.monotonic() - began)
                aside = file.with_suffix(".tmp")
                aside.write_text(json.dumps(result, indent=1) + "\n")
                os.replace(aside, file)
            print(f"{world} seed {seed}: {file}", flush=True)
            combine(given.out / world)


def one(world: str, seed: int, preset: str, threads: int) -> dict[str, Any]:
    """A world of this seed, evaluated with models of this seed."""
    from models.dataset import load
    from models.evaluate import evaluate
    from models.train_settings import TrainSettings
    from topics import simulator

    shape, users, hours, vm = WORLDS[world]
    with tempfile.TemporaryDirectory(prefix="solaris-evaluate-") as folder:
        log = Path(folder) / "log.jsonl"
        simulator.write(simulator.preset(shape).with_(users=users, hours=hours, seed=seed), log)
        data = load(log)
    return evaluate(data, TrainSettings(preset=preset, vm=vm, threads=threads), [seed])


def combine(folder: Path) -> None:
    """report.json, report.txt and plots over the seeds that are there."""
    from models.evaluate import summarise
    from models.report import write

    each = [json.loads(f.read_text()) for f in sorted(folder.glob("seed-*.json"))]
    runs = [run for result in each for run in result["runs"]]
    write({**each[0], **summarise(runs), "data_sha256": [r["data_sha256"] for r in each], "runs": runs}, folder)


if __name__ == "__main__":
    main()
