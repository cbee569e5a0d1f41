"""The benchmark's own parts: its workload is what the page says, its models run, its statistics are right."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the benchmarks are no package of the application

from benchmarks import scale_sim
from benchmarks.harness import bundle as bench_bundle
from benchmarks.harness.events import ADS, CANDIDATES, LIVE_PER_USER, Workload
from benchmarks.harness.figures import TARGETS, Figures, table
from benchmarks.harness.latency import _id
from models.runtime import open_runtime
from state.api import ChangelogRecord, StoreDims, StoreSettings
from state.reference import ReferenceStore
from topics.events import decode_candidates, decode_impression, decode_item
from topics.ids import hash_id
from topics.packed import decode_precompute


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    patch = pytest.MonkeyPatch()
    patch.setenv("SOLARIS_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
    path = bench_bundle.bundle("light")
    patch.undo()
    return path


def test_models_have_the_sizes_they_claim(bundle: Path) -> None:
    runtime = open_runtime(bundle)  # reads, checks and probes it
    assert runtime.info.dim == 17
    assert set(runtime.info.slots) == {"direct", "topic", "state", "aggregate"}
    assert bench_bundle.VM_WIDTHS == (192, 64, 32, 1)
    assert bench_bundle.flops(bench_bundle.fm_widths(bench_bundle.SIZES["heavy"])) == pytest.approx(20e6, rel=0.02)
    assert bench_bundle.flops(bench_bundle.fm_widths(bench_bundle.SIZES["huge"])) == pytest.approx(500e6, rel=0.02)


def test_half_of_the_ads_are_direct_hits() -> None:
    work = Workload(3, now_ms=1_700_000_000_000)
    store = ReferenceStore(StoreSettings())
    users = 5
    store.apply([ChangelogRecord(i, r.value) for i, r in enumerate(work.state(users, model=9))])
    dims = StoreDims(bench_bundle.EMBEDDING, 6 * 64 + 4 * 32, bench_bundle.PROFILE)
    for r in work.impressions(20, users):
        event = decode_impression(r.value)
        items = np.array([hash_id(a) for a in event.ads], np.uint64)
        found = store.lookup(
            np.array([hash_id(event.user)], np.uint64), np.array([0, len(items)], np.int64), items,
            np.zeros(len(items), np.uint32), np.array([event.ts], np.int64), 9, dims,
        )  # fmt: skip
        direct = int((found.ts_ms >= 0).sum())
        assert len(event.ads) == ADS
        assert ADS // 2 <= direct <= ADS // 2 + 4, "chance hits among the others are few"
        assert found.aggregate_count[0] == LIVE_PER_USER
        assert found.state_ts_ms[0] >= 0


def test_events_keep_the_rules_of_the_bus() -> None:
    work = Workload(1)
    event = decode_candidates(work.candidates(1, 10)[0].value)
    assert len(set(event.items)) == CANDIDATES
    assert decode_item(next(work.catalogue()).value).features["category"] == "c0"
    request = decode_precompute(work.requests(1, 50, 3)[0].value)
    assert len(request.items) == 50
    assert request.spec == bench_bundle.SPEC.hash()


def test_ids_are_found_without_decoding() -> None:
    r = Workload(1).impressions(1, 10, name="x")[0]
    assert _id(r.value) == msgspec.json.decode(r.value)["id"] == "x0"


def test_figures_say_what_missed_its_target() -> None:
    f = Figures()
    f.add("verifier.cpu_over_floor", [1.5, 3.0, 1.9])
    f.add("ranker.impressions_per_cpu_s", 7_000.0)
    f.add("free.text", 3)
    assert f["verifier.cpu_over_floor"] == 1.9
    assert f.missed() == ["ranker.impressions_per_cpu_s"]
    assert set(f.absent()) == set(TARGETS) - {"verifier.cpu_over_floor", "ranker.impressions_per_cpu_s"}
    nested = f.nested()
    assert nested["verifier"]["cpu_over_floor"] == 1.9
    assert nested["detail"]["verifier.cpu_over_floor"]["values"] == [1.5, 3.0, 1.9]
    assert "MISSED" in table(f)


def test_simulated_queue_is_the_textbook_one() -> None:
    """Batches of one without linger are M/D/1: mean wait = load / (2 (1 - load)) service times."""
    queue = scale_sim.Queue(fixed_s=0.0, each_s=0.01, batch_max=1)
    for load in (0.3, 0.7):
        times = scale_sim.simulate(queue, load * queue.capacity, 200_000, seed=4)
        assert np.mean(times) == pytest.approx(0.01 * (1 + load / (2 * (1 - load))), rel=0.05)


def test_a_pause_delays_what_comes_during_it() -> None:
    queue = scale_sim.Queue(fixed_s=0.001, each_s=0.0001, batch_max=100)
    times = scale_sim.simulate(queue, 500.0, 10_000, pause_at=5.0, pause_s=2.0)
    assert 1.9 < times.max() < 2.2
    assert np.median(times) < 0.02


def test_work_grows_with_the_requests() -> None:
    m, s = scale_sim.Measured(), scale_sim.Service()
    one = scale_sim.plan(s, m)
    two = scale_sim.plan(scale_sim.replace(s, requests_per_day=2 * s.requests_per_day), m)
    for key in ("verifier_cores", "ranker_cores", "gpus", "ranked_ads_gb_s"):
        assert two[key] == pytest.approx(2 * one[key])
    assert two["cost_per_million_covered_pairs"] == pytest.approx(one["cost_per_million_covered_pairs"])


def test_the_scale_page_takes_the_tables_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "bench.json"
    run.write_bytes(msgspec.json.encode({"verifier": {"exactly_once": {"cpu_us": 321.0}}, "machine": {"at": "2031"}}))
    m = scale_sim.measured(run)
    assert (m.verifier_us, m.ranker_us, m.at) == (321.0, scale_sim.Measured().ranker_us, "2031")
    assert "Run of 2031: verifier 321 us" in scale_sim.inputs(m)
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    parts = {"inputs": "one", "needs": "two", "queues": "three"}
    filled = scale_sim.fill(page, parts)
    assert filled != page
    assert all(f"-->\n{text}\n<!-- end of {name} -->" in filled for name, text in parts.items())
    with pytest.raises(SystemExit, match="marks of 'none' 0 times"):
        scale_sim.fill(page, {"none": ""})
