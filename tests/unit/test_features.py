"""Events to columns: values, missing data, batch independence, the two paths (verifier and embedder) alike."""

from __future__ import annotations

import time
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import kernels
from models.api import Feature, FeatureSpec, PairBatch
from models.catalogue import Catalogue
from models.features import (
    COUNTERS,
    Encoder,
    concat,
    fingerprint,
    fingerprints,
    history_counters,
    requests,
    select,
)
from topics.errors import DecodeError
from topics.events import Candidates, Impression, Item
from topics.ids import hash_id
from topics.packed import decode_precompute, encode_precompute

SPEC = FeatureSpec(
    request=(Feature("hour"), Feature("device", "category")),
    item=(Feature("category", "category"), Feature("price")),
    history_length=3,
    topic="category",
)


def make(spec: FeatureSpec = SPEC) -> tuple[Encoder, Catalogue]:
    catalogue = Catalogue(spec)
    catalogue.update(
        [
            Item("a", 0, {"category": "sport", "price": 2.5}),
            Item("b", 0, {"category": "news", "price": 4}),
            Item("c", 0, {"category": "sport"}),
        ]
    )
    return Encoder(spec, catalogue), catalogue


def same(left: PairBatch, right: PairBatch) -> None:
    for f in fields(PairBatch):
        x, y = getattr(left, f.name), getattr(right, f.name)
        assert x.dtype == y.dtype, f.name
        np.testing.assert_array_equal(x, y, err_msg=f.name)


def test_columns_of_an_impression() -> None:
    encoder, catalogue = make()
    event = Impression(
        "i",
        "u",
        1000,
        ["a", "b", "zz"],
        features={
            "history": ["b", "a", "c", "a"],
            "history_ts": [1, 2, None, 4],
            "history_kind": [0, 1, "view", 1],
            "hour": 7,
            "device": "phone",
        },
        ad_features={"price": [9, None, 1]},
    )
    batch = encoder.impressions([event])
    sport = catalogue.topics(batch.items)[0]
    assert batch.users.tolist() == [hash_id("u")]
    assert batch.items.tolist() == [hash_id("a"), hash_id("b"), hash_id("zz")]
    assert batch.item_features[1].tolist() == [9, 4, 1]
    assert batch.item_features[0, 0] == sport
    assert batch.item_features[0, 2] == 0
    assert batch.request_features[0, 0] == 7
    assert batch.request_features[0, 1] > 0
    assert batch.history.tolist() == [hash_id("a"), hash_id("c"), hash_id("a")]
    assert batch.history_ts.tolist() == [2, -1, 4]
    assert batch.history_kind[0] == batch.history_kind[2] == 1
    assert batch.history_kind[1] == 1 + hash_id("view") % 255
    assert batch.history_features[0].tolist() == [sport, sport, sport]


