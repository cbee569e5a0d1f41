"""Rolling counts through both runtimes: heeded where known, the same as none where unknown, whatever the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytestmark = pytest.mark.train

from models.api import PairBatch, Slots  # noqa: E402
from models.bundle import load_bundle, write_bundle  # noqa: E402
from models.dataset import load  # noqa: E402
from models.features import requests  # noqa: E402
from models.nets import PairFm, StateFm, Vm, VmPlus  # noqa: E402
from models.probe import probe_batch  # noqa: E402
from models.rolling import pick  # noqa: E402
from models.runtime import OnnxRuntime  # noqa: E402
from models.torch_runtime import TorchRuntime, read_programs  # noqa: E402
from models.train import Trainer  # noqa: E402
from models.train_settings import TrainSettings  # noqa: E402
from state.counts import Counts  # noqa: E402

SMALL = {"max_pairs": 7, "max_requests": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bundle` and `programs` of a VM with rolling counts, as it is initialised."""
    from topics.simulator import preset, write

    path = tmp_path_factory.mktemp("rolling")
    write(preset("tiny").with_(users=60, hours=12.0), path / "log.jsonl")
    t = Trainer(load(path / "log.jsonl"), TrainSettings(preset="tiny", counters="rolling", threads=1))
    nets = (
        PairFm(t.spec, t.fm_size).eval(), StateFm(t.spec, t.fm_size).eval(), Vm(t.spec, t.vm_size).eval(),
        VmPlus(t.spec, t.slot_width, t.vm_size, t.age_columns).eval(),
    )  # fmt: skip
    graphs, inputs = t.graphs(*nets)
    write_bundle(path / "bundle", t.manifest(graphs, inputs, {}), graphs)
    (path / "programs").mkdir()
    for name, data in t.programs(*nets).items():
        (path / "programs" / f"{name}.pt2").write_bytes(data)
    return path


def opened(kind: str, folder: Path, **options: int) -> OnnxRuntime:
    bundle = load_bundle(folder / "bundle")
    if kind == "torch":
        return TorchRuntime(bundle, read_programs(folder / "programs"), **options)
    return OnnxRuntime(bundle, **options)


@pytest.fixture(scope="module", params=["onnx", "torch"])
def runtime(request: pytest.FixtureRequest, folder: Path) -> OnnxRuntime:
    return opened(request.param, folder)


def batch_of(runtime: OnnxRuntime) -> PairBatch:
    return probe_batch(runtime.info.spec, 9, 60, seed=5)


def counts_of(batch: PairBatch, seed: int = 0) -> Counts:
    rng = np.random.default_rng(seed)
    counts = Counts.unknown(batch.requests, batch.pairs)
    counts.known[:] = np.arange(batch.requests) % 3 != 0
    for name in ("item_shown_hour", "item_shown_day", "item_clicked_day", "pair_shown", "user_shown", "user_clicked"):
        values = getattr(counts, name)
        values[:] = rng.integers(0, 500, len(values))
    counts.pair_ts_ms[:] = np.repeat(batch.ts_ms, np.diff(batch.splits)) - rng.integers(0, 10**7, batch.pairs)
    return counts


def slots_of(runtime: OnnxRuntime, n: int) -> Slots:
    slots = Slots.empty(n, runtime.info.dim, runtime.info.dots)
    slots.aggregate[:] = np.random.default_rng(3).normal(size=slots.aggregate.shape)
    slots.aggregate_age_ms[:], slots.aggregate_count[:] = 60_000, 3
    return slots


def test_info_says_so(runtime: OnnxRuntime, folder: Path) -> None:
    assert runtime.info.rolling
    graphs = load_bundle(folder / "bundle").manifest.graphs
    sees = {name for name, g in graphs.items() if any(i.source == "rolling" for i in g.inputs.values())}
    assert sees == {"vm", "vm_plus"}
    assert not load_bundle(Path(__file__).parents[2] / "models" / "demo_bundle").info.rolling


def test_known_counts_are_heeded_and_unknown_ones_are_none(runtime: OnnxRuntime) -> None:
    batch = batch_of(runtime)
    counts = counts_of(batch)
    slots = slots_of(runtime, batch.pairs)
    known = np.repeat(counts.known, np.diff(batch.splits))
    without, given = runtime.score_both(batch, slots), runtime.score_both(batch, slots, counts)
    for a, b in zip(without, given, strict=True):
        np.testing.assert_allclose(a[~known], b[~known], rtol=1e-5, atol=1e-6)
        assert (np.abs(a - b)[known] > 1e-4).mean() > 0.9
    np.testing.assert_array_equal(given[0], runtime.score(batch, counts).logit)
    np.testing.assert_array_equal(given[1], runtime.score_plus(batch, slots, counts))
    np.testing.assert_array_equal(without[0], runtime.score(batch).logit)
    nothing = Counts.unknown(batch.requests, batch.pairs)
    np.testing.assert_array_equal(without[1], runtime.score_plus(batch, slots, nothing))
    profiles = runtime.score(batch).profile, runtime.score(batch, counts).profile
    np.testing.assert_allclose(*profiles, rtol=1e-5, atol=1e-6)


def test_pairs_without_a_slot_have_the_base_logit(runtime: OnnxRuntime) -> None:
    batch = batch_of(runtime)
    counts, slots = counts_of(batch), slots_of(runtime, batch.pairs)
    slots.aggregate_age_ms[::2] = -1
    base, plus = runtime.score_both(batch, slots, counts)
    assert base[::2].tobytes() == plus[::2].tobytes()
    assert (base[1::2] != plus[1::2]).any()


def test_each_request_is_given_its_own_counts(runtime: OnnxRuntime, folder: Path) -> None:
    """Alone, and cut into chunks of a few pairs, as in one batch."""
    batch = batch_of(runtime)
    counts, slots = counts_of(batch), slots_of(runtime, batch.pairs)
    _, whole = runtime.score_both(batch, slots, counts)
    kind = "torch" if isinstance(runtime, TorchRuntime) else "onnx"
    assert batch.splits[-1] > 3 * SMALL["max_pairs"]
    base = runtime.score(batch, counts).logit
    for b in range(batch.requests):
        a, z = int(batch.splits[b]), int(batch.splits[b + 1])
        alone = runtime.score(requests(batch, b, b + 1), pick(counts, np.array([b]), np.arange(a, z))).logit
        np.testing.assert_allclose(alone, base[a:z], rtol=1e-4, atol=1e-5)
    small = opened(kind, folder, **SMALL)
    np.testing.assert_allclose(small.score_both(batch, slots, counts)[1], whole, rtol=1e-4, atol=1e-5)


def test_torch_and_onnx_agree(folder: Path) -> None:
    one, other = (opened(kind, folder) for kind in ("onnx", "torch"))
    batch = batch_of(one)
    counts, slots = counts_of(batch), slots_of(one, batch.pairs)
    for a, b in zip(one.score_both(batch, slots, counts), other.score_both(batch, slots, counts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
