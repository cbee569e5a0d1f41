"""The runtime over the demo bundle: shapes, chunking, gating, devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.api import Slots
from models.features import concat, requests, select, take
from models.inputs import slot_columns, slot_width
from models.probe import probe_batch
from models.runtime import OnnxRuntime, _parts, open_runtime
from topics.errors import DeviceError

DEMO = Path(__file__).parents[2] / "models" / "demo_bundle"


@pytest.fixture(scope="module")
def runtime() -> OnnxRuntime:
    return open_runtime(DEMO)


def filled(runtime: OnnxRuntime, n: int, seed: int = 0) -> Slots:
    rng = np.random.default_rng(seed)
    slots = Slots.empty(n, runtime.info.dim, runtime.info.dots)
    for name in runtime.info.slots:
        age = np.where(rng.random(n) < 0.5, rng.integers(0, 10**7, n), -1)
        getattr(slots, name + "_age_ms")[:] = age
        values = getattr(slots, name)
        values[:] = np.where(age[:, None] >= 0, rng.normal(size=values.shape), 0)
    return slots


def test_shapes(runtime: OnnxRuntime) -> None:
    info = runtime.info
    batch = probe_batch(info.spec, 7, 50, seed=5)
    scores = runtime.score(batch)
    assert scores.logit.shape == (50,)
    assert scores.profile.shape == (7, info.profile_dim)
    assert runtime.embed(batch).shape == (50, info.dim)
    assert runtime.user_state(batch).shape == (7, info.state_dim)
    vectors, topics = runtime.item_vectors(batch.items, batch.item_features)
    assert vectors.shape == (50, info.item_dim)
    column = [f.name for f in info.spec.item].index(info.spec.topic or "")
    assert topics.tolist() == batch.item_features[column].astype(np.uint32).tolist()
    assert runtime.dots(runtime.user_state(batch), vectors, batch.splits).shape == (50, info.dots)


def test_nothing_in_nothing_out(runtime: OnnxRuntime) -> None:
    batch = probe_batch(runtime.info.spec, 3, 20, seed=5)
    empty = select(batch, np.zeros(20, bool))
    assert runtime.score(empty).logit.shape == (0,)
    assert runtime.score(empty).profile.shape == (3, runtime.info.profile_dim)
    assert runtime.embed(empty).shape == (0, runtime.info.dim)
    np.testing.assert_allclose(runtime.user_state(empty), runtime.user_state(batch), rtol=1e-5)
    none = requests(batch, 0, 0)
    assert runtime.score(none).profile.shape == (0, runtime.info.profile_dim)
    assert runtime.user_state(none).shape == (0, runtime.info.state_dim)
    assert runtime.item_vectors(none.items, none.item_features)[0].shape == (0, runtime.info.item_dim)
    assert runtime.score_plus(none, filled(runtime, 0)).shape == (0,)


def test_chunks_give_what_the_whole_gives(runtime: OnnxRuntime) -> None:
    small = OnnxRuntime(_bundle(), max_pairs=16, max_requests=3)
    batch = probe_batch(runtime.info.spec, 12, 200, seed=8)
    np.testing.assert_allclose(small.score(batch).logit, runtime.score(batch).logit, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(small.score(batch).profile, runtime.score(batch).profile, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(small.embed(batch), runtime.embed(batch), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(small.user_state(batch), runtime.user_state(batch), rtol=1e-4, atol=1e-5)
    slots = filled(runtime, 200)
    np.testing.assert_allclose(small.score_plus(batch, slots), runtime.score_plus(batch, slots), rtol=1e-4, atol=1e-5)


def test_parts_cover_every_pair_once() -> None:
    splits = np.array([0, 5, 5, 45, 50, 52], np.int64)
    parts = list(_parts(splits, 16, 2))
    pairs = [i for p in parts for i in range(p.pair_start, p.pair_stop)]
    assert pairs == list(range(52))
    assert all(p.pair_stop - p.pair_start <= 16 for p in parts)
    assert all(splits[p.start] <= p.pair_start and p.pair_stop <= splits[p.stop] for p in parts)
    first = [b for p in parts if p.first for b in range(p.start, p.stop)]
    assert first == list(range(5))


def test_without_slots_the_base_logit_to_the_bit(runtime: OnnxRuntime) -> None:
    batch = probe_batch(runtime.info.spec, 9, 300, seed=3)
    slots = filled(runtime, 300)
    base, plus = runtime.score(batch).logit, runtime.score_plus(batch, slots)
    known = (slots.ages() >= 0).any(axis=0)
    assert 0 < known.sum() < 300
    assert (plus[~known] == base[~known]).all()
    assert (plus[known] != base[known]).mean() > 0.9
    none = Slots.empty(300, runtime.info.dim, runtime.info.dots)
    assert (runtime.score_plus(batch, none) == base).all()


def test_the_same_twice(runtime: OnnxRuntime) -> None:
    batch = probe_batch(runtime.info.spec, 9, 300, seed=3)
    slots = filled(runtime, 300)
    assert (runtime.embed(batch) == runtime.embed(batch)).all()
    assert (runtime.score_plus(batch, slots) == runtime.score_plus(batch, slots)).all()


def test_dots_are_what_they_say(runtime: OnnxRuntime) -> None:
    d = _bundle().manifest.dims
    rng = np.random.default_rng(0)
    state = rng.normal(size=(2, d.state)).astype(np.float32)
    vectors = rng.normal(size=(3, d.item)).astype(np.float32)
    got = runtime.dots(state, vectors, np.array([0, 1, 3], np.int64))
    wide = d.heads * d.head_dim
    for i, b in ((0, 0), (1, 1), (2, 1)):
        heads = state[b, :wide].reshape(d.heads, d.head_dim) @ vectors[i, : d.head_dim]
        mine = state[b, wide:].reshape(d.towers, d.tower_dim)
        towers = (mine * vectors[i, d.head_dim :].reshape(d.towers, d.tower_dim)).sum(1)
        expected = np.concatenate([np.sign(heads) * np.log1p(np.abs(heads)), towers])
        np.testing.assert_allclose(got[i], expected, rtol=1e-4, atol=1e-5)


def test_slot_columns(runtime: OnnxRuntime) -> None:
    info = runtime.info
    slots = filled(runtime, 40)
    columns = slot_columns(slots, info.slots)
    assert columns.shape == (40, slot_width(info.slots, info.dim, info.dots))
    assert columns.dtype == np.float32
    direct = slots.direct_age_ms >= 0
    assert (columns[:, info.dim] == direct).all()
    np.testing.assert_allclose(columns[direct, info.dim + 1], np.log1p(slots.direct_age_ms[direct] / 1000), rtol=1e-5)
    assert (slot_columns(Slots.empty(4, info.dim, info.dots), info.slots) == 0).all()


def test_take_and_concat_agree(runtime: OnnxRuntime) -> None:
    batch = probe_batch(runtime.info.spec, 6, 60, seed=2)
    a = take(batch, np.array([4, 0]))
    b = concat([requests(batch, 4, 5), requests(batch, 0, 1)])
    assert (a.items == b.items).all()
    assert (a.splits == b.splits).all()
    assert (a.history == b.history).all()
    assert (a.item_features == b.item_features).all()


@pytest.mark.parametrize("device", ["gpu", "cuda:x", ""])
def test_unknown_device(device: str) -> None:
    with pytest.raises(DeviceError, match="unknown"):
        OnnxRuntime(_bundle(), device)


def test_no_silent_fallback_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime lists CUDA as available without a GPU and hands out a CPU session: that must not pass."""
    import onnxruntime as ort

    real = ort.InferenceSession

    def without_gpu(data: bytes, options: object, providers: object) -> object:
        return real(data, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(ort, "InferenceSession", without_gpu)
    with pytest.raises(DeviceError, match="CUDAExecutionProvider"):
        OnnxRuntime(_bundle(), "cuda")


def _bundle():  # type: ignore[no-untyped-def]
    from models.bundle import read_bundle

    return read_bundle(DEMO)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:11", "tensorrt", "tensorrt:1"])
def test_the_setting_takes_the_devices_that_the_runtime_takes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from models import runtime as module
    from streams.settings import load

    opened: list[tuple[str, int]] = []
    monkeypatch.setattr(module, "_session", lambda name, data, kind, index, *_: opened.append((kind, index)))
    OnnxRuntime(_bundle(), load(sets=[f"model.device={device}"], environment={}).model.device)
    kind, _, index = device.partition(":")
    assert set(opened) == {(kind, int(index or 0))}
