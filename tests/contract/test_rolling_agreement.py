"""Rolling counts as columns: training, backtest and the ranker give the VM the same bits for the same log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from count_cases import SETTINGS, CountLog, Seen

from models.api import F32, U64, PairBatch
from models.bundle import read_bundle
from models.catalogue import Catalogue
from models.counted import CountedImpressions
from models.dataset import Dataset, build
from models.features import Encoder
from models.rolling import ROLLING
from models.runtime import OnnxRuntime
from state.api import StoreSettings
from state.count_store import SILENT_MS, ItemCounts, PairCounts, parse_counts, store_settings
from state.counts import Counts, CountSettings, CountSource
from state.counts_offline import OfflineCounts
from state.counts_reference import ReferenceCounts
from state.store import open_store
from streams.backtest import BacktestConfig, backtest
from streams.ranker import Ranker
from streams.report import _losses
from streams.settings import DEMO_BUNDLE
from topics.events import Event, Feedback, Impression, Item, encode
from topics.ids import hash_id, hash_ids
from topics.readers import open_log
from topics.simulator import preset, write
from topics.tail import Record


class Recording(OnnxRuntime):
    """Keeps what it feeds the source `rolling` with; as if the demo bundle's VM had it."""

    def __init__(self) -> None:
        super().__init__(read_bundle(DEMO_BUNDLE))
        self.info = replace(self.info, rolling=True)
        self.seen: list[F32] = []

    def _counted(self, batch: PairBatch, counts: Counts | None) -> dict[str, Any]:
        counted = super()._counted(batch, counts)
        if counted:
            self.seen.append(counted["rolling"])
        return counted


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    path = tmp_path_factory.mktemp("log") / "tiny.jsonl"
    write(preset("tiny").with_(users=60, hours=30.0), path)
    log = list(open_log(path))
    dropped = {e.id for e in log if isinstance(e, Feedback) and hash_id(e.id) % 5 == 0}
    return [e for e in log if not (isinstance(e, Feedback) and e.id in dropped)]


@pytest.fixture(scope="module")
def data(events: list[Event]) -> Dataset:
    return build(events, read_bundle(DEMO_BUNDLE).info.spec)


def training(data: Dataset, lag_ms: int = 10_000) -> dict[str, bytes]:
    """By impression: what training shows the VM."""
    none = np.zeros(data.impressions.requests, bool)
    columns = CountedImpressions(data, CountSettings(lag_ms), none).columns
    cuts = pairwise(data.impressions.splits.tolist())
    keys = zip(data.impressions.users.tolist(), data.impressions.ts_ms.tolist(), strict=True)
    return {f"{u} {t}": columns[a:z].tobytes() for (u, t), (a, z) in zip(keys, cuts, strict=True)}


def key(event: Impression) -> str:
    return f"{hash_id(event.user)} {event.ts}"


def recorded(shown: list[Impression], seen: list[F32]) -> dict[str, bytes]:
    rows = np.concatenate(seen)
    ends = np.cumsum([0, *(len(e.ads) for e in shown)])
    assert ends[-1] == len(rows)
    return {key(e): rows[a:z].tobytes() for e, (a, z) in zip(shown, pairwise(ends.tolist()), strict=True)}


@pytest.mark.parametrize(("block", "lag_ms"), [(4_096, 10_000), (61, 10_000), (500, 0), (500, 3_600_000)])
def test_the_backtest_shows_what_training_showed(events: list[Event], data: Dataset, block: int, lag_ms: int) -> None:
    runtime = Recording()
    backtest(events, runtime, BacktestConfig(with_fm=False, block_events=block, counts=CountSettings(lag_ms)))
    got = recorded([e for e in events if isinstance(e, Impression)], runtime.seen)
    wanted = training(data, lag_ms)
    assert len(wanted) == data.impressions.requests
    assert data.without_feedback > 0
    assert len(got) == len(wanted) + data.without_feedback
    assert {k: got[k] for k in wanted} == wanted


def test_what_is_counted_is_something(data: Dataset) -> None:
    """Every column of the log's features says something, or equality would be easy."""
    none = np.zeros(data.impressions.requests, bool)
    columns = CountedImpressions(data, CountSettings(), none).columns
    assert (columns[:, 0] == 1).all()
    for k, name in enumerate(ROLLING[1:], 1):
        assert len(np.unique(columns[:, k])) > 2, name


class Serving:
    """The counts as serving keeps them, from the records that the counter writes."""

    def __init__(self, folder: Path) -> None:
        newest = -1

        def clock(ts: int) -> int:
            nonlocal newest
            newest = max(newest, ts)
            return newest

        self._log = CountLog()
        self.items = ItemCounts(SETTINGS, clock)
        self.store = open_store(folder, store_settings(StoreSettings(), SETTINGS), parse_counts)
        self._counts = PairCounts(self.store, self.items, SETTINGS)
        self.items.restored = self._counts.restored = True
        self.lookup = self._counts.lookup

    def shown(self, user: int, items: U64, ts_ms: int, clicked: bool = False) -> None:
        if not len(items):
            return
        chunks, deltas = len(self._log.chunks), len(self._log.deltas)
        self._log.write([Seen(user, ts_ms, clicked, tuple(items.tolist()))])
        self.store.apply(self._log.chunks[chunks:])
        new = self._log.deltas[deltas:]
        self.items.apply(0, [r.offset for r in new], [r.value for r in new], new[-1].offset + 1)

    def clicked(self, user: int, items: U64, ts_ms: int) -> None:
        self.shown(user, items, ts_ms, clicked=True)


