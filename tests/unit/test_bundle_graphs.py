"""Graphs of a foreign bundle: what is refused, and that a hand-made model serves. Needs the onnx package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.api import NO_SCORE, Feature, FeatureSpec, PairBatch, Slots
from models.bundle import Bundle, Dims, Graph, Input, Manifest, Model, load_bundle, write_bundle
from models.probe import probe_batch
from models.runtime import OnnxRuntime
from streams.gate import Gate, GateSettings
from topics.errors import BundleError

onnx = pytest.importorskip("onnx")
pytestmark = pytest.mark.train

SPEC = FeatureSpec(item=(Feature("price"),), history_length=4)


def vm_graph(n: Any = "pairs", weight: float = 0.5, external: bool = False) -> bytes:
    """logit = weight * price."""
    from onnx import TensorProto, helper, numpy_helper

    w = numpy_helper.from_array(np.array([[weight]], np.float32), "w")
    if external:
        w.data_location = TensorProto.EXTERNAL
        entry = w.external_data.add()
        entry.key, entry.value = "location", "secret.bin"
        w.ClearField("raw_data")
    shape = numpy_helper.from_array(np.array([-1], np.int64), "shape")
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["item_features", "w"], ["m"]),
            helper.make_node("Reshape", ["m", "shape"], ["logit"]),
        ],
        "vm",
        [helper.make_tensor_value_info("item_features", TensorProto.FLOAT, [n, 1])],
        [helper.make_tensor_value_info("logit", TensorProto.FLOAT, [n])],
        [w, shape],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def bundle_of(path: Path, data: bytes) -> Bundle:
    manifest = Manifest(
        format=1, vm=Model("mine", "3"), fm=Model("none", "0"), spec=SPEC, dims=Dims(), slots=(),
        graphs={"vm": Graph("vm.onnx", "", 0, {"item_features": Input("item_features")})},
    )  # fmt: skip
    return write_bundle(path, manifest, {"vm": data})


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "mine", vm_graph())
    runtime = OnnxRuntime(load_bundle(bundle.path))
    batch = probe_batch(SPEC, 3, 9, seed=0)
    np.testing.assert_allclose(runtime.score(batch).logit, batch.item_features[0] * 0.5, rtol=1e-6)
    assert runtime.embed(batch).shape == (9, 0)
    assert runtime.user_state(batch).shape == (3, 0)
    assert runtime.info.vm == "mine@3"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (vm_graph(n=7), "dynamic"),
        (vm_graph(weight=float("nan")), "finite"),
        (vm_graph(external=True), "another file"),
    ],
    ids=["fixed batch", "not finite", "external data"],
)
def test_refused(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(BundleError, match=says):
        bundle_of(tmp_path / "bad", data)
    assert not (tmp_path / "bad").exists()


def test_scores_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "mine", vm_graph(weight=1e30))
    runtime = OnnxRuntime(bundle)
    batch: PairBatch = probe_batch(SPEC, 1, 2, seed=0)
    batch.item_features[0] = [1.0, 1e20]
    logit = runtime.score(batch).logit
    assert logit[1] == NO_SCORE
    assert logit[0] > 1e29
    assert runtime.non_finite == 1


def test_an_ad_without_a_score_goes_last_and_its_pair_is_not_worth_a_call(tmp_path: Path) -> None:
    runtime = OnnxRuntime(bundle_of(tmp_path / "mine", vm_graph(weight=1e30)))
    batch: PairBatch = probe_batch(SPEC, 1, 3, seed=0)
    batch.item_features[0] = [-1e-30, 1e20, -2e-30]
    logit = runtime.score_plus(batch, Slots.empty(3, runtime.info.dim, runtime.info.dots))
    assert np.argsort(-logit).tolist()[-1] == 1
    gate = Gate(GateSettings())
    assert gate.decide(1, 1_000, logit).tolist() == [0, 2]
    assert gate.refused["below_threshold"] == 1
