"""Ids: one hash for an integer and its decimal string, a bounded memo, any script."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.ids import IdHasher, hash_id

ANY = st.text(max_size=300) | st.integers(-(2**63), 2**64 - 1)


@given(st.integers(-(2**63), 2**64 - 1))
def test_integer_and_its_string_are_the_same_id(n: int) -> None:
    assert hash_id(n) == hash_id(str(n))


@given(st.lists(ANY, max_size=30))
def test_hasher_agrees_with_hash_id_cold_and_warm(ids: list[str | int]) -> None:
    hasher = IdHasher()
    want = [hash_id(i) for i in ids]
    for _ in range(2):
        out = hasher.many(ids)
        assert out.dtype == np.uint64
        assert out.tolist() == want
    assert [hasher.one(i) for i in ids] == want
    assert all(0 < h < 2**64 for h in want)


def test_published_values_never_change() -> None:
    assert [hash_id(x) for x in ("", "N7", 7, "ключ")] == GOLDEN


def test_memo_is_bounded_in_entries_and_in_bytes() -> None:
    hasher = IdHasher(capacity=10)
    for i in range(1_000):
        hasher.one(f"id{i}")
        assert len(hasher._memo) <= 10
    hasher = IdHasher()
    hasher.one("x" * 257)
    assert not hasher._memo
    assert hasher.many(["x" * 257]).tolist() == [hash_id("x" * 257)]


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_shape(n: int) -> None:
    assert IdHasher().many(list(range(n))).shape == (n,)


GOLDEN = [3244421341483603138, 11621980826514155534, 499566431179015674, 11102353883453021918]
