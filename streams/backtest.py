"""The backtest host: the production cores over an event log in virtual time, one process, no broker.

Events are taken in blocks, which is exact because every look-up is *as of* the asking event's own time: what a block's
candidates write at `ts` is invisible to its impressions before `ts`. A delay between a user's event and its servable
embedding is modelled exactly too: the ranker then asks as of ``now - delay``, in stores whose TTL is shorter by the
delay, so an entry is seen from ``ts + delay`` on and until ``ts + ttl``.

Rolling counts, for a bundle whose VM sees them, are exact in the same way: they too are as of the asking event's time.

A catalogue record applies from its place in the log on: a block ends before a record of an item that the block has
already mentioned. The result does not depend on the size of the blocks.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.api import PairBatch, Runtime
from models.catalogue import Catalogue
from models.dataset import AdEvents
from models.features import Encoder
from state.api import ChangelogRecord, EmbeddingStore, Lookup, StoreDims, StoreSettings
from state.counts import DAY_MS, CountSettings
from state.counts_offline import OfflineCounts
from state.neighbours import Neighbours, NeighbourSettings
from state.store import open_store
from streams.embedder import Embedder, Refresh
from streams.gate import GateSettings
from streams.ranker import Ranker
from streams.verifier import Verifier
from topics.errors import ContractError, SettingsError
from topics.events import Candidates, Event, Feedback, Impression, Item, RankedAds
from topics.packed import EmbeddingChunk, encode_embedding

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Columns = dict[str, npt.NDArray[np.generic]]
PARTITION = 0


@dataclass(frozen=True, slots=True)
class BacktestConfig:
    store: StoreSettings = field(default_factory=StoreSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    counts: CountSettings | None = None
    """of the rolling counts, for a bundle whose VM sees them; None: as it was trained"""
    refresh: Refresh = "on_change"
    pair_delay_ms: int = 0
    """from a candidates event to its pair embeddings being servable"""
    state_delay_ms: int = 0
    """from a user event to the user's state being servable"""
    block_events: int = 4_096
    with_fm: bool = True
    """also score every ranked pair with the FM, for the losses to compare with"""
    neighbours: int = 16
    """similar users asked for a user without an aggregate, where the bundle has that slot; 0: never"""
    neighbours_every_ms: int = 3_600_000
    """event time between two builds of their index; blocks end there, so that outcomes do not depend on their size"""
    start_ms: int = 0
    """impressions before this are served (they warm nothing up) but not reported"""


@dataclass(slots=True)
class Scored:
    """Every reported pair with what each model said, in the order of the log."""

    users: npt.NDArray[np.uint64]
    """[R]"""
    ts_ms: I64
    """[R]"""
    splits: I64
    """[R+1]"""
    ids: list[str]
    label: F32
    """[N] clicked"""
    known: npt.NDArray[np.bool_]
    """[R] whether the log has feedback for the request"""
    vm: F32
    """[N] base logits"""
    solaris: F32
    """[N] logits with the slots"""
    fm: F32 | None
    source: npt.NDArray[np.int8]
    """[N] index into `SOURCES`"""
    age_ms: I64
    """[N] age of that source, -1 for none"""


@dataclass(slots=True)
class BacktestResult:
    scored: Scored
    counters: Counter[str]
    answers: list[RankedAds] | None


def validate(config: BacktestConfig) -> None:
    """Raises `SettingsError` for a config that no store can serve."""
    ttl_ms = config.store.ttl_ms
    if config.store.window_ms < ttl_ms:
        raise SettingsError("backtest.window_ms", config.store.window_ms, f"must not be below ttl_ms = {ttl_ms}")
    if config.counts is not None and config.counts.lag_ms < 0:
        raise SettingsError("backtest.counts.lag_ms", config.counts.lag_ms, "0 or more")
    for key in ("pair_delay_ms", "state_delay_ms"):
        delay_ms = getattr(config, key)
        if not 0 <= delay_ms < ttl_ms:
            raise SettingsError(
                f"backtest.{key}", delay_ms,
                f"give 0 or more and less than ttl_ms = {ttl_ms}: what comes later is never servable",
            )  # fmt: skip


