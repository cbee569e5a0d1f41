"""Training with rolling counts: what counts, who is shown none, and a bundle that has them."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytestmark = pytest.mark.train

from models import metrics  # noqa: E402
from models.api import FeatureSpec  # noqa: E402
from models.bundle import Bundle, Input, check_manifest, load_bundle  # noqa: E402
from models.dataset import Dataset, build, load  # noqa: E402
from models.features import requests  # noqa: E402
from models.nets import Counted, PairFm, StateFm, Vm  # noqa: E402
from models.rolling import ROLLING  # noqa: E402
from models.runtime import OnnxRuntime  # noqa: E402
from models.train import Trainer, train  # noqa: E402
from models.train_settings import TrainSettings  # noqa: E402
from state.counts import Counts, CountSettings  # noqa: E402
from state.counts_reference import ReferenceCounts  # noqa: E402
from topics.errors import BundleError, SettingsError  # noqa: E402
from topics.events import Feedback, Impression  # noqa: E402
from topics.ids import hash_id  # noqa: E402

DATA = Path(os.environ.get("SOLARIS_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
T0 = 1_700_000_000_000
HOUR = 3_600_000
SETTINGS = TrainSettings(preset="tiny", epochs=1, vm_epochs=1, counters="rolling", threads=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    from topics.simulator import preset, write

    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    write(preset("tiny").with_(users=150, hours=24.0), path)
    return load(path)


@pytest.fixture(scope="module")
def trained(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return train(data, SETTINGS, tmp_path_factory.mktemp("bundle") / "b")[0]


def test_everything_shown_and_every_click_counts() -> None:
    """An impression that nothing came of counts as shown; a click counts from the feedback's own time on, for an
    impression that the log does not have too."""
    events = [
        Impression("1", "u", T0, ["a", "b", "a"]),
        Impression("2", "v", T0 + HOUR, ["a"]),
        Feedback("1", "u", T0 + 2 * HOUR, ["a"]),
        Feedback("elsewhere", "v", T0 + 3 * HOUR, ["b"]),
        *(Impression(str(k), "u", T0 + k * HOUR // 2, ["a", "b"]) for k in range(3, 25)),
        *(Feedback(str(k), "u", T0 + k * HOUR // 2 + 1, []) for k in range(3, 25, 2)),
    ]
    data = build(events, FeatureSpec())
    assert data.without_feedback == 12
    t = Trainer(data, TrainSettings(preset="tiny", count_lag_ms=0, unknown_share=0.0, threads=1))
    got = t.counted.counts(0, data.impressions.requests)
    reference = ReferenceCounts(CountSettings(0))
    for e in events:
        items = np.array([hash_id(i) for i in (e.ads if isinstance(e, Impression) else e.clicked)], np.uint64)
        (reference.shown if isinstance(e, Impression) else reference.clicked)(hash_id(e.user), items, e.ts)
    asked = data.impressions
    want = reference.lookup(asked.users, asked.splits, asked.items, asked.ts_ms)
    for f in fields(Counts):
        assert getattr(got, f.name).tolist() == getattr(want, f.name).tolist(), f.name
    assert got.pair_clicked.max() == 1
    assert got.item_clicked_day.max() == 1
    assert got.user_shown.max() == 3 + 2 * 21  # without a lag the last one counts itself


def test_a_fifth_of_the_requests_before_the_test_part_is_shown_none(data: Dataset) -> None:
    t = Trainer(data, SETTINGS)
    known = t.counted.counts(0, data.impressions.requests).known
    before = t.parts.vm.stop
    assert 0.7 < known[:before].mean() < 0.9
    assert known[before:].all()
    columns = t.counted.columns
    pairs = np.repeat(known, np.diff(data.impressions.splits))
    assert (columns[pairs, 0] == 1).all()
    assert not columns[~pairs].any()
    again = Trainer(data, SETTINGS).counted.counts(0, data.impressions.requests).known
    assert (again == known).all()


def test_a_bundle_with_rolling_counts(trained: Bundle, data: Dataset) -> None:
    bundle = load_bundle(trained.path)
    assert bundle.info.rolling
    assert bundle.manifest.count_lag_ms == bundle.info.count_lag_ms == 10_000
    assert bundle.info.vm == "solaris-vm-weak-rolling@1"
    assert bundle.manifest.training["settings"]["counters"] == "rolling"
    sees = {name for name, g in bundle.manifest.graphs.items() if any(i.source == "rolling" for i in g.inputs.values())}
    assert sees == {"vm", "vm_plus"}
    runtime = OnnxRuntime(bundle)
    batch = requests(data.impressions, 0, 30)
    counts = Trainer(data, SETTINGS).counted.counts(0, 30)
    given, without = runtime.score(batch, counts).logit, runtime.score(batch).logit
    known = np.repeat(counts.known, np.diff(batch.splits))
    assert 0 < known.mean() < 1
    np.testing.assert_allclose(given[~known], without[~known], rtol=1e-5, atol=1e-6)
    assert (given[known] != without[known]).all()


def test_counters_leave_the_fm_as_it_is(trained: Bundle, data: Dataset, tmp_path: Path) -> None:
    """Embeddings of a VM with and without counts can meet: the FM does not see them."""
    settings = TrainSettings(preset="tiny", epochs=1, vm_epochs=1, threads=1)
    other = train(data, settings, tmp_path / "b")[0]
    assert not other.info.rolling
    assert other.info.count_lag_ms is None
    for name in ("fm_pair", "fm_user", "fm_item"):
        assert other.graphs[name] == trained.graphs[name]


def test_the_graph_scores_what_torch_scores(data: Dataset) -> None:
    t = Trainer(data, SETTINGS)
    nets = PairFm(t.spec, t.fm_size).eval(), StateFm(t.spec, t.fm_size).eval(), Vm(t.spec, t.vm_size).eval()
    t._fit_counts(nets[2], t.parts.vm)
    runtime = t.runtime(*t.graphs(*nets))
    part = range(0, 40)
    pairs = slice(0, int(data.impressions.splits[40]))
    from models.export import VM, with_counts

    sources = with_counts(VM, True)
    given = t.counts_given(nets[2], pairs)
    with torch.no_grad():
        logit, _ = nets[2](*t._tensors(requests(data.impressions, 0, 40), sources, t.vm_buckets, given))
    np.testing.assert_allclose(t.vm_logits(runtime, part), logit.numpy(), rtol=1e-4, atol=1e-5)


def test_columns_are_scaled_by_what_is_known() -> None:
    layer = Counted()
    values = torch.zeros(100, len(ROLLING))
    values[:50, 0] = 1
    values[:50, 1:] = torch.randn(50, len(ROLLING) - 1) * 3 + 7
    layer.fit(values)
    got = layer(values)
    assert not got[50:].any()
    torch.testing.assert_close(got[:50, :-1].mean(0), torch.zeros(len(ROLLING) - 1), atol=0.3, rtol=0)
    assert (got[:50, -1] == 1).all()
    assert got.abs().max() <= 5


def test_an_fm_with_rolling_counts_is_refused(trained: Bundle) -> None:
    """An embedding is computed when the pair is offered, where nobody knows the counts of the impression."""
    m = trained.manifest
    graph = m.graphs["fm_pair"]
    wrong = msgspec.structs.replace(graph, inputs={**graph.inputs, "rolling": Input("rolling")})
    with pytest.raises(BundleError, match="source 'rolling'"):
        check_manifest(msgspec.structs.replace(m, graphs={**m.graphs, "fm_pair": wrong}), "here")


@pytest.mark.parametrize(
    ("key", "value"), [("counters", "hand"), ("unknown_share", 1.0), ("count_lag_ms", -1)]
)  # fmt: skip
def test_settings_are_checked(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=key):
        TrainSettings(**{key: value})  # type: ignore[arg-type]


@pytest.mark.skipif(not (DATA / "mind_20191114").is_dir(), reason="the MIND day is not here; see docs/data.md")
def test_on_a_day_of_news_they_are_worth_something() -> None:
    """What is read is what was clicked a moment ago: 1.4 % of the loss here, and 0.7 % by the interval's lower end."""
    data = load(DATA / "mind_20191114")
    t = Trainer(data, TrainSettings(preset="tiny", threads=1))
    nets = PairFm(t.spec, t.fm_size).eval(), StateFm(t.spec, t.fm_size).eval()
    losses = []
    for rolling in (False, True):
        vm = t.train_vm(range(t.parts.vm.stop), size=replace(t.vm_size, rolling=rolling))
        logit = t.vm_logits(t.runtime(*t.graphs(*nets, vm)), t.parts.test)
        losses.append(metrics.log_loss(logit, t.labels(t.parts.test)))
    assert losses[1] < 0.995 * losses[0]