class Fed:
    """A source that is told of the log's events one by one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.source = make()

    def add(self, event: Event) -> None:
        if not isinstance(event, Impression | Feedback):
            return
        clicked = isinstance(event, Feedback)
        items = hash_ids(event.clicked if isinstance(event, Feedback) else event.ads)
        add = self.source.clicked if clicked else self.source.shown
        if isinstance(self.source, OfflineCounts):
            add(np.array([hash_id(event.user)], np.uint64), np.array([event.ts]), np.array([0, len(items)]), items)
        else:
            add(hash_id(event.user), items, event.ts)


@pytest.fixture
def ranker(events: list[Event], tmp_path: Path) -> Iterator[tuple[Ranker, Recording, Any]]:
    runtime = Recording()
    store = open_store(tmp_path / "store", StoreSettings())
    yield Ranker(runtime, Encoder(runtime.info.spec, Catalogue(runtime.info.spec))), runtime, store
    store.close()


def served(events: list[Event], ranker: tuple[Ranker, Recording, Any], sources: dict[int, Fed]) -> dict[str, bytes]:
    """The ranker over impressions in batches of five, over two partitions, when all before them has been counted."""
    core, runtime, store = ranker
    shown: list[Impression] = []
    waiting: list[Impression] = []

    def rank() -> None:
        counts: dict[int, CountSource] = {p: fed.source for p, fed in sources.items()}
        partitions = [hash_id(e.user) % 2 for e in waiting]
        core.rank(waiting, partitions, {0: store, 1: store}, None, counts)
        shown.extend(waiting)
        waiting.clear()

    for event in events:
        for fed in set(sources.values()):
            fed.add(event)
        if isinstance(event, Impression):
            waiting.append(event)
            if len(waiting) == 5:
                rank()
    if waiting:
        rank()
    return recorded(shown, runtime.seen)


def test_the_ranker_shows_what_training_showed(
    events: list[Event], data: Dataset, ranker: tuple[Ranker, Recording, Any]
) -> None:
    both = {p: Fed(OfflineCounts) for p in (0, 1)}
    got, wanted = served(events, ranker, both), training(data)
    assert {k: got[k] for k in wanted} == wanted


def test_the_reference_agrees(events: list[Event], data: Dataset, ranker: tuple[Ranker, Recording, Any]) -> None:
    part = events[: len(events) // 2]
    got, wanted = served(part, ranker, {p: Fed(ReferenceCounts) for p in (0, 1)}), training(data)
    assert len(got) > 50
    assert {k: v for k, v in got.items() if k in wanted} == {k: wanted[k] for k in got if k in wanted}


def test_what_serving_keeps_agrees(
    events: list[Event], data: Dataset, ranker: tuple[Ranker, Recording, Any], tmp_path: Path
) -> None:
    """Where it knows anything: it does not before the first record, nor after an hour in which nothing was counted."""
    fed = Fed(lambda: Serving(tmp_path / "counts"))
    got, wanted = served(events, ranker, {0: fed, 1: fed}), training(data)
    fed.source.store.close()
    unknown = {k for k, row in got.items() if not any(row)}
    assert {k: got[k] for k in wanted if k not in unknown} == {k: v for k, v in wanted.items() if k not in unknown}
    times = np.array([e.ts for e in events if isinstance(e, Impression | Feedback)])
    for k in unknown:
        before = times[times < int(k.split()[1])]
        assert not len(before) or int(k.split()[1]) - before.max() > SILENT_MS
    assert len(unknown) < 0.1 * len(got)


def test_the_report_of_a_run_gives_the_vm_the_same(events: list[Event], data: Dataset) -> None:
    runtime = Recording()
    answers = backtest(events, runtime, BacktestConfig(with_fm=False), keep_answers=True).answers
    runtime.seen.clear()
    topics = {
        name: [Record(name, 0, k, 0, None, encode(e)) for k, e in enumerate(events) if isinstance(e, kind)]
        for name, kind in (("items", Item), ("feedback", Feedback), ("impressions", Impression))
    }
    losses = _losses(topics, {(a.user, a.id): a for a in answers or []}, runtime, 10**9, 0)
    judged = {e.id for e in events if isinstance(e, Feedback)}
    shown = [e for e in events if isinstance(e, Impression) and e.id in judged]
    assert losses["requests_with_feedback"] == len(shown)
    assert recorded(sorted(shown, key=lambda e: (e.ts, e.id)), runtime.seen) == training(data)


def test_a_partition_without_counts_is_unknown(
    events: list[Event], data: Dataset, ranker: tuple[Ranker, Recording, Any]
) -> None:
    got, wanted = served(events, ranker, {1: Fed(OfflineCounts)}), training(data)
    kinds = set()
    for k, row in wanted.items():
        held = int(k.split()[0]) % 2 == 1
        assert got[k] == (row if held else bytes(len(row)))
        kinds.add(held)
    assert kinds == {False, True}
