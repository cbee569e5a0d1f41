"""Topics of items without a category: planted groups are found again, and serving reads them from the graph."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytestmark = pytest.mark.train

from models.api import SLOTS, FeatureSpec  # noqa: E402
from models.dataset import Dataset, build  # noqa: E402
from models.nets import PairFm, StateFm, Vm  # noqa: E402
from models.topics import BUCKETS, CLUSTERS, topic_table  # noqa: E402
from models.train import Trainer  # noqa: E402
from models.train_settings import TrainSettings  # noqa: E402
from topics.events import Event, Feedback, Impression  # noqa: E402
from topics.ids import hash_id  # noqa: E402

GROUPS, MEMBERS = 40, 8


@pytest.fixture(scope="module")
def data() -> Dataset:
    """600 users who touch items of two groups each, and one item that everybody touches; no item features."""
    rng = np.random.default_rng(0)
    events: list[Event] = []
    for u in range(600):
        groups = rng.choice(GROUPS, 2, replace=False)
        past = [f"g{g}-{m}" for g in groups for m in rng.choice(MEMBERS, 5, replace=False)] + ["hit"]
        ad = f"g{groups[0]}-{rng.integers(MEMBERS)}"
        events.append(Impression(f"i{u}", f"u{u}", 1000 + u, [ad, f"new{u}"], features={"history": past}))
        events.append(Feedback(f"i{u}", f"u{u}", 2000 + u, [ad]))
    return build(events, FeatureSpec(history_length=20))


def topic(table: np.ndarray, item: str) -> int:
    return int(table[1 + hash_id(item) % BUCKETS])


def test_items_of_a_group_share_a_topic(data: Dataset) -> None:
    table = topic_table(data.impressions, data.clicked)
    assert table is not None
    assert table.shape == (BUCKETS + 1,)
    assert table.min() == 0
    assert table.max() <= CLUSTERS
    together = []
    for g in range(GROUPS):
        topics = [topic(table, f"g{g}-{m}") for m in range(MEMBERS)]
        together.append(max(topics.count(t) for t in topics) / MEMBERS)
    assert np.mean(together) > 0.9
    assert len({topic(table, f"g{g}-0") for g in range(GROUPS)}) > CLUSTERS // 2


def test_an_item_that_one_user_saw_has_no_topic(data: Dataset) -> None:
    table = topic_table(data.impressions, data.clicked)
    assert table is not None
    assert np.mean([topic(table, f"new{u}") == 0 for u in range(600)]) > 0.95  # some share a bucket with another


def test_the_same_seed_gives_the_same_topics(data: Dataset) -> None:
    first, again = (topic_table(data.impressions, data.clicked, seed=3) for _ in range(2))
    assert first is not None
    assert again is not None
    assert (first == again).all()


def test_too_few_items_give_no_topics(data: Dataset) -> None:
    from models.features import requests

    few = requests(data.impressions, 0, 2)
    assert topic_table(few, data.clicked[: few.pairs]) is None


def test_serving_reads_the_topics_from_the_graph(data: Dataset) -> None:
    t = Trainer(data, TrainSettings(preset="tiny", threads=1))
    assert t.slots == SLOTS
    runtime = t.runtime(
        *t.graphs(PairFm(t.spec, t.fm_size).eval(), StateFm(t.spec, t.fm_size).eval(), Vm(t.spec, t.vm_size).eval())
    )
    items = data.impressions.items
    vectors, topics = runtime.item_vectors(items, data.impressions.item_features)
    assert vectors.shape == (len(items), t.dims.item)
    assert t.topics is not None
    assert topics.tolist() == t.topics[1 + (items % np.uint64(BUCKETS)).astype(np.int64)].tolist()
    assert (topics > 0).mean() > 0.3