class _Delayed:
    """A store asked as of `delay_ms` ago; see the module's docstring."""

    def __init__(self, store: EmbeddingStore, delay_ms: int) -> None:
        self._store, self._delay_ms = store, delay_ms

    def lookup(
        self, users: npt.NDArray[np.uint64], splits: I64, items: npt.NDArray[np.uint64],
        topics: npt.NDArray[np.uint32], now_ms: I64, model: int, dims: StoreDims,
    ) -> Lookup:  # fmt: skip
        return self._store.lookup(users, splits, items, topics, now_ms - self._delay_ms, model, dims)


class _Joined:
    """Pairs from one store, user state from another: the two lanes have delays of their own."""

    def __init__(self, pairs: _Delayed, states: _Delayed) -> None:
        self._pairs, self._states = pairs, states

    def lookup(
        self, users: npt.NDArray[np.uint64], splits: I64, items: npt.NDArray[np.uint64],
        topics: npt.NDArray[np.uint32], now_ms: I64, model: int, dims: StoreDims,
    ) -> Lookup:  # fmt: skip
        found = self._pairs.lookup(users, splits, items, topics, now_ms, model, dims)
        states = self._states.lookup(
            users, np.zeros(len(users) + 1, np.int64), items[:0], topics[:0], now_ms, model, dims
        )
        found.state, found.state_ts_ms = states.state, states.state_ts_ms
        found.fingerprint, found.profile = states.fingerprint, states.profile
        return found


