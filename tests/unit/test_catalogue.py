"""The catalogue against a plain dict, its bound, and its settings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.api import Feature, FeatureSpec
from models.catalogue import Catalogue
from topics.errors import SettingsError
from topics.events import Item
from topics.ids import hash_id

SPEC = FeatureSpec(item=(Feature("price"), Feature("kind", "category")), topic="kind")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=30), max_size=6))
def test_last_record_wins(updates: list[list[tuple[int, int]]]) -> None:
    catalogue, expected = Catalogue(SPEC), {}
    for update in updates:
        catalogue.update(Item(i, 0, {"price": p, "kind": "k"}) for i, p in update)
        expected.update(dict(update))
    asked = np.array([hash_id(i) for i in [*range(45), 3, 3]], np.uint64)
    got = catalogue.features(asked)
    assert got.shape == (2, 47)
    assert got[0].tolist() == [expected.get(i, 0) for i in [*range(45), 3, 3]]
    assert catalogue.known(asked).tolist() == [i in expected for i in [*range(45), 3, 3]]
    assert ((catalogue.topics(asked) > 0) == catalogue.known(asked)).all()
    assert len(catalogue) == len(expected)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 40), st.one_of(st.none(), st.integers(0, 9))), max_size=30), max_size=12)
)
def test_a_deleted_item_is_as_one_never_seen(updates: list[list[tuple[int, int | None]]]) -> None:
    catalogue: Catalogue = Catalogue(SPEC)
    expected: dict[int, int] = {}
    for update in updates:
        before, version = dict(expected), catalogue.version
        catalogue.apply((hash_id(i), None if p is None else Item(i, 0, {"price": p, "kind": "k"})) for i, p in update)
        for i, p in update:
            expected.pop(i, None)
            if p is not None:
                expected[i] = p
        changed = catalogue.changed_since(version)
        assert changed is not None
        assert {hash_id(i) for i in before.keys() | expected.keys() if before.get(i) != expected.get(i)} <= {*changed}
        fresh = Catalogue(SPEC)
        fresh.update(Item(i, 0, {"price": p, "kind": "k"}) for i, p in expected.items())
        asked = np.array([hash_id(i) for i in range(45)], np.uint64)
        assert (catalogue.features(asked) == fresh.features(asked)).all()
        assert (catalogue.topics(asked) == fresh.topics(asked)).all()
        assert (catalogue.known(asked) == fresh.known(asked)).all()
        assert len(catalogue) == len(fresh) == len(expected)


def test_items_that_come_and_go_neither_fill_the_table_nor_have_it_made_anew_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalogue, made = Catalogue(SPEC, capacity=4096), 0
    rebuild = catalogue._rebuild

    def counted(size: int) -> None:
        nonlocal made
        made += 1
        rebuild(size)

    monkeypatch.setattr(catalogue, "_rebuild", counted)
    catalogue.update(Item(i, 0, {"price": i}) for i in range(1023))
    for i in range(1023, 6000):
        catalogue.apply([(hash_id(i - 1023), None), (hash_id(i), Item(i, 0, {"price": i}))])
    assert len(catalogue) == 1023
    assert catalogue.evicted == 0
    assert len(catalogue._keys) <= 4096
    assert made < 20
    ids = np.array([hash_id(i) for i in range(6000)], np.uint64)
    assert catalogue.features(ids)[0].tolist() == [0.0] * (6000 - 1023) + list(range(6000 - 1023, 6000))


def test_deleted_items_make_room_before_others_are_evicted() -> None:
    catalogue = Catalogue(SPEC, capacity=100)
    catalogue.update(Item(i, 0, {"price": i}) for i in range(100))
    catalogue.apply((hash_id(i), None) for i in range(30))
    catalogue.update(Item(i, 0, {"price": i}) for i in range(100, 130))
    assert (len(catalogue), catalogue.evicted) == (100, 0)
    catalogue.update([Item(1000, 0)])
    ids = np.array([hash_id(i) for i in range(30, 130)], np.uint64)
    assert catalogue.evicted == 25
    assert catalogue.known(ids).tolist() == [False] * 25 + [True] * 75, "those written longest ago, wherever they lie"


def test_bounded_and_the_oldest_written_go_first() -> None:
    catalogue = Catalogue(SPEC, capacity=100)
    for i in range(1000):
        catalogue.update([Item(i, 0, {"price": i}), Item("always", 0, {"price": -1})])
    assert len(catalogue) <= 100
    assert catalogue.evicted == 1001 - len(catalogue)
    ids = np.array([hash_id("always"), hash_id(999), hash_id(0)], np.uint64)
    assert catalogue.known(ids).tolist() == [True, True, False]
    assert catalogue.features(ids)[0].tolist() == [-1, 999, 0]


def test_one_update_larger_than_the_bound() -> None:
    catalogue = Catalogue(SPEC, capacity=100)
    catalogue.update(Item(i, 0, {"price": i}) for i in range(1000))
    assert 0 < len(catalogue) <= 100
    assert catalogue.features(np.array([hash_id(999)], np.uint64))[0, 0] == 999


def test_version_moves_with_content() -> None:
    catalogue = Catalogue(SPEC)
    catalogue.update([])
    assert catalogue.version == 0
    catalogue.update([Item("a", 0)])
    assert catalogue.version == 1


def test_equal_categories_are_one() -> None:
    catalogue = Catalogue(SPEC)
    catalogue.update(Item(str(n), 0, {"kind": v}) for n, v in enumerate([1, 1.0, True, "1", 2, None]))
    topics = catalogue.topics(np.array([hash_id(str(n)) for n in range(6)], np.uint64))
    assert len(set(topics[:4].tolist())) == 1
    assert topics[4] != topics[0] != 0
    assert topics[5] == 0


def test_huge_numbers_stay_finite() -> None:
    catalogue = Catalogue(SPEC)
    catalogue.update([Item("a", 0, {"price": 10**400}), Item("b", 0, {"price": -(10**300)})])
    assert np.isfinite(catalogue.features(np.array([hash_id("a"), hash_id("b")], np.uint64))).all()


@pytest.mark.parametrize(
    "spec",
    [
        FeatureSpec(topic="kind"),
        FeatureSpec(item=(Feature("kind"),), topic="kind"),
        FeatureSpec(item=(Feature("a"), Feature("a", "category"))),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(spec: FeatureSpec) -> None:
    with pytest.raises(SettingsError):
        Catalogue(spec)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 60), max_size=8), max_size=12), st.sampled_from([20, 100]), st.data())
def test_what_changed_is_what_was_written_since(updates: list[list[int]], capacity: int, data: st.DataObject) -> None:
    catalogue = Catalogue(SPEC, capacity=capacity)
    versions, evicted = [0], [0]
    for price, update in enumerate(updates):
        catalogue.update(Item(i, 0, {"price": price}) for i in update)
        versions.append(catalogue.version)
        evicted.append(catalogue.evicted)
    since = data.draw(st.integers(0, len(updates)))
    changed = catalogue.changed_since(versions[since])
    if evicted[since] < catalogue.evicted:
        assert changed is None  # items that nobody wrote changed too
    else:
        assert changed is not None
        assert set(changed.tolist()) == {hash_id(i) for update in updates[since:] for i in update}


def test_changes_of_long_ago_are_not_known() -> None:
    catalogue = Catalogue(SPEC)
    for i in range(300):
        catalogue.update([Item(i, 0)])
    assert catalogue.changed_since(0) is None
    recent = catalogue.changed_since(290)
    assert recent is not None
    assert len(recent) == 10
