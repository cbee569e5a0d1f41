"""The roles as steps of the transactional loop: decode, core, encode, and the stores of the partitions held."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from models.api import Runtime
from models.catalogue import Catalogue
from models.features import Encoder
from state.api import ChangelogRecord
from state.neighbours import Neighbours, NeighbourSettings
from streams.backlog import Backlog
from streams.count_stores import CountStores
from streams.decoding import catalogue_change, hashed_candidates, keyed_events, precompute_requests
from streams.embedder import Embedder
from streams.gate import Gate, GateSettings
from streams.ranker import Ranker
from streams.settings import Settings
from streams.step import Dead, Output, PlainStep, Record, StepResult
from streams.stores import Stores
from streams.verifier import Verifier
from topics.errors import InvalidEvent
from topics.events import (
    Candidates,
    Impression,
    Item,
    Rejected,
    decode_impression,
    encode,
)
from topics.packed import encode_embedding, encode_precompute, request_pairs

log = logging.getLogger(__name__)

# Of a packed request: item hash and score; its item features come on top.
_BYTES_PER_PAIR = 12


class BaseStep(PlainStep):
    """What the roles with a model share: the catalogue, feature encoder and the model's replacement."""

    reads_items = True

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        super().__init__()
        self.runtime, self.settings = runtime, settings
        self.catalogue = Catalogue(runtime.info.spec)
        self.encoder = Encoder(runtime.info.spec, self.catalogue)
        self.next_runtime: Callable[[], Runtime | None] = lambda: None
        """asked between batches for a model to go on with; it has the same feature spec"""

    def warm(self) -> None:
        """Everything once, so that the first batch is as fast as the second."""
        one = self.encoder.impressions([Impression("warm", "warm", 0, ["warm"], features={"history": ["warm"]})])
        vectors, _ = self.runtime.item_vectors(one.items, one.item_features)
        state = self.runtime.user_state(one)
        self.runtime.embed(one)
        self.runtime.score(one)
        self.runtime.dots(state, vectors, one.splits)

    def items(self, keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> None:
        changes: list[tuple[int, Item | None]] = []
        for key, value in zip(keys, values, strict=True):
            try:
                changes.append(catalogue_change(key, value))
            except InvalidEvent as e:
                self.counters["items_rejected"] += 1
                log.warning("catalogue record passed over: %s", e)
        self.catalogue.apply(changes)
        deleted = sum(item is None for _, item in changes)
        self.counters["items"] += len(changes) - deleted
        self.counters["items_deleted"] += deleted

    def idle(self) -> None:
        fresh = self.next_runtime()
        if fresh is not None:
            old, self.runtime = self.runtime, fresh
            self.swap(fresh)
            self.counters["non_finite"] += old.non_finite
            old.close()
            self.counters["bundles_swapped"] += 1

    def input_totals(self) -> Counter[str]:
        """Of the model, the features and the catalogue: what came in that could not be used as it was."""
        found = {
            "non_finite": self.runtime.non_finite,
            "mistyped": self.encoder.mistyped,
            "items_evicted": self.catalogue.evicted,
        }
        return self.counters + Counter(found)

    def swap(self, runtime: Runtime) -> None:
        """Gives the core another model; counters, gates and stores stay."""
        raise AssertionError(f"{type(self).__name__} has no core to swap")


class VerifierStep(BaseStep):
    role = "verifier"
    input_topic = "candidates"

    def __init__(self, runtime: Runtime, settings: Settings, backlog: Backlog | None = None) -> None:
        super().__init__(runtime, settings)
        self._gates = gate_settings(settings)
        self.core = Verifier(runtime, self.encoder, self._gates)
        self.backlog = backlog
        self._closed: Counter[str] = Counter()
        self.linger_s = settings.verifier.batch_age_ms / 1000

    def swap(self, runtime: Runtime) -> None:
        self.core.runtime = runtime

    def enough(self, records: int, value_bytes: int) -> bool:
        return records >= self.settings.loop.batch_records

    def warm(self) -> None:
        super().warm()
        hashed_candidates(encode(Candidates("warm", "warm", 0, ["warm"])))

    def open(self, partition: int, metadata: str | None, logs: Mapping[str, tuple[int, int]]) -> Mapping[str, int]:
        self.core.gates[partition] = Gate.load(self._gates, metadata)
        return {}

    def close(self, partition: int) -> None:
        if self.backlog is not None:
            self.backlog.forget(partition)
        before = self.core.totals()
        if self.core.gates.pop(partition, None) is not None:
            after = self.core.totals()
            self._closed.update({k: before[k] - after[k] for k in before})

    def metadata(self, partition: int) -> str:
        return self.core.gate(partition).dump()

    def run(self, records: Sequence[Record]) -> StepResult:
        events, sources, dead = keyed_events(records, hashed_candidates, self.settings.loop.max_ahead_ms)
        partitions = [records[i].partition for i in sources]
        backlog = self.backlog.pairs() if self.backlog is not None else {}
        requests = self.core.process(events, partitions, backlog)
        outputs = []
        sent: Counter[int] = Counter()
        pairs: Counter[int] = Counter()
        for i, q in zip(sources, requests, strict=True):
            try:
                value = encode_precompute(q)
            except ValueError as e:  # more columns than a record may hold
                dead.append(Dead(i, Rejected("output_too_large", str(e))))
                continue
            partition = records[i].partition
            outputs.append(Output("precompute", partition, records[i].key, value, i))
            sent[partition] += 1
            pairs[partition] += len(q.items)
        if self.backlog is not None:
            self.backlog.sent(sent, pairs, markers=int(self.settings.loop.guarantee == "exactly_once"))
        self.tally_dead(dead)
        return StepResult(outputs, dead)

    def totals(self) -> Mapping[str, int]:
        return Counter(self.core.totals()) + self._closed + self.input_totals()


class StateLane(BaseStep):
    """The embedder's quick lane: a user's state from every request, never behind a backlog of pairs."""

    role = "embedder-state"
    input_topic = "precompute"

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        super().__init__(runtime, settings)
        self.core = Embedder(runtime, self.encoder, settings.embedder.refresh, settings.store.ttl_ms)
        self.linger_s = settings.embedder.batch_age_ms / 1000

    def swap(self, runtime: Runtime) -> None:
        self.core.runtime = runtime

    def enough(self, records: int, value_bytes: int) -> bool:
        return records >= self.settings.loop.batch_records

    def run(self, records: Sequence[Record]) -> StepResult:
        spec = self.runtime.info.spec
        requests, sources, dead = precompute_requests(
            records, self.encoder.spec_hash, len(spec.item), len(spec.request)
        )
        outputs = []
        for i, chunk in zip(sources, self.core.states(requests), strict=True):
            if chunk is not None:
                outputs.append(Output("embeddings", records[i].partition, records[i].key, encode_embedding(chunk), i))
            else:
                dead.append(Dead(i, Rejected("state_not_finite", "the FM's user state has a value that is not finite")))
        # What the pair lane rejects too is its to report: one DLQ record per bad request.
        dead = [d for d in dead if d.rejected.reason == "state_not_finite"]
        self.tally_dead(dead)
        return StepResult(outputs, dead)

    def totals(self) -> Mapping[str, int]:
        return self.core.counters + self.input_totals()


class PairLane(BaseStep):
    """The embedder's heavy lane: FM embeddings of the accepted pairs that are not fresh."""

    role = "embedder"
    input_topic = "precompute"
    changelog_topic = "embeddings"
    follows: tuple[str, ...] = ("embeddings",)
    pure = False  # a pair just embedded is fresh to the next batch only when its chunk is applied

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        super().__init__(runtime, settings)
        self.core = Embedder(runtime, self.encoder, settings.embedder.refresh, settings.store.ttl_ms)
        self.stores = Stores(settings.store.dir / self.role, settings)
        self.linger_s = settings.embedder.batch_age_ms / 1000

    def swap(self, runtime: Runtime) -> None:
        self.core.runtime = runtime

    def enough(self, records: int, value_bytes: int) -> bool:
        per_pair = _BYTES_PER_PAIR + 4 * len(self.encoder.spec.item)
        return value_bytes >= per_pair * self.settings.embedder.batch_pairs

    def parts(self, records: Sequence[Record]) -> Sequence[Sequence[Record]]:
        """One FM call each: what is embedded first is servable first, however long the backlog behind it is."""
        parts: list[list[Record]] = []
        room = 0
        for r in records:
            pairs = request_pairs(r.value)
            if not parts or pairs > room:
                parts.append([])
                room = self.settings.embedder.batch_pairs
            parts[-1].append(r)
            room -= pairs
        return parts

    def open(self, partition: int, metadata: str | None, logs: Mapping[str, tuple[int, int]]) -> Mapping[str, int]:
        return {"embeddings": self.stores.open(partition, logs["embeddings"])}

    def close(self, partition: int) -> None:
        self.stores.close(partition)

    def follow(
        self, topic: str, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], next_offset: int
    ) -> None:
        self.stores.follow(partition, offsets, values, next_offset)

    def restored(self, partition: int) -> None:
        self.stores.restored(partition)

    def run(self, records: Sequence[Record]) -> StepResult:
        spec = self.runtime.info.spec
        requests, sources, dead = precompute_requests(
            records, self.encoder.spec_hash, len(spec.item), len(spec.request)
        )
        partitions = [records[i].partition for i in sources]
        chunks, bad = self.core.pairs(requests, partitions, self.stores.by_partition)
        outputs = []
        times: dict[int, list[int]] = {}
        for k, i in enumerate(sources):
            chunk = chunks[k]
            times.setdefault(partitions[k], []).append(requests[k].ts_ms)
            if chunk is not None:
                outputs.append(Output("embeddings", partitions[k], records[i].key, encode_embedding(chunk), i))
            if bad[k]:
                text = f"{bad[k]} of {len(requests[k].items)} pairs have an FM vector that is not finite; left out"
                dead.append(Dead(i, Rejected("vector_not_finite", text)))
        for p, ts in times.items():
            self.stores.advance(p, ts)
        self.tally_dead(dead)
        return StepResult(outputs, dead)

    def committed(self, outputs: Sequence[Output], offsets: Sequence[int]) -> None:
        by_partition: dict[int, list[ChangelogRecord]] = {}
        for o, offset in zip(outputs, offsets, strict=True):
            by_partition.setdefault(o.partition, []).append(ChangelogRecord(offset, o.value))
        for p, own in by_partition.items():
            self.stores.apply_own(p, own)

    def totals(self) -> Mapping[str, int]:
        return self.core.counters + self.stores.counters + self.input_totals()