class Backtest:
    def __init__(self, runtime: Runtime, config: BacktestConfig, folder: Path) -> None:
        info = runtime.info
        validate(config)
        self.runtime, self.config = runtime, config
        self.catalogue = Catalogue(info.spec)
        encoder = Encoder(info.spec, self.catalogue)
        self.verifier = Verifier(runtime, encoder, config.gate)
        self.embedder = Embedder(runtime, encoder, config.refresh, config.store.ttl_ms)
        self.ranker = Ranker(runtime, encoder)
        self._computed = open_store(folder / "computed", config.store)
        self._offset = 0
        self._counts = None
        if info.rolling:
            self._counts = OfflineCounts(config.counts or CountSettings.as_trained(info.count_lag_ms))
        if config.pair_delay_ms or config.state_delay_ms:
            self._pairs = open_store(folder / "pairs", _shorter(config.store, config.pair_delay_ms))
            self._states = open_store(folder / "states", _shorter(config.store, config.state_delay_ms))
            self._served = _Joined(
                _Delayed(self._pairs, config.pair_delay_ms), _Delayed(self._states, config.state_delay_ms)
            )
            self._opened = [
                (self._computed, 0), (self._pairs, config.pair_delay_ms), (self._states, config.state_delay_ms)
            ]  # fmt: skip
        else:
            self._pairs = self._states = self._computed
            self._served = self._computed  # type: ignore[assignment]
            self._opened = [(self._computed, 0)]

        self.neighbours: dict[int, Neighbours] = {}
        if config.neighbours and "similar" in info.slots and info.profile_dim:
            self.neighbours[PARTITION] = Neighbours(
                self._computed, info.fm_hash, self.ranker.dims, NeighbourSettings(k=config.neighbours)
            )

    def close(self) -> None:
        for neighbours in self.neighbours.values():
            neighbours.close()
        for store, _ in self._opened:
            store.close()

    def find_neighbours(self, now_ms: int) -> None:
        """Builds the index of similar users from what is servable at `now_ms`."""
        for neighbours in self.neighbours.values():
            neighbours.rebuild(now_ms - self.config.pair_delay_ms)
            neighbours.wait()

    def block(self, events: list[Event]) -> tuple[list[Impression], list[RankedAds], Columns]:
        """One block through all roles -> its impressions, their ranked ads, and the columns of `Scored`."""
        self.catalogue.update(e for e in events if isinstance(e, Item))
        if self._counts is not None:
            self._count(events, self._counts)
        offered = [e for e in events if isinstance(e, Candidates)]
        requests = self.verifier.process(offered, [PARTITION] * len(offered))
        states = self._records(self.embedder.states(requests))
        self._computed.apply(states)
        if self._states is not self._computed:
            self._states.apply(states)
        chunks, _ = self.embedder.pairs(requests, [PARTITION] * len(requests), {PARTITION: self._computed})
        pairs = self._records(chunks)
        self._computed.apply(pairs)
        if self._pairs is not self._computed:
            self._pairs.apply(pairs)
        shown = [e for e in events if isinstance(e, Impression)]
        if not shown:
            return [], [], {}
        stores: dict[int, EmbeddingStore] = {PARTITION: self._served}  # type: ignore[dict-item]
        counts = {PARTITION: self._counts} if self._counts is not None else None
        ranking = self.ranker.rank(shown, [PARTITION] * len(shown), stores, self.neighbours, counts)
        times = [e.ts for e in shown]
        answers = self.ranker.answers(shown, ranking, times, 0, [False] * len(shown))
        columns: Columns = {
            "vm": ranking.base,
            "solaris": ranking.logit,
            "source": ranking.source,
            "age_ms": ranking.age_ms,
            "items": ranking.batch.items,
            "users": ranking.batch.users,
        }
        if self.config.with_fm:
            columns["fm"] = self._fm(ranking.batch)
        newest = max(e.ts for e in events)
        for store, delay_ms in self._opened:
            if newest - delay_ms - store.clock_ms > self.config.store.ttl_ms // 8:
                store.expire(newest - delay_ms)  # on the clock that this store is asked by
        if self._counts is not None:
            self._counts.expire(newest - DAY_MS)  # the log's time may step back, by less than a day
        return shown, answers, columns

    def _count(self, events: list[Event], counts: OfflineCounts) -> None:
        shown = AdEvents.of([(e.user, e.ts, e.ads) for e in events if isinstance(e, Impression)])
        clicks = AdEvents.of([(e.user, e.ts, e.clicked) for e in events if isinstance(e, Feedback)])
        counts.shown(shown.users, shown.ts_ms, shown.splits, shown.items)
        counts.clicked(clicks.users, clicks.ts_ms, clicks.splits, clicks.items)

    def _fm(self, batch: PairBatch) -> F32:
        return self.runtime.embed(batch)[:, -1]

    def _records(self, chunks: list[EmbeddingChunk | None]) -> list[ChangelogRecord]:
        out = []
        for chunk in chunks:
            if chunk is not None:
                out.append(ChangelogRecord(self._offset, encode_embedding(chunk)))
                self._offset += 1
        return out


