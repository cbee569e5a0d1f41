from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from state import kernels
from state.jit import HAS_HALF
from state.quantise import HALF_MAX, from_int8, relative_error, to_half, to_int8

vectors = arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 17)), elements=st.floats(-1e6, 1e6, width=32))


@given(vectors)
def test_int8_is_off_by_half_a_scale_at_most(v: np.ndarray) -> None:
    q, scales = to_int8(v)
    assert (q.dtype, scales.dtype, q.shape) == (np.int8, np.float32, v.shape)
    limit = 0.5001 * scales[:, None] + 1e-37
    assert (np.abs(from_int8(q, scales) - v) <= limit).all()


def test_int8_of_zeros_and_of_nothing() -> None:
    q, scales = to_int8(np.zeros((2, 3), np.float32))
    assert not q.any()
    assert not scales.any()
    assert to_int8(np.zeros((0, 3), np.float32))[0].shape == (0, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        to_int8(np.array([[1.0, bad]], np.float32))


def test_half_keeps_large_numbers_finite() -> None:
    np.testing.assert_array_equal(to_half(np.array([[1e9, -1e9, 0.5]], np.float32)), [[HALF_MAX, -HALF_MAX, 0.5]])


def test_errors_on_vectors_as_a_model_makes_them() -> None:
    """17 numbers of falling variance and a logit, as PCA gives them."""
    rng = np.random.default_rng(0)
    v = (rng.standard_normal((20_000, 17)) * (0.8 ** np.arange(17))).astype(np.float32)
    assert relative_error(v, to_half(v)) < 3e-4
    assert relative_error(v, from_int8(*to_int8(v))) < 0.01


@pytest.mark.parametrize("name", ["half_by_bits", "half_by_instruction"])
def test_every_finite_float16_is_decoded_exactly(name: str) -> None:
    if name == "half_by_instruction" and not HAS_HALF:
        pytest.skip("this processor has no such instruction")
    bits = np.arange(1 << 16).astype(np.uint16)
    bits = bits[(bits & 0x7C00) != 0x7C00]
    decode = getattr(kernels, name)
    got = np.array([decode(b) for b in bits], np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), bits.view(np.float16).astype(np.float32).view(np.uint32))
