"""Training end to end on a small simulated log; that training, backtest and serving share one feature code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytestmark = pytest.mark.train

from models.api import SLOTS, Feature, FeatureSpec  # noqa: E402
from models.bundle import Bundle, load_bundle  # noqa: E402
from models.dataset import Dataset, build, infer_spec, load  # noqa: E402
from models.export import FM_PAIR, VM, tensors  # noqa: E402
from models.features import Encoder, requests  # noqa: E402
from models.nets import PairFm, StateFm, Vm  # noqa: E402
from models.presets import fm_size, vm_size  # noqa: E402
from models.runtime import OnnxRuntime  # noqa: E402
from models.train import Trainer, delayed, train  # noqa: E402
from models.train_settings import Parts, TrainSettings  # noqa: E402
from topics.errors import ContractError, SettingsError  # noqa: E402
from topics.events import Candidates, Feedback, Impression, Item  # noqa: E402
from topics.readers import open_log  # noqa: E402


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from topics.simulator import preset, write

    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    write(preset("tiny").with_(users=200, hours=24.0), path)
    return path


@pytest.fixture(scope="module")
def data(log: Path) -> Dataset:
    return load(log)


@pytest.fixture(scope="module")
def trained(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("bundle") / "b"
    return train(data, TrainSettings(preset="tiny", epochs=1, vm_epochs=1, threads=1), out)[0]


def test_a_bundle_comes_out(trained: Bundle, data: Dataset) -> None:
    bundle = load_bundle(trained.path)
    assert bundle.info.slots == SLOTS
    test = bundle.manifest.training["test"]
    assert {"vm", "fm", "vm_fresh", "vm_served", "coverage", "ctr"} <= test.keys()
    assert 0 < test["coverage"]["direct"] < test["coverage"]["aggregate"] <= 1
    assert bundle.manifest.training["data_sha256"] == data.digest != ""
    assert test["vm_served"]["log_loss"] < 0.5
    assert data.converted.any()
    assert bundle.info.dim == 18  # 16 numbers, the conversion's logit, the click's
    conversion = test["conversion"]
    assert conversion["clicks"] > 10
    assert 0 < conversion["log_loss"] < 2


def test_the_same_seed_gives_the_same_bundle(trained: Bundle, data: Dataset, tmp_path: Path) -> None:
    again, _ = train(data, TrainSettings(preset="tiny", epochs=1, vm_epochs=1, threads=1), tmp_path / "b")
    assert again.info.fm_hash == trained.info.fm_hash
    assert again.manifest.graphs == trained.manifest.graphs


def test_another_seed_gives_another_fm(trained: Bundle, data: Dataset, tmp_path: Path) -> None:
    other, _ = train(data, TrainSettings(preset="tiny", epochs=1, vm_epochs=1, threads=1, seed=1), tmp_path / "b")
    assert other.info.fm_hash != trained.info.fm_hash


def test_a_run_broken_off_goes_on(
    trained: Bundle, data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off behind the FM, the second run trains no FM, gives the same bundle and leaves nothing behind."""
    settings = TrainSettings(preset="tiny", epochs=1, vm_epochs=1, threads=1)
    phases: list[str] = []

    def report(phase: str, done: int, of: int) -> None:
        phases.append(phase)
        if phase == "embedding candidates" and first:
            raise KeyboardInterrupt

    first = True
    with pytest.raises(KeyboardInterrupt):
        train(data, settings, tmp_path / "b", report)
    first = False
    phases.clear()
    again, _ = train(data, settings, tmp_path / "b", report)
    assert not {"FM", "FM state", "VM"} & set(phases)
    assert again.manifest.graphs == trained.manifest.graphs
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_training_and_serving_feed_the_same_bits(trained: Bundle, data: Dataset, log: Path) -> None:
    """The columns training used, and what the runtime feeds its graphs for the same impressions encoded one at a
    time by a fresh encoder, are equal to the bit."""
    events = [e for e in open_log(log) if isinstance(e, Impression)]
    events.sort(key=lambda e: e.ts)
    encoder = Encoder(data.spec, data.catalogue)
    buckets = {"item_bucket": 64}
    for k in (0, 7, len(events) - 1):
        mine = encoder.impressions([events[k]])
        theirs = requests(data.impressions, k, k + 1)
        for sources in (FM_PAIR, VM):
            for a, b in zip(
                tensors(mine, data.spec, data.catalogue.topic_column, sources, buckets),
                tensors(theirs, data.spec, data.catalogue.topic_column, sources, buckets),
                strict=True,
            ):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


