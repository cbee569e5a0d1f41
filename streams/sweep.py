"""A grid of backtests over processes, one thread each. The numbers do not depend on how many processes there are.

The FM's logits of the impressions depend on the log alone, so one point computes them and all points are judged with
them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streams.backtest import BacktestConfig, BacktestResult, Scored, backtest, validate
from streams.backtest_report import summarise
from streams.conditions import conditions, cores
from streams.durations import parse_ms
from topics.errors import SettingsError, SolarisError

DURATIONS = ("ttl", "window", "burst", "delay", "pair_delay", "state_delay")
NUMBERS = ("budget", "share", "threshold", "top_k", "per_user_cap")
_WHOLE = ("top_k", "per_user_cap")
CHOICES = {"refresh": ("on_change", "ttl")}
MAX_POINTS = 1_000
_ARRAYS = ("users", "ts_ms", "splits", "label", "known", "vm", "solaris", "source", "age_ms")
_LEFT_OUT = ("histograms", "coverage_over_time")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

Point = dict[str, str]


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """``["budget=10,100,ttl=1h,6h", "refresh=ttl"]`` -> values by axis, as written. Raises `SettingsError`."""
    axes: dict[str, list[str]] = {}
    for text in texts:
        axis = None
        for word in text.split(","):
            name, equals, value = word.partition("=")
            if equals:
                axis, word = name.strip(), value
                if axis in axes:
                    raise SettingsError("--grid", text, f"names {axis} twice; give all of its values at once")
                axes[axis] = []
            if axis is None or not word.strip():
                raise SettingsError("--grid", text, "write axis=value,value, as in budget=10,100,ttl=1h,6h")
            if word.strip() not in axes[axis]:
                axes[axis].append(word.strip())
    if not axes:
        raise SettingsError("--grid", "", "name at least one axis, as in budget=10,100,0")
    if "delay" in axes and ("pair_delay" in axes or "state_delay" in axes):
        raise SettingsError("--grid", "delay", "is pair_delay and state_delay at once; name it or them")
    for axis, values in axes.items():
        for value in values:
            number(axis, value)
    return axes


def number(axis: str, value: str) -> float | None:
    """`value` as a number (ms for durations); None for an axis of words. Raises `SettingsError`."""
    if axis in DURATIONS:
        return float(parse_ms(f"--grid {axis}", value))
    if axis in CHOICES:
        if value not in CHOICES[axis]:
            raise SettingsError(f"--grid {axis}", value, f"use one of {', '.join(CHOICES[axis])}")
        return None
    if axis not in NUMBERS:
        known = ", ".join((*NUMBERS, *DURATIONS, *CHOICES))
        raise SettingsError("--grid", axis, f"there is no such axis; known: {known}")
    try:
        found = int(value) if axis in _WHOLE else float(value)
    except ValueError:
        raise SettingsError(f"--grid {axis}", value, "give a number") from None
    most = 1.0 if axis in ("share", "threshold") else 1e12
    if not 0 <= found <= most:
        raise SettingsError(f"--grid {axis}", value, f"give a number from 0 to {most:g}")
    return float(found)


def points(axes: Mapping[str, Sequence[str]], each: bool = False) -> list[Point]:
    """All combinations; with `each` the values of one axis at a time, the others as the base config has them."""
    if each:
        out = [{axis: v} for axis, values in axes.items() for v in values]
    else:
        out = [dict(zip(axes, combined, strict=True)) for combined in itertools.product(*axes.values())]
    if len(out) > MAX_POINTS:
        raise SettingsError("--grid", len(out), f"is the number of points; {MAX_POINTS} at most (try --each)")
    return out


def configured(base: BacktestConfig, point: Point) -> BacktestConfig:
    """`base` with the point's settings. Raises `SettingsError` when they contradict each other."""
    gate: dict[str, Any] = {}
    store: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for axis, text in point.items():
        value = number(axis, text)
        match axis:
            case "refresh":
                own["refresh"] = text
            case "delay":
                own["pair_delay_ms"] = own["state_delay_ms"] = int(value or 0)
            case "pair_delay" | "state_delay":
                own[f"{axis}_ms"] = int(value or 0)
            case "ttl" | "window":
                store[f"{axis}_ms"] = int(value or 0)
            case "burst":
                gate["budget_burst_s"] = (value or 0.0) / 1000
            case "top_k" | "per_user_cap":
                gate[axis] = int(value or 0)
            case "threshold":
                gate["threshold"] = value
            case _:
                gate["budget_pairs_per_s" if axis == "budget" else "budget_share"] = value
    config = dataclasses.replace(
        base, store=dataclasses.replace(base.store, **store), gate=dataclasses.replace(base.gate, **gate), **own
    )
    validate(config)
    return config


@dataclass(frozen=True, slots=True)
class _Task:
    index: int
    log: str
    sources: str
    bundle: str
    config: BacktestConfig
    folder: str


