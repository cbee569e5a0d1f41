"""The evaluation on a small log: every variant is there, is consistent with the others, and the report says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytestmark = pytest.mark.train

from models.dataset import load  # noqa: E402
from models.evaluate import COVERAGE, DELAYS_MS, STALE_MS, STEPS, evaluate, summarise  # noqa: E402
from models.ratios import Ratios  # noqa: E402
from models.report import table, write  # noqa: E402
from models.similar import FORMS  # noqa: E402
from models.train_settings import TrainSettings  # noqa: E402


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from topics.simulator import preset
    from topics.simulator import write as simulate

    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    simulate(preset("tiny").with_(users=120, hours=24.0), path)
    settings = TrainSettings(preset="tiny", epochs=1, vm_epochs=1, threads=1)
    return evaluate(load(path), settings, [3])


def test_every_variant_is_there(result: dict[str, Any]) -> None:
    variants = result["runs"][0]["variants"]
    expected = {"vm", "fm", "soft_label", "fresh_direct", "control_repeat", "control_flags_and_ages"}
    expected |= {name for name, _ in STEPS} | {f"as_served_delay_{d // 1000}s" for d in DELAYS_MS}
    expected |= {f"state_delay_{d // 1000}s" for d in DELAYS_MS} | {f"stale_{s // 3_600_000}h" for s in STALE_MS}
    expected |= {f"coverage_{c:.0%}{kind}" for c in COVERAGE for kind in ("", "_unmatched", "_unmatched_not_gated")}
    expected |= {f"{kind}_{form}" for form in FORMS for kind in ("cold", "as_served_direct")}
    expected |= {f"control_{c}{more}" for c in ("counters", "rolling") for more in ("", "_and_state", "_and_slots")}
    expected.add("control_rolling_unknown")
    assert variants.keys() == expected
    assert all(np.isfinite(v["log_loss"]) and 0 < v["log_loss"] < 1 for v in variants.values())
    assert set(result["transfer_ratio"]) == {"direct", "as_served", "with_fallbacks", "soft_label"}


def test_a_mask_costs_a_gated_vm_nothing_but_coverage(result: dict[str, Any]) -> None:
    variants = result["runs"][0]["variants"]
    assert variants["coverage_100%_unmatched"] == variants["coverage_100%_unmatched_not_gated"]
    assert variants["coverage_100%_unmatched"]["log_loss"] == variants["fresh_direct"]["log_loss"]


def test_what_a_variant_costs(result: dict[str, Any]) -> None:
    run = result["runs"][0]
    calls = {name: v["fm_calls_per_impression"] for name, v in run["variants"].items() if name.startswith("as_served_d")
             and "delay" not in name}  # fmt: skip
    assert calls["as_served_direct"] == {"pairs": run["fm_pairs_per_impression"], "states": 0.0}
    assert calls["as_served_direct_aggregate_topic_state"]["states"] == run["fm_states_per_impression"] > 0
    assert run["variants"]["as_served_state_only"]["fm_calls_per_impression"]["pairs"] == 0


def test_gains_are_there_where_a_ratio_is_not(result: dict[str, Any]) -> None:
    """The share of the VM's loss, and of the counters', that a variant saves, whatever the FM itself gains."""
    variants = result["runs"][0]["variants"]
    for name, entry in variants.items():
        if name == "vm":
            continue
        gain = entry["gain"]
        assert gain["gain"] == pytest.approx(1 - entry["log_loss"] / variants["vm"]["log_loss"], abs=1e-4)
        assert gain["interval"][0] <= gain["interval"][1]
    for control in ("counters", "rolling"):
        both, alone = variants[f"control_{control}_and_state"], variants[f"control_{control}"]
        gain = both[f"gain_over_{control}"]["gain"]
        assert gain == pytest.approx(1 - both["log_loss"] / alone["log_loss"], abs=1e-4)
    assert "loss below hand counters" in table(result)
    assert "loss below rolling counts" in table(result)


def test_no_ratio_where_the_fm_gains_nothing() -> None:
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(50, dtype=np.uint64), 20)
    anchor = rng.random(1000)
    assert Ratios(users, anchor, anchor * 0.995).of(anchor) is None
    noisy = Ratios(users, anchor, np.roll(anchor, 7) * 0.985)
    assert noisy.gain > 0.01
    assert not noisy.mean_something
    assert noisy.of(anchor) is None


def test_ratios_are_between_the_anchor_and_the_fm() -> None:
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(50, dtype=np.uint64), 20)
    anchor = 1 + rng.random(1000)
    ratios = Ratios(users, anchor, anchor * 0.9)
    for share in (0.0, 0.5, 1.0):
        got = ratios.of(anchor * (1 - 0.1 * share))
        assert got is not None
        assert got["ratio"] == pytest.approx(share, abs=1e-4)
        assert got["interval"] == pytest.approx([share, share], abs=1e-4)
    half = np.arange(1000) < 500
    loss = np.where(half, anchor * 0.9, anchor)
    assert ratios.of(loss, half)["ratio"] == 1  # type: ignore[index]
    assert ratios.of(loss, ~half)["ratio"] == 0  # type: ignore[index]


def test_a_mean_ratio_needs_every_seed() -> None:
    def run(seed: int, ratio: float | None) -> dict[str, Any]:
        one = {"log_loss": 0.1 * seed, "transfer_ratio": None if ratio is None else {"ratio": ratio}}
        return {"seed": seed, "variants": {"as_served": one}}

    both = summarise([run(1, 0.5), run(2, 0.7)])
    assert both["transfer_ratio"]["with_fallbacks"] == 0.6
    assert both["seeds"] == [1, 2]
    assert summarise([run(1, 0.5), run(2, None)])["transfer_ratio"]["with_fallbacks"] is None


def test_the_report_is_written(result: dict[str, Any], tmp_path: Path) -> None:
    write(result, tmp_path / "r")
    saved = json.loads((tmp_path / "r" / "report.json").read_text())
    assert saved["transfer_ratio"] == result["transfer_ratio"]
    text = (tmp_path / "r" / "report.txt").read_text()
    assert text == table(result) + "\n"
    for name in ("control_repeat", "cold_random", "as_served_direct_neighbours"):
        assert name in text