def test_the_graph_scores_what_torch_scores(data: Dataset) -> None:
    t = Trainer(data, TrainSettings(preset="tiny", threads=1))
    pair, state, vm = (
        PairFm(t.spec, t.fm_size).eval(), StateFm(t.spec, t.fm_size).eval(), Vm(t.spec, t.vm_size).eval(),
    )  # fmt: skip
    runtime: OnnxRuntime = t.runtime(*t.graphs(pair, state, vm))
    batch = requests(data.impressions, 0, 20)
    with torch.no_grad():
        embedding = pair(*t._tensors(batch, FM_PAIR, t.fm_buckets)).numpy()
        logit, profile = vm(*t._tensors(batch, VM, t.vm_buckets))
    np.testing.assert_allclose(runtime.embed(batch), embedding, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(runtime.score(batch).logit, logit.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(runtime.score(batch).profile, profile.numpy(), rtol=1e-4, atol=1e-5)
    users = runtime.user_state(batch)
    vectors, _ = runtime.item_vectors(batch.items, batch.item_features)
    row = torch.from_numpy(np.repeat(np.arange(20), np.diff(batch.splits)))
    dots = state.dots(torch.from_numpy(users), torch.from_numpy(vectors), row)
    np.testing.assert_allclose(runtime.dots(users, vectors, batch.splits), dots.numpy(), rtol=1e-3, atol=1e-4)


def test_the_conversion_head_learns_and_leaves_the_rest_alone(data: Dataset) -> None:
    """Converted where one hidden number is positive, given a click: the head finds it though ads not clicked, which
    never convert, are half of what it sees; nothing below the head gets a gradient."""
    torch.manual_seed(0)
    fm = PairFm(data.spec, replace(fm_size("tiny"), conversion=True))
    with torch.no_grad():
        fm.head.weight.zero_()
        fm.head.weight[0, 0] = 20.0  # a click where hidden number 0 is 1
        fm.head.bias.fill_(-10.0)
    hidden = torch.randn(2000, fm.head.in_features)
    clicked = (torch.arange(2000) % 2).float()
    hidden[:, 0] = clicked
    hidden.requires_grad_(True)
    converted = clicked * (hidden[:, 1] > 0).float()
    optimiser = torch.optim.Adam(fm.convert.parameters(), lr=0.1)
    for _ in range(200):
        optimiser.zero_grad()
        fm.converted_loss(hidden, converted).backward()
        optimiser.step()
    assert hidden.grad is None
    assert all(p.grad is None for name, p in fm.named_parameters() if not name.startswith("convert."))
    logit = fm.convert(hidden).squeeze(-1)
    assert ((logit > 0) == (hidden[:, 1] > 0)).float().mean() > 0.95


def test_a_log_without_conversions_has_no_head_for_them() -> None:
    events = [Impression(str(k), "u", k, ["a", "b"]) for k in range(40)]
    data = build([*events, *(Feedback(str(k), "u", 100 + k, ["a"]) for k in range(40))], FeatureSpec())
    t = Trainer(data, TrainSettings(preset="tiny", threads=1))
    assert not t.fm_size.conversion
    assert t.dims.embedding == 17


def test_labels_follow_the_feedback() -> None:
    events = [
        Item("a", 0, {"category": "x", "price": 2}),
        Impression("1", "u", 5, ["a", "b", "a"]),
        Impression("2", "u", 4, ["b"]),
        Impression("3", "u", 6, ["a"]),
        Feedback("1", "u", 7, ["a"], converted=["a"]),
        Feedback("2", "u", 8, []),
        Candidates("c", "u", 1, ["a"]),
    ]
    data = build(events, infer_spec(events))
    assert data.spec == FeatureSpec(item=(Feature("category", "category"), Feature("price")), topic="category")
    assert data.impressions.ts_ms.tolist() == [4, 5]
    assert data.clicked.tolist() == [0, 1, 0, 1]
    assert data.converted.tolist() == [0, 1, 0, 1]
    assert data.without_feedback == 1
    assert data.candidates.pairs == 1
    with pytest.raises(ContractError, match="feedback"):
        build(events[:4], data.spec)


def test_delayed_requests_see_only_what_was_there() -> None:
    spec = FeatureSpec(history_length=5)
    event = Impression(
        "1", "u", 1000, ["a"], features={"history": ["p", "q", "r", "s"], "history_ts": [100, 500, None, 990]}
    )
    data = build([event, Feedback("1", "u", 1001, [])], spec)
    batch = delayed(data.impressions, np.array([300]))
    assert batch.history_ts.tolist() == [100, 500, -1]
    assert batch.ts_ms.tolist() == [500]
    assert delayed(data.impressions, np.array([0])).ts_ms.tolist() == [990]


def test_parts_are_in_time_order() -> None:
    parts = Parts.of(100, TrainSettings())
    assert list(parts.fm) + list(parts.validation) + list(parts.vm) + list(parts.test) == list(range(100))
    with pytest.raises(SettingsError, match="too few"):
        Parts.of(3, TrainSettings())


def test_settings_are_checked() -> None:
    with pytest.raises(SettingsError, match="test part"):
        TrainSettings(fm_share=0.7, vm_share=0.3)
    with pytest.raises(SettingsError, match="tiny"):
        fm_size("huge")
    with pytest.raises(SettingsError, match="weak"):
        vm_size("huge")
