"""The evaluation as a table, JSON, and plots (plots where matplotlib is installed)."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def table(result: dict[str, Any]) -> str:
    """One line a variant: log loss, and the transfer ratio of each seed with its interval where one is given."""
    gains = ", ".join(f"{r['fm_gain']:.2%} [{_range(r['fm_gain_interval'])}]" for r in result["runs"])
    lines = [f"FM {result['fm']} over VM {result['vm']}: gain {gains}"]
    for name, mean in result["mean"].items():
        ratios = [r["variants"][name].get("transfer_ratio") for r in result["runs"]]
        shown = "  ".join(f"{x['ratio']:.0%} [{_range(x['interval'])}]" for x in ratios if x)
        lines.append(f"  {name:<36} {mean['log_loss']:.5f}  {shown}")
    first = result["runs"][0]
    lines.append("coverage " + ", ".join(f"{k} {v:.1%}" for k, v in first["coverage"].items()))
    lines.append(
        f"FM calls an impression: {first['fm_pairs_per_impression']} pairs, {first['fm_states_per_impression']} states"
    )
    return "\n".join(lines)


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
    _plot(
        out / "fallbacks.svg", "slots as served", [n.removeprefix("as_served") or "all" for n in steps],
        [mean[n]["log_loss"] for n in steps], mean,
    )  # fmt: skip


def _plot(path: Path, title: str, labels: list[str], values: list[float], mean: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(labels, values, marker="o")
    for name in ("vm", "fm"):
        axes.axhline(mean[name]["log_loss"], linestyle="--", color="grey")
        axes.annotate(name, (0, mean[name]["log_loss"]), xytext=(4, 3), textcoords="offset points")
    axes.set_title(title)
    axes.set_ylabel("log loss")
    axes.tick_params(axis="x", labelrotation=20)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _range(interval: list[float]) -> str:
    return f"{interval[0]:.1%}, {interval[1]:.1%}"
