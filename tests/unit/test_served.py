"""The slots that training and evaluation learn from are those that the pipeline's own cores give on the same log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from models.api import F32, I64, SLOTS, FilledSlots, PairBatch, Slots
from models.bundle import read_bundle
from models.dataset import Dataset, build
from models.inputs import slot_columns, slot_spans
from models.runtime import OnnxRuntime
from models.served import ServedStore
from models.similar import FORMS, SimilarInTime
from state.api import ChangelogRecord, StoreDims, StoreSettings
from state.counts import Counts
from state.store import open_store
from streams.backtest import BacktestConfig, backtest
from streams.settings import DEMO_BUNDLE
from topics.events import Event, Impression
from topics.packed import EmbeddingChunk, encode_embedding
from topics.readers import open_log
from topics.simulator import preset, write

HOUR = 3_600_000


class Recording(OnnxRuntime):
    """Keeps the slots it is asked to score with. All slots are built, whatever the bundle was trained with."""

    def __init__(self) -> None:
        super().__init__(read_bundle(DEMO_BUNDLE))
        self.info = replace(self.info, slots=SLOTS)
        self.seen: list[FilledSlots] = []

    def score_both(self, batch: PairBatch, slots: Slots | FilledSlots, counts: Counts | None = None) -> tuple[F32, F32]:
        assert isinstance(slots, FilledSlots)
        self.seen.append(slots)
        base = self.score(batch).logit
        return base, base


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    path = tmp_path_factory.mktemp("log") / "tiny.jsonl"
    write(preset("tiny").with_(users=60, hours=30.0), path)
    return list(open_log(path))


@pytest.fixture(scope="module")
def data(events: list[Event]) -> Dataset:
    return build(events, read_bundle(DEMO_BUNDLE).info.spec)


def backtested(events: list[Event], config: BacktestConfig) -> list[tuple[F32, I64]]:
    """Columns [n, W] and ages [5, n] of each impression, in event-time order, as the ranker filled them."""
    runtime = Recording()
    backtest(events, runtime, config)
    pieces: list[tuple[F32, I64]] = []
    order = [e for e in events if isinstance(e, Impression)]
    for slots in runtime.seen:
        start = 0
        while start < len(slots.columns):
            n = len(order[len(pieces)].ads)
            pieces.append((slots.columns[start : start + n], slots.ages_ms[:, start : start + n]))
            start += n
    times = np.argsort([e.ts for e in order], kind="stable")
    return [pieces[i] for i in times]


def _cut(slots: Slots, a: int, z: int) -> Slots:
    return Slots(*(getattr(slots, f.name)[a:z] for f in fields(Slots)))


@pytest.mark.parametrize("delay", [0, 10_000])
def test_the_slots_of_training_are_those_of_the_backtest(events: list[Event], data: Dataset, delay: int) -> None:
    config = BacktestConfig(with_fm=False, block_events=500, pair_delay_ms=delay, state_delay_ms=delay)
    expected = backtested(events, config)
    runtime = Recording()
    store = ServedStore(runtime, data.catalogue)
    try:
        store.add(data.candidates)
        assert len(expected) == data.impressions.requests
        got = store.slots(data.impressions, np.full(data.impressions.requests, delay, np.int64))
    finally:
        store.close()
    splits = data.impressions.splits
    filled = {name: 0 for name in SLOTS}
    spans = slot_spans(SLOTS, runtime.info.dim, runtime.info.dots)
    for b, (columns, ages) in enumerate(expected):
        mine = _cut(got, int(splits[b]), int(splits[b + 1]))
        assert (mine.ages() == ages).all()
        of_mine = slot_columns(mine, SLOTS)
        for k, name in enumerate(SLOTS):
            at = slice(*spans[name])
            if name == "state":
                # Item vectors come out of a matrix product, whose last bits depend on the batch they are in.
                np.testing.assert_allclose(of_mine[:, at], columns[:, at], rtol=1e-5, atol=1e-5)
            else:
                assert of_mine[:, at].tobytes() == columns[:, at].tobytes(), name
            filled[name] += int((ages[k] >= 0).sum())
    assert all(filled.values()), filled


@pytest.fixture(scope="module")
def served(data: Dataset) -> Iterator[ServedStore]:
    store = ServedStore(Recording(), data.catalogue)
    store.add(data.candidates)
    yield store
    store.close()


def test_cold_requests_show_similar_users_only(served: ServedStore, data: Dataset) -> None:
    b = data.impressions.requests
    cold = np.arange(b) % 2 == 0
    none = np.zeros(b, np.int64)
    usual, slots = served.slots(data.impressions, none), served.slots(data.impressions, none, cold=cold)
    pairs = np.repeat(cold, np.diff(data.impressions.splits))
    for name in SLOTS[:4]:
        age = getattr(slots, name + "_age_ms")
        assert (age[pairs] == -1).all()
        assert not getattr(slots, name)[pairs].any()
        assert (age[~pairs] == getattr(usual, name + "_age_ms")[~pairs]).all()
    assert (slots.similar_age_ms[pairs] >= 0).mean() > 0.5
    assert (slots.similar_age_ms >= 0).sum() > (usual.similar_age_ms >= 0).sum()


def test_similar_users_are_asked_for_those_named(served: ServedStore, data: Dataset) -> None:
    """Without being asked for, only users without an aggregate get them; nobody before the first full hour."""
    b = data.impressions.requests
    none = np.zeros(b, np.int64)
    usual = served.slots(data.impressions, none)
    assert (usual.aggregate_age_ms[usual.similar_age_ms >= 0] == -1).all()
    everyone = served.slots(data.impressions, none, ask=np.ones(b, bool))
    assert (everyone.similar_age_ms >= 0).mean() > 0.5
    for name in SLOTS[:4]:
        assert (getattr(everyone, name) == getattr(usual, name)).all()
    first_hour = data.candidates.ts_ms[0] - data.candidates.ts_ms[0] % HOUR + HOUR
    early = np.repeat(data.impressions.ts_ms < first_hour, np.diff(data.impressions.splits))
    assert (everyone.similar_age_ms[early] == -1).all()


def test_the_forms_of_similar_users_differ_in_likeness_only(served: ServedStore, data: Dataset) -> None:
    b = data.impressions.requests
    got = {form: served.slots(data.impressions, np.zeros(b, np.int64), form, ask=np.ones(b, bool)) for form in FORMS}
    filled = {form: (slots.similar_age_ms >= 0).mean() for form, slots in got.items()}
    assert abs(filled["neighbours"] - filled["random"]) < 0.1
    assert filled["clusters"] > 0.3
    assert (got["neighbours"].similar != got["random"].similar).any(axis=1).mean() > 0.5
    assert got["random"].similar_score.mean() == pytest.approx(got["neighbours"].similar_score.mean(), abs=0.1)


def test_an_index_knows_what_was_servable_at_its_hour(tmp_path: Path) -> None:
    """Two users of one profile. The second one's pairs come at 2:30: unknown to the index of 2:00, known to that of
    3:00, unless they become servable 40 minutes late."""
    dims = StoreDims(2, 0, 2)
    store = open_store(tmp_path / "s", StoreSettings())

    def chunk(user: int, ts_ms: int) -> ChangelogRecord:
        value = EmbeddingChunk(
            user=user, ts_ms=ts_ms, model=1, fingerprint=1, items=np.array([9], np.uint64),
            topics=np.array([0], np.uint32), vectors=np.full((1, 2), user, np.float16), scales=None,
            state=np.zeros(0, np.float16), profile=np.array([1, 0], np.float16), event_id="",
        )  # fmt: skip
        return ChangelogRecord(user, encode_embedding(value))

    store.apply([chunk(1, HOUR), chunk(2, 2 * HOUR + HOUR // 2)])
    index = SimilarInTime(store, 1, dims)
    profile = np.array([[1, 0]], np.float32)
    asker = np.array([7], np.uint64)

    def counted(now_ms: int, delay_ms: int = 0, user: int = 7) -> int:
        users = asker if user == 7 else np.array([user], np.uint64)
        return int(index.similar(profile, np.array([now_ms]), users, delay_ms).count[0])

    assert counted(HOUR - 1) == 0
    assert counted(HOUR) == 1
    assert counted(HOUR, user=1) == 0
    assert counted(3 * HOUR - 1) == 1
    assert counted(3 * HOUR) == 2
    assert counted(3 * HOUR, delay_ms=40 * 60_000) == 1
    store.close()