def run(
    log: Path,
    sources: str,
    bundle: Path,
    base: BacktestConfig,
    grid: Sequence[Point],
    processes: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Backtests every point -> ``{"points": [{"settings": ..., **report}], "log": ..., "conditions": ...}``.

    `processes` 0 is one per core. `progress` gets (steps done, steps in all). Raises `SolarisError`, also when a
    process was killed.
    """
    from topics.readers import EventLog

    EventLog(log, sources)  # what is wrong with either is said here, before processes start
    configs = [configured(base, p) for p in grid]
    workers = min(processes or cores(), len(grid))
    with tempfile.TemporaryDirectory(prefix="solaris-sweep-") as folder, _one_thread():
        tasks = [
            _Task(i, str(log), sources, str(bundle), dataclasses.replace(c, with_fm=base.with_fm and i == 0), folder)
            for i, c in enumerate(configs)
        ]
        spawn = multiprocessing.get_context("spawn")
        steps = 2 * len(tasks)
        try:
            with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
                try:
                    done = 0
                    for stage in (_backtest, _judge):
                        waiting = [pool.submit(stage, t) for t in tasks]
                        for future in as_completed(waiting):
                            if (wrong := future.result()) is not None:
                                raise SolarisError(wrong)
                            done += 1
                            if progress is not None:
                                progress(done, steps)
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        except BrokenProcessPool:
            raise SolarisError(
                f"a process of the sweep was killed, probably for memory; use fewer than {workers} (--processes)"
            ) from None
        reports = [json.loads(_report(t).read_text()) for t in tasks]
    return {
        "points": [{"settings": dict(p), **r} for p, r in zip(grid, reports, strict=True)],
        "log": str(log),
        "conditions": conditions(bundle, "cpu", {"processes": workers}),
    }


def table(result: Mapping[str, Any]) -> str:
    """One line a point."""
    axes = list(result["axes"])
    head = [*axes, "direct", "covered", "calls/imp", "hits/call", "VM", "SOLARIS", "FM", "transfer"]
    rows = [[*(p["settings"].get(a, "") for a in axes), *figures(p)] for p in result["points"]]
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)) for row in [head, *rows])


def figures(point: Mapping[str, Any]) -> list[str]:
    """What tables show of a point: coverage, cost, losses, transfer."""
    c, loss, ratio = point["coverage"], point["log_loss"], point.get("transfer_ratio")
    interval = point.get("transfer_ratio_interval")
    within = f" [{interval[0]:.0%}, {interval[1]:.0%}]" if interval else ""
    return [
        f"{c['direct'] or 0:.1%}", f"{1 - (c['none'] or 0):.1%}", f"{point['fm_calls_per_impression'] or 0:.2f}",
        f"{point['hits_per_fm_call'] or 0:.3f}",
        *("n/a" if loss.get(m) is None else f"{loss[m]:.5f}" for m in ("vm", "solaris", "fm")),
        "n/a" if ratio is None else f"{ratio:.0%}{within}",
    ]  # fmt: skip


def _backtest(task: _Task) -> str | None:
    """First stage, in a process of its own: the run, its columns and counters kept in files. Returns what went wrong,
    since not every error can be sent between processes."""
    from models.runtime import open_runtime
    from topics.readers import EventLog

    try:
        runtime = open_runtime(task.bundle, "cpu", 1)
    except SolarisError as e:
        return str(e)
    try:
        result = backtest(EventLog(task.log, task.sources).events(), runtime, task.config)
    except SolarisError as e:
        return str(e)
    finally:
        runtime.close()
    s = result.scored
    columns = {name: getattr(s, name) for name in _ARRAYS}
    np.savez(_columns(task.folder, task.index), **columns)
    if s.fm is not None:
        np.save(_fm(task), s.fm, allow_pickle=False)
    _report(task).write_text(json.dumps(result.counters))
    return None


def _judge(task: _Task) -> None:
    """Second stage, when all runs are there: the report of one of them."""
    with np.load(_columns(task.folder, task.index), allow_pickle=False) as file:
        columns = {name: file[name] for name in _ARRAYS}
    fm = np.load(_fm(task), allow_pickle=False) if _fm(task).exists() else None
    counters = Counter(json.loads(_report(task).read_text()))
    report = summarise(BacktestResult(Scored(ids=[], fm=fm, **columns), counters, None))
    _report(task).write_text(json.dumps({k: v for k, v in report.items() if k not in _LEFT_OUT}, allow_nan=False))


def _columns(folder: str, index: int) -> Path:
    return Path(folder) / f"{index}.npz"


def _fm(task: _Task) -> Path:
    return Path(task.folder) / "fm.npy"


def _report(task: _Task) -> Path:
    return Path(task.folder) / f"{task.index}.json"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Processes that start inside have one thread each in numerical libraries."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
