"""How fast simulated logs are written, and what they are like.

    python benchmarks/simulate.py --preset day --users 10000 --hours 6
    python benchmarks/simulate.py --preset demo --measure

The rate is per second of processor time of this process (the simulator uses one core), after compiling; the wall-clock
rate is given beside it. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from topics.readers import open_log
from topics.simulator import PRESETS, preset, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="day")
    parser.add_argument("--users", type=int)
    parser.add_argument("--hours", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3, help="the fastest run counts")
    parser.add_argument("--measure", action="store_true", help="also the figures of docs/simulator.md (slow)")
    args = parser.parse_args()
    changes = {k: getattr(args, k) for k in ("users", "hours", "seed") if getattr(args, k) is not None}
    config = preset(args.preset).with_(**changes)

    with tempfile.TemporaryDirectory() as folder:
        log, truth = Path(folder, "log.jsonl"), Path(folder, "truth.npz")
        begin = time.perf_counter()
        write(preset("tiny"), log)
        compile_s = time.perf_counter() - begin
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cpu, wall = [], []
        for _ in range(args.repeat):
            c, w = time.process_time(), time.perf_counter()
            summary = write(config, log, truth if args.measure else None)
            cpu.append(time.process_time() - c)
            wall.append(time.perf_counter() - w)
        report = {
            "preset": args.preset,
            **changes,
            **{name: getattr(summary, name) for name in summary.__struct_fields__},
            "ctr": round(summary.ctr, 4),
            "cpu_s": round(min(cpu), 3),
            "wall_s": round(min(wall), 3),
            "candidate_pairs_per_cpu_s": round(summary.candidate_pairs / min(cpu)),
            "candidate_pairs_per_wall_s": round(summary.candidate_pairs / min(wall)),
            "all_pairs_per_cpu_s": round((summary.candidate_pairs + summary.ads) / min(cpu)),
            "mb_per_cpu_s": round(summary.bytes / min(cpu) / 1e6, 1),
            "first_run_s": round(compile_s, 2),
            "memory_growth_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
            "load_average": os.getloadavg()[0],
        }
        if args.measure:
            from topics.simulator.measure import history_match, measure

            delays = (0.0, 2.0, 10.0, 60.0) if config.switch_ms < 600_000 else (0.0, 3_600.0, 21_600.0)
            figures = measure(open_log(log, None), np.load(truth)["p"], delays)
            report |= {k: round(v, 4) for k, v in (figures | history_match(open_log(log, None))).items()}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