class RankerStep(BaseStep):
    role = "ranker"
    input_topic = "impressions"
    follows: tuple[str, ...] = ("embeddings",)

    def __init__(self, runtime: Runtime, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        super().__init__(runtime, settings)
        self.core = Ranker(runtime, self.encoder, settings.ranker.explain, settings.ranker.vm_scores_share)
        self.stores = Stores(settings.store.dir / self.role, settings)
        self._restoring: set[int] = set()
        self._clock = clock
        self.restore_deadline_s = settings.ranker.restore_deadline_s
        self._neighbours: dict[int, Neighbours] = {}
        self._rebuild_due_s = 0.0
        self.counts: CountStores | None = None
        if runtime.info.rolling:
            self.counts = CountStores(settings.store.dir / f"{self.role}-counts", settings, runtime.info.count_lag_ms)
            self.follows = ("embeddings", "counts")
            self.broadcasts = ("item-counts",)

    def swap(self, runtime: Runtime) -> None:
        self.core.swap(runtime)
        for p in list(self._neighbours):
            self._drop_neighbours(p)
        for p in self.stores.by_partition:
            self._find_neighbours(p)

    def open(self, partition: int, metadata: str | None, logs: Mapping[str, tuple[int, int]]) -> Mapping[str, int]:
        self._restoring.add(partition)
        starts = {"embeddings": self.stores.open(partition, logs["embeddings"])}
        if self.counts is not None:
            starts["counts"] = self.counts.open(partition, logs["counts"])
        self._find_neighbours(partition)
        return starts

    def close(self, partition: int) -> None:
        self._restoring.discard(partition)
        if partition in self._neighbours:
            self._drop_neighbours(partition)
        self.stores.close(partition)
        if self.counts is not None:
            self.counts.close(partition)

    def idle(self) -> None:
        super().idle()
        now = time.monotonic()
        if self._neighbours and now >= self._rebuild_due_s:
            self._rebuild_due_s = now + self.settings.ranker.neighbours_every_s
            for p, neighbours in self._neighbours.items():
                clock_ms = self.stores.clock_ms(p)
                if clock_ms >= 0 and p not in self._restoring:
                    self.counters["neighbour_builds"] += neighbours.rebuild(clock_ms)

    def _find_neighbours(self, partition: int) -> None:
        k = self.settings.ranker.neighbours
        if k and "similar" in self.runtime.info.slots and self.runtime.info.profile_dim:
            self._neighbours[partition] = Neighbours(
                self.stores.by_partition[partition], self.runtime.info.fm_hash, self.core.dims,
                NeighbourSettings(k=k), self.stores.folder / f"{partition}-neighbours",
            )  # fmt: skip

    def _drop_neighbours(self, partition: int) -> None:
        neighbours = self._neighbours.pop(partition)
        neighbours.close()
        self.counters["neighbour_failures"] += neighbours.failed

    def follow(
        self, topic: str, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], next_offset: int
    ) -> None:
        followed = self.counts if topic == "counts" else self.stores
        assert followed is not None
        followed.follow(partition, offsets, values, next_offset)

    def hear(
        self, topic: str, partition: int, offsets: Sequence[int], values: Sequence[bytes | None], next_offset: int
    ) -> None:
        assert self.counts is not None
        self.counts.items.apply(partition, offsets, values, next_offset)

    def restored(self, partition: int) -> None:
        self._restoring.discard(partition)
        self.stores.restored(partition)
        if self.counts is not None:
            self.counts.restored(partition)

    def heard(self) -> None:
        if self.counts is not None:
            self.counts.items.restored = True

    def run(self, records: Sequence[Record]) -> StepResult:
        # Partition by partition, so that each store is asked once.
        order = sorted(range(len(records)), key=lambda i: records[i].partition)
        events, sources, dead = keyed_events(
            [records[i] for i in order], decode_impression, self.settings.loop.max_ahead_ms
        )
        sources, dead = [order[i] for i in sources], [Dead(order[d.source], d.rejected) for d in dead]
        outputs: list[Output] = []
        if events:
            partitions = [records[i].partition for i in sources]
            counts = self.counts.by_partition if self.counts is not None else None
            ranking = self.core.rank(events, partitions, self.stores.by_partition, self._neighbours, counts)
            answers = self.core.answers(
                events,
                ranking,
                [records[i].received_ms for i in sources],
                int(self._clock() * 1000),
                [p in self._restoring for p in partitions],
            )
            outputs = [
                Output("ranked-ads", records[i].partition, records[i].key, encode(a), i)
                for i, a in zip(sources, answers, strict=True)
            ]
            times: dict[int, list[int]] = {}
            for p, e in zip(partitions, events, strict=True):
                times.setdefault(p, []).append(e.ts)
            for p, ts in times.items():
                self.stores.advance(p, ts)
                if self.counts is not None:
                    self.counts.advance(p, self.stores.clock_ms(p))
        self.tally_dead(dead)
        return StepResult(outputs, dead)

    def totals(self) -> Mapping[str, int]:
        counts = self.counts.totals() if self.counts is not None else {}
        failed = Counter(neighbour_failures=sum(n.failed for n in self._neighbours.values()))
        return {**(self.core.counters + self.stores.counters + self.input_totals() + failed), **counts}


def gate_settings(settings: Settings) -> GateSettings:
    """The verifier's settings for one partition: the role's budget and backlog limits are shared out evenly."""
    v, n = settings.verifier, settings.kafka.partitions
    return GateSettings(
        threshold=v.threshold,
        top_k=v.top_k,
        per_user_cap=v.per_user_cap,
        cap_window_ms=v.per_user_cap_window_ms,
        budget_pairs_per_s=v.budget_pairs_per_s / n,
        budget_burst_s=v.budget_burst_s,
        budget_share=v.budget_share,
        backlog_low_pairs=max(1, v.backlog_high_pairs // (4 * n)),
        backlog_high_pairs=max(2, v.backlog_high_pairs // n),
    )
