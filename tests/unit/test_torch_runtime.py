"""torch and ONNX Runtime give the same numbers behind one interface; a program that is more than data is refused."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytestmark = pytest.mark.train

from models.api import Slots  # noqa: E402
from models.bundle import Bundle, write_bundle  # noqa: E402
from models.dataset import load  # noqa: E402
from models.nets import PairFm, StateFm, Vm, VmPlus  # noqa: E402
from models.probe import probe_batch  # noqa: E402
from models.program import check  # noqa: E402
from models.runtime import OnnxRuntime  # noqa: E402
from models.torch_runtime import TorchRuntime, open_torch_runtime, read_programs  # noqa: E402
from models.train import Trainer  # noqa: E402
from models.train_settings import TrainSettings  # noqa: E402
from topics.errors import BundleError, DeviceError  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bundle` and `programs` of networks as they are initialised."""
    from topics.simulator import preset, write

    path = tmp_path_factory.mktemp("torch")
    write(preset("tiny").with_(users=60, hours=12.0), path / "log.jsonl")
    t = Trainer(load(path / "log.jsonl"), TrainSettings(preset="tiny", threads=1))
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


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[OnnxRuntime, TorchRuntime]:
    runtime = open_torch_runtime(folder / "bundle", folder / "programs")
    return OnnxRuntime(_bundle(folder)), runtime


def _bundle(folder: Path) -> Bundle:
    from models.bundle import read_bundle

    return read_bundle(folder / "bundle")


@pytest.mark.parametrize(("b", "n"), [(1, 1), (2, 2), (40, 1000)])
def test_the_same_numbers(both: tuple[OnnxRuntime, TorchRuntime], b: int, n: int) -> None:
    onnx, other = both
    batch = probe_batch(onnx.info.spec, b, n, seed=5)
    for mine, theirs in (
        (other.score(batch).logit, onnx.score(batch).logit),
        (other.score(batch).profile, onnx.score(batch).profile),
        (other.embed(batch), onnx.embed(batch)),
        (other.user_state(batch), onnx.user_state(batch)),
        *zip(
            other.item_vectors(batch.items, batch.item_features), onnx.item_vectors(batch.items, batch.item_features),
            strict=True,
        ),
    ):  # fmt: skip
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)
    rng = np.random.default_rng(n)
    slots = Slots.empty(n, onnx.info.dim, onnx.info.dots)
    for name in onnx.info.slots:
        age = np.where(rng.random(n) < 0.5, rng.integers(0, 10**7, n), -1)
        getattr(slots, name + "_age_ms")[:] = age
        values = getattr(slots, name)
        values[:] = np.where(age[:, None] >= 0, rng.normal(size=values.shape), 0)
    np.testing.assert_allclose(other.score_plus(batch, slots), onnx.score_plus(batch, slots), rtol=1e-3, atol=1e-4)


def test_nothing_in_nothing_out(both: tuple[OnnxRuntime, TorchRuntime]) -> None:
    _, other = both
    batch = probe_batch(other.info.spec, 3, 9, seed=5)
    none = type(batch)(
        batch.users[:0], batch.ts_ms[:0], batch.splits[:1], batch.items[:0], batch.item_features[:, :0],
        batch.request_features[:0], batch.history[:0], batch.history_ts[:0], batch.history_kind[:0],
        batch.history_splits[:1], batch.history_features[:, :0],
    )  # fmt: skip
    assert other.embed(none).shape == (0, other.info.dim)
    assert other.user_state(none).shape == (0, other.info.state_dim)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_silent_fallback_to_the_cpu(folder: Path) -> None:
    with pytest.raises(DeviceError, match="sees 0 GPUs"):
        TorchRuntime(_bundle(folder), read_programs(folder / "programs"), "cuda")
    with pytest.raises(DeviceError, match="tensorrt"):
        TorchRuntime(_bundle(folder), read_programs(folder / "programs"), "tensorrt")


def test_a_graph_without_a_program_is_refused(folder: Path) -> None:
    programs = read_programs(folder / "programs")
    with pytest.raises(BundleError, match="vm_plus"):
        TorchRuntime(_bundle(folder), {k: v for k, v in programs.items() if k != "vm_plus"})
    with pytest.raises(BundleError, match="no output"):
        TorchRuntime(_bundle(folder), {**programs, "fm_user": programs["fm_item"]})


def test_what_torch_would_run_is_refused(folder: Path) -> None:
    good = (folder / "programs" / "fm_user.pt2").read_bytes()
    check(good)

    def changed(part: str, change: object = None, extra: str = "") -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(out, "w") as new:
            for info in old.infolist():
                data = old.read(info)
                new.writestr(info.filename, change(data) if info.filename.endswith(part) else data)  # type: ignore[operator]
            if extra:
                new.writestr(extra, b"x")
        return out.getvalue()

    def pickled(data: bytes) -> bytes:
        config = json.loads(data)
        next(iter(config["config"].values()))["use_pickle"] = True
        return json.dumps(config).encode()

    def code(data: bytes) -> bytes:
        symbol = "Symbol('"
        assert symbol in data.decode()
        return data.decode().replace(symbol, "__import__('os').system('", 1).encode()

    def call(data: bytes) -> bytes:
        return data.decode().replace("Symbol('", "exec('", 1).encode()

    for name, bad in {
        "pickled": changed("model_weights_config.json", pickled),
        "sample inputs": changed("sample_inputs/model.pt", lambda _: b"\x80\x04N."),
        "arithmetic": changed("models/model.json", code),
        "no arithmetic": changed("models/model.json", call),
        "no place": changed("no such part", None, "archive/data/constants/custom_obj_0"),
        "archive": good[: len(good) // 2],
    }.items():
        with pytest.raises(BundleError, match=name):
            check(bad)