def test_counters_say_what_their_names_say() -> None:
    encoder, catalogue = make()
    minute = 60_000
    event = Impression(
        "i",
        "u",
        10 * minute,
        ["a", "b", "zz"],
        features={"history": ["a", "c", "a"], "history_ts": [minute, 2 * minute, 9 * minute]},
    )
    batch = encoder.impressions([event])
    table = dict(zip(COUNTERS, history_counters(batch, catalogue.topic_column).T, strict=True))
    np.testing.assert_allclose(np.expm1(table["item_touches"]), [2, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(table["item_recency"], [1, 0, 0])
    np.testing.assert_allclose(np.expm1(table["item_age"]), [1, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(np.expm1(table["topic_touches"]), [3, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(np.expm1(table["history_length"]), [3, 3, 3], rtol=1e-6)
    np.testing.assert_allclose(np.expm1(table["user_age"]), [1, 1, 1], rtol=1e-6)


def test_verifier_and_embedder_see_the_same_columns() -> None:
    encoder, _ = make()
    events = [
        Candidates("c1", "u", 5, ["a", 7, "b"], features={"history": ["b", 7], "history_kind": [2, 3], "hour": 3}),
        Candidates("c2", "v", 6, ["b"], item_features={"price": [3.25]}),
        Candidates("c3", "w", 7, []),
    ]
    batch = encoder.candidates(events)
    keep = np.split(np.arange(batch.pairs), batch.splits[1:-1])
    scores, profiles = np.zeros(batch.pairs, np.float32), np.zeros((3, 0), np.float32)
    requests = encoder.to_precompute(batch, keep, scores, profiles, [e.id for e in events])
    wire = [decode_precompute(encode_precompute(r)) for r in requests]
    assert [r.event_id for r in wire] == ["c1", "c2", "c3"]
    same(encoder.from_precompute(wire), batch)


def test_columns_that_do_not_fit_the_spec_are_refused() -> None:
    encoder, _ = make()
    other, _ = make(FeatureSpec())
    batch = other.candidates([Candidates("c", "u", 1, ["a"])])
    (one,) = other.to_precompute(batch, [np.arange(1)], np.zeros(1, np.float32), np.zeros((1, 0), np.float32), ["c"])
    with pytest.raises(DecodeError, match="wrong_spec"):
        encoder.from_precompute([one])


value = st.one_of(st.none(), st.booleans(), st.integers(-5, 400), st.floats(-9, 300), st.sampled_from(["x", "1", "y"]))


@st.composite
def impression(draw: st.DrawFn) -> Impression:
    n = draw(st.integers(0, 5))
    ids = st.one_of(st.sampled_from(["a", "b", "c", "q"]), st.integers(0, 3))
    h = draw(st.integers(0, 5))
    features = {
        "history": draw(st.lists(ids, min_size=h, max_size=h)),
        "history_ts": draw(st.lists(value, min_size=h, max_size=h)),
        "history_kind": draw(st.lists(value, min_size=h, max_size=h)),
        "hour": draw(value),
        "device": draw(st.one_of(value, st.just([1]))),
    }
    if draw(st.booleans()):
        del features["history_ts"], features["history_kind"]
    columns = {"price": draw(st.lists(value, min_size=n, max_size=n))} if draw(st.booleans()) else None
    return Impression("i", "u", draw(st.integers(0, 10**12)), draw(st.lists(ids, min_size=n, max_size=n)),
                      features=features, ad_features=columns)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(impression(), min_size=1, max_size=5))
def test_a_request_does_not_depend_on_its_batch(events: list[Impression]) -> None:
    encoder, catalogue = make()
    together = encoder.impressions(events)
    alone = [make()[0].impressions([e]) for e in events]
    same(concat(alone), together)
    for b, one in enumerate(alone):
        same(requests(together, b, b + 1), one)
    column = catalogue.topic_column
    np.testing.assert_array_equal(
        history_counters(together, column), np.concatenate([history_counters(b, column) for b in alone])
    )
    np.testing.assert_allclose(
        history_counters(together, column),
        kernels.counters_reference(
            together.splits, together.items, together.item_features[0], together.ts_ms, together.history_splits,
            together.history, together.history_features[0], together.history_ts,
        ),
        rtol=1e-6,
    )  # fmt: skip
    assert np.isfinite(together.item_features).all()
    assert np.isfinite(together.request_features).all()


def test_select_keeps_requests_and_order() -> None:
    encoder, _ = make()
    batch = encoder.impressions([Impression("1", "u", 1, ["a", "b"]), Impression("2", "v", 1, ["c"])])
    part = select(batch, np.array([False, True, False]))
    assert part.splits.tolist() == [0, 1, 1]
    assert part.items.tolist() == [hash_id("b")]
    assert part.item_features.shape == (2, 1)
    assert part.requests == 2


def test_fingerprint_is_of_the_newest_entries() -> None:
    history = np.array([1, 2, 3, 4], np.uint64)
    assert fingerprint(history, 2) == fingerprint(history[2:])
    assert fingerprint(history) != fingerprint(history[2:])
    assert fingerprint(history[:0]) != 0
    encoder, _ = make()
    batch = encoder.impressions(
        [
            Impression("1", "u", 1, ["a"], features={"history": ["x", "a", "b", "c"]}),
            Impression("2", "u", 1, ["a"], features={"history": ["a", "b", "c"]}),
            Impression("3", "u", 1, ["a"]),
        ]
    )
    prints = fingerprints(batch)
    assert prints[0] == prints[1] != prints[2]
    assert int(prints[0]) == fingerprint(batch.history[:3])


def test_mistyped_values_are_counted() -> None:
    encoder, _ = make()
    encoder.impressions([Impression("1", "u", 1, ["a"], features={"hour": "seven"}, ad_features={"price": ["x"]})])
    assert encoder.mistyped == 2


def test_codes() -> None:
    ids = np.array([0, 1, hash_id("a"), 2**64 - 1], np.uint64)
    codes = kernels.hash_codes(ids)
    np.testing.assert_array_equal(codes, kernels.hash_codes_reference(ids))
    np.testing.assert_allclose((codes**2).sum(1), [0, 1, 1, 1])


def test_a_batch_is_encoded_quicker_than_its_requests_one_by_one() -> None:
    """300 requests of 100 items. A bound in seconds would be one on the machine; the figure is in docs/models.md."""
    encoder, catalogue = make()
    catalogue.update(Item(i, 0, {"category": i % 20, "price": i}) for i in range(5000))
    events = [
        Candidates(str(k), f"u{k}", 1, [(k * 37 + i) % 5000 for i in range(100)],
                   features={"history": list(range(k, k + 20)), "hour": 3, "device": "tv"})
        for k in range(300)
    ]  # fmt: skip
    encoder.candidates(events)
    together = min(_timed(encoder, [events]) for _ in range(5))
    apart = min(_timed(encoder, [[e] for e in events]) for _ in range(5))
    assert together < apart


def _timed(encoder: Encoder, batches: list[list[Candidates]]) -> float:
    start = time.perf_counter()
    for batch in batches:
        encoder.candidates(batch)
    return time.perf_counter() - start