def backtest(
    events: Iterable[Event],
    runtime: Runtime,
    config: BacktestConfig = BacktestConfig(),
    folder: Path | None = None,
    keep_answers: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> BacktestResult:
    """Runs a log through the cores. Deterministic: the same log, bundle and config give the same bits.

    `folder` holds the state while it runs (default: a temporary one). `progress` gets (events so far, event time).
    Raises `ContractError` when the log has no impressions.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="solaris-backtest-") as temporary:
            return backtest(events, runtime, config, Path(temporary), keep_answers, progress)
    run = Backtest(runtime, config, folder)
    collected: list[tuple[list[Impression], Columns]] = []
    clicked: dict[str, set[str]] = {}
    answers: list[RankedAds] = []
    done = 0
    try:
        for block, hour_ms in _blocks(events, config.block_events, config.neighbours_every_ms if run.neighbours else 0):
            if hour_ms >= 0:
                run.find_neighbours(hour_ms)
            for e in block:
                if isinstance(e, Feedback):
                    clicked.setdefault(e.id, set()).update(map(str, e.clicked))
            shown, ranked, columns = run.block(block)
            if shown:
                collected.append((shown, columns))
            if keep_answers:
                answers += ranked
            done += len(block)
            if progress is not None:
                progress(done, block[-1].ts)
        counters: Counter[str] = Counter(run.verifier.totals())
        counters.update({f"embedder_{k}": v for k, v in run.embedder.counters.items()})
        counters.update({f"ranker_{k}": v for k, v in run.ranker.counters.items()})
    finally:
        run.close()
    scored = _scored(collected, clicked, config)
    return BacktestResult(scored, counters, answers if keep_answers else None)


def _scored(
    collected: list[tuple[list[Impression], Columns]],
    clicked: dict[str, set[str]],
    config: BacktestConfig,
) -> Scored:
    events = [e for shown, _ in collected for e in shown]
    if not events:
        raise ContractError("the log has no impressions: there is nothing to rank and nothing to report")

    def column(name: str) -> npt.NDArray[np.generic]:
        return np.concatenate([c[name] for _, c in collected])

    sizes = np.array([len(e.ads) for e in events])
    label = np.zeros(int(sizes.sum()), np.float32)
    at = 0
    for e in events:
        hits = clicked.get(e.id)
        if hits:
            label[at : at + len(e.ads)] = [str(ad) in hits for ad in e.ads]
        at += len(e.ads)
    reported = np.array([e.ts >= config.start_ms for e in events])
    pairs = np.repeat(reported, sizes)
    if not reported.any():
        raise ContractError(f"no impression at or after start_ms = {config.start_ms}; the last is at {events[-1].ts}")
    return Scored(
        users=column("users")[reported].astype(np.uint64),
        ts_ms=np.array([e.ts for e in events], np.int64)[reported],
        splits=np.concatenate([[0], np.cumsum(sizes[reported])]).astype(np.int64),
        ids=[e.id for e, r in zip(events, reported, strict=True) if r],
        label=label[pairs],
        known=np.array([e.id in clicked for e in events])[reported],
        vm=column("vm")[pairs].astype(np.float32),
        solaris=column("solaris")[pairs].astype(np.float32),
        fm=column("fm")[pairs].astype(np.float32) if config.with_fm else None,
        source=column("source")[pairs].astype(np.int8),
        age_ms=column("age_ms")[pairs].astype(np.int64),
    )


def _blocks(events: Iterable[Event], size: int, every_ms: int) -> Iterator[tuple[list[Event], int]]:
    """Blocks of up to `size` events, each with the multiple of `every_ms` (0: none) that begins at it, or -1.

    A block ends before a catalogue record that would reach back to what came before it, and before a multiple of
    `every_ms`. Event time that steps back begins nothing.
    """
    block: list[Event] = []
    mentioned: set[str] = set()
    looked_at = 0
    due, begins = -1, -1
    for e in events:
        starts = -1
        if type(e) is Item:
            for earlier in block[looked_at:]:
                mentioned.update(_mentioned(earlier))
            looked_at = len(block)
        elif every_ms and (due < 0 or e.ts >= due):
            starts = e.ts - e.ts % every_ms if due >= 0 else -1
            due = e.ts - e.ts % every_ms + every_ms
        if len(block) >= size or starts >= 0 or (type(e) is Item and str(e.id) in mentioned):
            if block:
                yield block, begins
                begins = -1
            block, mentioned, looked_at = [], set(), 0
            begins = starts if starts >= 0 else begins
        block.append(e)
    if block:
        yield block, begins


def _mentioned(event: Event) -> Iterator[str]:
    """Ids of the items whose features the event's columns may need."""
    if isinstance(event, Candidates | Impression):
        yield from map(str, event.items if isinstance(event, Candidates) else event.ads)
        history = event.features.get("history")
        if isinstance(history, list):
            yield from map(str, history)


def _shorter(store: StoreSettings, delay_ms: int) -> StoreSettings:
    return dataclasses.replace(
        store, ttl_ms=max(1, store.ttl_ms - delay_ms), window_ms=max(1, store.window_ms - delay_ms)
    )
