"""int8: a bundle with it passes the whole check, its numbers depend on no other pair, and its error is what is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytestmark = pytest.mark.train

from models.bundle import Bundle, read_bundle, write_bundle  # noqa: E402
from models.dataset import Dataset, load  # noqa: E402
from models.features import requests  # noqa: E402
from models.quantise import compare, int8  # noqa: E402
from models.runtime import OnnxRuntime  # noqa: E402
from streams.settings import DEMO_BUNDLE  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    from topics.simulator import preset, write

    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    write(preset("tiny").with_(users=60, hours=24.0), path)
    return load(path, read_bundle(DEMO_BUNDLE).info.spec)


@pytest.fixture(scope="module")
def quantised(data: Dataset) -> bytes:
    bundle = read_bundle(DEMO_BUNDLE)
    given = bundle.manifest.graphs["fm_pair"].inputs, bundle.info.spec, data.catalogue.topic_column
    return int8(bundle.graphs["fm_pair"], *given, [requests(data.impressions, 0, 100)])


@pytest.fixture(scope="module")
def bundle(quantised: bytes, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """As served: written and checked whole, a run in several batch sizes among it."""
    demo = read_bundle(DEMO_BUNDLE)
    graphs = {**demo.graphs, "fm_pair": quantised}
    return write_bundle(tmp_path_factory.mktemp("bundle") / "int8", demo.manifest, graphs)


def test_vectors_of_int8_and_float32_never_meet(bundle: Bundle) -> None:
    assert bundle.info.fm_hash != read_bundle(DEMO_BUNDLE).info.fm_hash


def test_a_pair_does_not_depend_on_its_batch(bundle: Bundle, data: Dataset) -> None:
    runtime = OnnxRuntime(bundle)
    whole = runtime.embed(requests(data.impressions, 0, 40))
    alone = np.concatenate([runtime.embed(requests(data.impressions, b, b + 1)) for b in range(40)])
    np.testing.assert_allclose(alone, whole, rtol=1e-4, atol=1e-4)


def test_the_error_is_measured(bundle: Bundle, data: Dataset, quantised: bytes) -> None:
    demo = read_bundle(DEMO_BUNDLE)
    batch = requests(data.impressions, 100, 160)
    label = data.clicked[int(data.impressions.splits[100]) : int(data.impressions.splits[160])]
    given = demo.manifest.graphs["fm_pair"].inputs, demo.info.spec, data.catalogue.topic_column
    got = compare(demo.graphs["fm_pair"], quantised, *given, [batch], label)
    error = np.abs(OnnxRuntime(bundle).embed(batch) - OnnxRuntime(demo).embed(batch))
    assert got["logit_max_error"] == pytest.approx(error[:, -1].max(), abs=1e-4)
    assert got["embedding_mean_error"] == pytest.approx(error[:, :-1].mean(), abs=1e-4)
    assert 0 < got["logit_mean_error"] < 0.1
    assert got["log_loss_int8"] == pytest.approx(got["log_loss_float32"], abs=0.01)
    assert (got["bytes_float32"], got["bytes_int8"]) == (len(demo.graphs["fm_pair"]), len(quantised))
    same = compare(demo.graphs["fm_pair"], demo.graphs["fm_pair"], *given, [batch], label)
    assert same["embedding_max_error"] == same["logit_max_error"] == 0


def test_int8_is_smaller_where_matrices_are_large(tmp_path: Path) -> None:
    """Of a graph that is one wide product, a quarter is left."""
    import io

    import torch

    from models.api import FeatureSpec
    from models.bundle import Input
    from models.probe import probe_batch

    spec = FeatureSpec(history_length=5)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 17)).eval()
    file = io.BytesIO()
    torch.onnx.export(
        layer, (torch.zeros(3, 64),), file, input_names=["item_code"], output_names=["embedding"],
        dynamic_axes={"item_code": {0: "n"}, "embedding": {0: "n"}}, opset_version=18, dynamo=False,
    )  # fmt: skip
    small = int8(file.getvalue(), {"item_code": Input("item_code")}, spec, -1, [probe_batch(spec, 4, 200, seed=1)])
    assert len(small) < 0.4 * len(file.getvalue())
