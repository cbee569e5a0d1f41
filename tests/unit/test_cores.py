"""The cores' rules, on the demo bundle and real stores: no broker, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.api import SOURCES, PairBatch, VmScores
from models.catalogue import Catalogue
from models.features import Encoder
from models.runtime import OnnxRuntime, open_runtime
from state.api import ChangelogRecord, StoreSettings
from state.store import RocksStore, open_store
from streams.embedder import Embedder, Refresh
from streams.gate import GateSettings
from streams.ranker import ItemVectors, Ranker
from streams.settings import DEMO_BUNDLE
from streams.verifier import Verifier
from topics.events import Candidates, Impression, Item
from topics.ids import hash_id
from topics.packed import EmbeddingChunk, PrecomputeRequest, decode_precompute, encode_embedding, encode_precompute

T0 = 1_767_225_600_000
HOUR = 3_600_000
TTL = 6 * HOUR


@pytest.fixture(scope="module")
def runtime() -> OnnxRuntime:
    return open_runtime(DEMO_BUNDLE)


class World:
    """All three cores over one store."""

    def __init__(self, runtime: OnnxRuntime, folder: Path, refresh: Refresh = "on_change") -> None:
        self.runtime = runtime
        catalogue = Catalogue(runtime.info.spec)
        catalogue.update(
            Item(f"N{i}", 0, {"category": f"t{i % 3}", "sub_category": f"s{i % 7}", "price": float(i)})
            for i in range(40)
        )
        self.encoder = Encoder(runtime.info.spec, catalogue)
        self.verifier = Verifier(runtime, self.encoder, GateSettings())
        self.embedder = Embedder(runtime, self.encoder, refresh, TTL)
        self.ranker = Ranker(runtime, self.encoder, explain=True)
        self.store: RocksStore = open_store(folder / "store", StoreSettings(ttl_ms=TTL))
        self.offset = 0

    def requests(self, events: Sequence[Candidates]) -> list[PrecomputeRequest]:
        return [decode_precompute(encode_precompute(q)) for q in self.verifier.process(events, [0] * len(events))]

    def apply(self, chunks: Sequence[EmbeddingChunk | None]) -> None:
        for chunk in chunks:
            if chunk is not None:
                self.store.apply([ChangelogRecord(self.offset, encode_embedding(chunk))])
                self.offset += 1

    def embed(self, events: Sequence[Candidates]) -> list[EmbeddingChunk | None]:
        requests = self.requests(events)
        chunks, bad = self.embedder.pairs(requests, [0] * len(requests), {0: self.store})
        assert not any(bad)
        self.apply(chunks)
        return chunks

    def states(self, events: Sequence[Candidates]) -> None:
        self.apply(self.embedder.states(self.requests(events)))

    def rank(self, *events: Impression):
        ranking = self.ranker.rank(events, [0] * len(events), {0: self.store})
        return self.ranker.answers(events, ranking, [0] * len(events), 0, [False] * len(events))


@pytest.fixture
def world(runtime: OnnxRuntime, tmp_path: Path):
    w = World(runtime, tmp_path)
    yield w
    w.store.close()


def offered(user: str, ts: int, items: Sequence[str], history: Sequence[str] = ("N1", "N2")) -> Candidates:
    return Candidates(f"c{user}{ts}", user, ts, list(items), features={"history": list(history)})


def shown(user: str, ts: int, ads: Sequence[str], bids: Sequence[float] | None = None, **kw) -> Impression:
    return Impression(f"i{user}{ts}", user, ts, list(ads), bids=None if bids is None else list(bids), **kw)


def items_of(chunk: EmbeddingChunk | None) -> set[int]:
    return set() if chunk is None else set(chunk.items.tolist())


# -- verifier ------------------------------------------------------------


def test_verifier_makes_one_model_call_per_batch_and_one_request_per_event(world: World, monkeypatch) -> None:
    calls: list[int] = []
    score = world.runtime.score

    def counted(batch: PairBatch) -> VmScores:
        calls.append(batch.pairs)
        return score(batch)

    monkeypatch.setattr(world.runtime, "score", counted)
    events = [offered("u1", T0, ["N3", "N4"]), offered("u2", T0, []), offered("u1", T0 + 1, ["N5"])]
    requests = world.verifier.process(events, [0, 1, 0])
    assert calls == [3]
    assert [len(r.items) for r in requests] == [2, 0, 1]
    assert [r.event_id for r in requests] == [e.id for e in events]


def test_verifier_decides_alike_however_events_are_batched(runtime: OnnxRuntime, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    events = [
        offered(f"u{i % 7}", T0 + i * 500, [f"N{k}" for k in rng.integers(0, 60, 30)], [f"N{i % 9}"])
        for i in range(120)
    ]
    outcomes = []
    for k, size in enumerate((1, 7, 120)):
        w = World(runtime, tmp_path / str(k))
        w.verifier = Verifier(runtime, w.encoder, GateSettings(budget_pairs_per_s=20, budget_burst_s=2, top_k=12))
        requests = [q for i in range(0, 120, size) for q in w.requests(events[i : i + size])]
        outcomes.append([q.items.tolist() for q in requests])
        totals = w.verifier.totals()
        refused = sum(v for name, v in totals.items() if name.startswith("refused_"))
        assert totals["pairs_seen"] == totals["pairs_accepted"] + refused == 120 * 30
        w.store.close()
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert 0 < sum(map(len, outcomes[0])) < 120 * 12


# -- embedder ------------------------------------------------------------


def test_vectors_are_the_fms_own_output_in_float16(world: World) -> None:
    event = offered("u1", T0, ["N7", "N3", "N9"])
    (chunk,) = world.embed([event])
    assert chunk is not None
    batch = world.encoder.candidates([event])
    want = world.runtime.embed(batch)
    order = np.argsort(batch.items)
    assert chunk.items.tolist() == batch.items[order].tolist()
    np.testing.assert_allclose(chunk.vectors.astype(np.float32), want[order], rtol=1e-3, atol=1e-4)


def test_a_fresh_pair_is_saved_and_counted(world: World) -> None:
    world.embed([offered("u1", T0, ["N7", "N3"])])
    (again,) = world.embed([offered("u1", T0 + HOUR, ["N7", "N3", "N4"])])
    assert items_of(again) == {hash_id("N4")}
    assert world.embedder.counters["pairs_saved"] == 2
    assert world.embedder.counters["pairs_embedded"] == 3
    assert world.embedder.counters["pairs_accepted"] == 5


def test_a_pair_is_computed_again_at_its_ttl_and_not_before(world: World) -> None:
    world.embed([offered("u1", T0, ["N7"])])
    assert world.embed([offered("u1", T0 + TTL - 1, ["N7"])]) == [None]
    assert items_of(world.embed([offered("u1", T0 + TTL, ["N7"])])[0]) == {hash_id("N7")}


def test_policy_on_change_recomputes_when_the_history_moved_and_ttl_does_not(
    runtime: OnnxRuntime, tmp_path: Path
) -> None:
    for policy, want in (("on_change", {hash_id("N7")}), ("ttl", set())):
        w = World(runtime, tmp_path / policy, policy)  # type: ignore[arg-type]
        w.embed([offered("u1", T0, ["N7"], ["N1"])])
        assert items_of(w.embed([offered("u1", T0 + 1000, ["N7"], ["N1", "N2"])])[0]) == want
        w.store.close()


def test_another_model_version_is_not_fresh(world: World) -> None:
    (chunk,) = world.embed([offered("u1", T0, ["N7"])])
    assert chunk is not None
    chunk.model += 1
    other = open_store(world.store.path.parent / "other", StoreSettings(ttl_ms=TTL))
    other.apply([ChangelogRecord(0, encode_embedding(chunk))])
    chunks, _ = world.embedder.pairs(world.requests([offered("u1", T0 + 1, ["N7"])]), [0], {0: other})
    assert items_of(chunks[0]) == {hash_id("N7")}
    other.close()


def test_within_a_batch_each_pair_is_embedded_once(world: World) -> None:
    chunks = world.embed(
        [offered("u1", T0, ["N7", "N3"]), offered("u1", T0 + 5, ["N3", "N7"]), offered("u2", T0, ["N7"])]
    )
    assert [items_of(c) for c in chunks] == [{hash_id("N7"), hash_id("N3")}, set(), {hash_id("N7")}]
    assert world.embedder.counters["pairs_saved"] == 2


@pytest.mark.parametrize("refresh", ["on_change", "ttl"])
def test_what_is_embedded_does_not_depend_on_the_batches(
    runtime: OnnxRuntime, tmp_path: Path, refresh: Refresh
) -> None:
    rng = np.random.default_rng(7)
    events = [
        offered(
            f"u{rng.integers(3)}",
            T0 + int(rng.integers(0, 9 * HOUR)),  # in any order: late events too
            [f"N{k}" for k in rng.choice(12, 4, replace=False)],
            [f"N{k}" for k in range(int(rng.integers(1, 3)))],
        )
        for _ in range(120)
    ]
    outcomes = []
    for k, size in enumerate((1, 10, 120)):
        w = World(runtime, tmp_path / str(k), refresh)
        chunks = [c for i in range(0, 120, size) for c in w.embed(events[i : i + size])]
        outcomes.append([sorted(items_of(c)) for c in chunks])
        w.store.close()
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert 0 < sum(map(len, outcomes[0])) < 480


def test_a_state_needs_no_pairs_and_a_backlog_of_pairs_does_not_delay_it(world: World) -> None:
    event = offered("u1", T0, [])
    world.states([event])
    assert world.embed([event]) == [None]
    (answer,) = world.rank(shown("u1", T0 + 2000, ["N7"]))
    assert (answer.sources, answer.ages_ms) == (["state"], [2000])


# -- ranker ------------------------------------------------------------


def test_each_slot_carries_its_age_and_the_best_one_names_the_source(world: World) -> None:
    world.embed([offered("u1", T0, ["N3"])])  # topic t0
    world.states([offered("u1", T0 + 1000, [])])
    (answer,) = world.rank(shown("u1", T0 + 5000, ["N3", "N6", "N4"]))
    by_ad = dict(zip(answer.ads, zip(answer.sources, answer.ages_ms, strict=True), strict=True))
    assert by_ad == {"N3": ("direct", 5000), "N6": ("topic", 5000), "N4": ("state", 4000)}
    assert answer.slots is not None
    of_n4 = {name: ages[answer.ads.index("N4")] for name, ages in answer.slots.items()}
    assert of_n4 == {"direct": None, "topic": None, "state": 4000, "aggregate": 5000, "similar": None}


def test_the_vm_alone_is_scored_beside_in_a_share_of_the_messages(world: World) -> None:
    world.embed([offered("u1", T0, ["N3"])])
    event = shown("u1", T0 + 5000, ["N3", "N6", "N4"])
    assert world.rank(event)[0].vm_scores is None
    world.ranker.vm_scores_share = 1.0
    (answer,) = world.rank(event)
    alone = world.runtime.score(world.encoder.impressions([event])).logit
    expected = 1 / (1 + np.exp(-alone[answer.positions].astype(np.float64)))
    assert answer.vm_scores is not None
    np.testing.assert_allclose(answer.vm_scores, expected, atol=1e-6)
    assert answer.scores != answer.vm_scores


def test_an_impression_does_not_see_what_came_after_it(world: World) -> None:
    world.embed([offered("u1", T0, ["N3"])])
    early, at = world.rank(shown("u1", T0 - 1, ["N3"]), shown("u1", T0, ["N3"]))
    assert (early.sources, early.ages_ms) == (["none"], [None])
    assert (at.sources, at.ages_ms) == (["direct"], [0])


def test_an_expired_vector_is_as_if_it_had_never_been(world: World) -> None:
    nothing = world.rank(shown("u1", T0 + 24 * HOUR, ["N3", "N9"]))[0]
    world.embed([offered("u1", T0, ["N3"])])
    alive, expired = world.rank(shown("u1", T0 + TTL - 1, ["N3", "N9"]), shown("u1", T0 + 24 * HOUR, ["N3", "N9"]))
    assert alive.sources[alive.ads.index("N3")] == "direct"
    assert (expired.ads, expired.scores, expired.sources) == (nothing.ads, nothing.scores, nothing.sources)


def test_a_pair_without_anything_gets_the_base_score(world: World) -> None:
    event = shown("stranger", T0, ["N3", "unknown item"])
    (answer,) = world.rank(event)
    base = 1 / (1 + np.exp(-world.runtime.score(world.encoder.impressions([event])).logit))
    got = dict(zip(answer.positions, answer.scores, strict=True))
    assert [got[0], got[1]] == pytest.approx(base.tolist(), abs=1e-6)
    assert answer.sources == ["none", "none"]


def test_order_is_by_score_times_bid_and_ties_keep_their_order(world: World) -> None:
    ads = [f"N{i}" for i in range(12)]
    plain = world.rank(shown("u1", T0, ads))[0]
    assert plain.scores == sorted(plain.scores, reverse=True)
    bids = [1.0, 50.0, 0.0, 2.0, 0.5, 3.0, 1.0, 9.0, 0.1, 4.0, 0.0, 1.0]
    paid = world.rank(shown("u1", T0, ads, bids))[0]
    value = [s * bids[p] for s, p in zip(paid.scores, paid.positions, strict=True)]
    assert value == sorted(value, reverse=True)
    assert paid.positions[-2:] == [2, 10], "both worth nothing: in the order received"
    twice = world.rank(shown("u1", T0, ["N5", "N3", "N5"]))[0]
    assert sorted(twice.positions) == [0, 1, 2]
    assert twice.positions.index(0) < twice.positions.index(2), "the same ad twice ties"
    assert twice.ads.count("N5") == 2


def test_no_ads_and_very_many_ads(world: World) -> None:
    world.embed([offered("u1", T0, ["N3"])])
    none, many = world.rank(shown("u1", T0, []), shown("u1", T0 + 1, [f"N{i}" for i in range(5_000)]))
    assert (none.ads, none.scores, none.sources) == ([], [], [])
    assert len(many.ads) == 5_000
    assert many.sources[many.ads.index("N3")] == "direct"
    assert sorted(many.positions) == list(range(5_000))


def test_an_impressions_answer_does_not_depend_on_its_batch(world: World) -> None:
    world.embed([offered(f"u{i}", T0 + i, [f"N{k}" for k in range(i, i + 9)]) for i in range(20)])
    world.states([offered(f"u{i}", T0 + i, []) for i in range(0, 20, 2)])
    events = [shown(f"u{i % 25}", T0 + 50 + i, [f"N{(i * k) % 40}" for k in range(1, 15)]) for i in range(60)]
    together = world.rank(*events)
    alone = [world.rank(e)[0] for e in events]
    for a, b in zip(together, alone, strict=True):
        assert sorted(zip(a.positions, a.sources, a.ages_ms, strict=True)) == sorted(
            zip(b.positions, b.sources, b.ages_ms, strict=True)
        )
        assert dict(zip(a.positions, a.scores, strict=True)) == pytest.approx(
            dict(zip(b.positions, b.scores, strict=True)), abs=2e-6
        )
    assert {s for a in together for s in a.sources} <= set(SOURCES)


def test_an_items_vector_follows_the_catalogue(world: World) -> None:
    world.states([offered("u1", T0, [])])
    before = world.rank(shown("u1", T0 + 1, ["N3"]))[0].scores
    world.encoder.catalogue.update([Item("N3", 1, {"category": "t9", "sub_category": "s99", "price": 1e4})])
    after = world.rank(shown("u1", T0 + 1, ["N3"]))[0].scores
    assert before != after


def test_item_vectors_are_computed_once_and_anew_where_the_record_changed(
    runtime: OnnxRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    plain = type(runtime).item_vectors

    def counting(self: OnnxRuntime, items: Any, features: Any) -> Any:
        computed.append(len(items))
        return plain(self, items, features)

    monkeypatch.setattr(type(runtime), "item_vectors", counting)
    catalogue = Catalogue(runtime.info.spec)
    kept = ItemVectors(runtime, catalogue, capacity=1_500)

    def asked(*names: int) -> tuple[np.ndarray, np.ndarray]:
        vectors, rows, topics = kept.get(np.array([hash_id(n) for n in names], np.uint64))
        return vectors[rows], topics

    def expected(*names: int) -> tuple[np.ndarray, np.ndarray]:
        items = np.array([hash_id(n) for n in names], np.uint64)
        return plain(runtime, items, catalogue.features(items))

    def same(*names: int) -> bool:
        got, want = asked(*names), expected(*names)
        return bool(np.allclose(got[0], want[0], atol=1e-5) and (got[1] == want[1]).all())

    for first in range(0, 1_000, 50):  # grows in several steps
        assert same(*range(first, first + 50), 0, first)
    assert sum(computed) == 1_000
    catalogue.update([Item(n, 1, {"category": "t9", "price": 1e4}) for n in (3, 777, 5_000)])
    computed.clear()
    assert same(3, 4, 777, 999)
    assert computed == [2]  # only what was kept and has changed
    assert same(5_000, 3)
    assert computed == [2, 1]
    computed.clear()
    assert same(*range(2_000, 2_600))  # beyond the capacity all is forgotten
    assert same(3)
    assert computed == [600, 1]


def test_several_partitions_in_one_batch(world: World) -> None:
    other = open_store(world.store.path.parent / "p1", StoreSettings(ttl_ms=TTL))
    world.embed([offered("u1", T0, ["N3"])])
    chunks, _ = world.embedder.pairs(world.requests([offered("u2", T0, ["N4"])]), [1], {1: other})
    other.apply([ChangelogRecord(0, encode_embedding(c)) for c in chunks if c is not None])
    events = [shown("u2", T0 + 1, ["N3", "N4"]), shown("u1", T0 + 1, ["N3", "N4"])]
    ranking = world.ranker.rank(events, [1, 0], {0: world.store, 1: other})
    two, one = world.ranker.answers(events, ranking, [0, 0], 0, [False, True])
    assert (two.sources[two.ads.index("N4")], two.sources[two.ads.index("N3")]) == ("direct", "aggregate")
    assert (one.sources[one.ads.index("N3")], one.sources[one.ads.index("N4")]) == ("direct", "aggregate")
    assert (two.state, one.state) == ("live", "restoring")
    other.close()
