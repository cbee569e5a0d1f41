"""The evaluation as a table, JSON, and plots (plots where matplotlib is installed)."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

COLUMNS = (
    ("gain", "loss below the VM's"),
    ("transfer_ratio", "ratio over the VM"),
    ("over_repeat", "over repeat flag and age"),
    ("over_counters", "over hand counters"),
    ("gain_over_counters", "loss below hand counters"),
    ("gain_over_rolling", "loss below rolling counts"),
    ("recovery_without_direct", "without a direct hit"),
)
"""of a variant: the share of the VM's loss that it saves, transfer ratios against the VM and against two controls, the
share that it saves of the loss with hand counters and of that with rolling counts, and the ratio on the pairs without a
direct hit"""


def table(result: dict[str, Any]) -> str:
    """A line a variant: mean log loss and ratios over the seeds (lowest and highest in brackets), and FM calls."""
    runs = result["runs"]
    lines = [f"FM {result['fm']}, VM {result['vm']}, seeds {', '.join(str(r['seed']) for r in runs)}"]
    for r in runs:
        gain = f"{r['fm_gain']:.2%} [{_range(r['fm_gain_interval'])}]"
        over = "".join(f", {k} {g['gain']:.2%} [{_range(g['interval'])}]" for k, g in r["fm_gain_over"].items())
        lines.append(
            f"seed {r['seed']}: {r['test_pairs']:,} pairs, CTR {r['ctr']:.2%}; FM gains over VM {gain}{over}; coverage "
            + ", ".join(f"{k} {v:.1%}" for k, v in r["coverage"].items())
        )
    lines.append("")
    shown = [(k, t) for k, t in COLUMNS if any(r["variants"][n].get(k) for r in runs for n in r["variants"])]
    lines.append(f"{'':<40} {'log loss':>8}" + "".join(f"  {title:>26}" for _, title in shown) + "  FM calls")
    for name, mean in result["mean"].items():
        each = [r["variants"][name] for r in runs]
        cells = "".join(f"  {_cell([e.get(key) for e in each]):>26}" for key, _ in shown)
        calls = each[0].get("fm_calls_per_impression")
        cost = f"  {calls['pairs']:g} pairs, {calls['states']:g} states" if calls else ""
        lines.append(f"{name:<40} {mean['log_loss']:>8.5f}{cells}{cost}".rstrip())
    lines.append("")
    lines.append("A ratio is left out where the FM gains under 1 % or the interval of its gain spans zero.")
    return "\n".join(lines)


def _cell(ratios: list[dict[str, Any] | None]) -> str:
    """Mean ratio or gain; with one seed its interval over users, with more the lowest and the highest seed."""
    known = [x for x in ratios if x is not None]
    if not known or len(known) < len(ratios):
        return ""
    key, digits = ("ratio", 0) if "ratio" in known[0] else ("gain", 2)
    values = [float(x[key]) for x in known]
    bounds = known[0]["interval"] if len(known) == 1 else [min(values), max(values)]
    return f"{sum(values) / len(values):.{digits}%} [{bounds[0]:.{digits}%}, {bounds[1]:.{digits}%}]"


def write(result: dict[str, Any], out: Path) -> None:
    """report.json, report.txt and, with matplotlib, one plot each for coverage, staleness, delay and fallbacks."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "report.txt").write_text(table(result) + "\n")
    if find_spec("matplotlib") is None:
        return
    mean = result["mean"]

    def curve(prefix: str, suffix: str = "") -> tuple[list[str], list[float]]:
        names = [n for n in mean if n.startswith(prefix) and n.endswith(suffix) and "unmatched" not in n]
        return [n.removeprefix(prefix) for n in names], [mean[n]["log_loss"] for n in names]

    steps = [n for n in mean if n.startswith("as_served") and "delay" not in n]
    _plot(out / "coverage.svg", "coverage of fresh embeddings", *curve("coverage_"), mean)
    _plot(out / "staleness.svg", "age of the pair embedding", *curve("stale_"), mean)
    _plot(out / "delay.svg", "event to servable vector, all slots", *curve("as_served_delay_"), mean)
    _plot(out / "delay-state.svg", "event to servable vector, state slot", *curve("state_delay_"), mean)
    _plot(
        out / "fallbacks.svg", "slots as served",
        [n.removeprefix("as_served").removeprefix("_").replace("_", " ") or "all" for n in steps],
        [mean[n]["log_loss"] for n in steps], mean,
    )  # fmt: skip


def _plot(path: Path, title: str, labels: list[str], values: list[float], mean: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    words = any(" " in label for label in labels)  # names, with no order among them: points and slanted names
    axes.plot(labels, values, marker="o", linestyle="" if words else "-")
    for name in ("vm", "fm"):
        axes.axhline(mean[name]["log_loss"], linestyle="--", color="grey")
        axes.annotate(name, (0, mean[name]["log_loss"]), xytext=(4, 3), textcoords="offset points")
    axes.set_title(title)
    axes.set_ylabel("log loss")
    if words:
        plt.setp(axes.get_xticklabels(), rotation=35, ha="right", rotation_mode="anchor", fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _range(interval: list[float]) -> str:
    return f"{interval[0]:.1%}, {interval[1]:.1%}"
