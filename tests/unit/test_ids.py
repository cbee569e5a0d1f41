"""Ids: one hash for an integer and its decimal string, any script, one by one and many at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.ids import hash_id, hash_ids

ANY = st.text(max_size=300) | st.integers(-(2**63), 2**64 - 1)


@given(st.integers(-(2**63), 2**64 - 1))
def test_integer_and_its_string_are_the_same_id(n: int) -> None:
    assert hash_id(n) == hash_id(str(n))


@given(st.lists(ANY, max_size=30) | st.lists(st.text(max_size=20) | st.sampled_from(["a\nb", "\n", "", "é" * 64])))
def test_many_are_hashed_as_one_by_one(ids: list[str | int]) -> None:
    out = hash_ids(ids)
    assert out.dtype == np.uint64
    assert out.tolist() == [hash_id(i) for i in ids]
    assert all(0 < h < 2**64 for h in out.tolist())


def test_published_values_never_change() -> None:
    assert [hash_id(x) for x in ("", "N7", 7, "ключ")] == GOLDEN


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_shape(n: int) -> None:
    assert hash_ids(list(range(n))).shape == (n,)


GOLDEN = [3244421341483603138, 11621980826514155534, 499566431179015674, 11102353883453021918]
