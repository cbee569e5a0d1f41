# mypy: ignore-errors
# (numba gives these functions their types)
"""The state slot's numbers: dot products of a user's state with the vectors of the items asked for.

All kernels lie in this one file because numba notices a change only in the file of the kernel itself.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from models.api import F32, I32, I64

_LINE = 16
"""float32 of a cache line"""


def state_dots(
    state: F32, vectors: F32, rows: I32, splits: I64, heads: int, head_dim: int, towers: int, tower_dim: int
) -> F32:
    """[N, heads + towers]. `state` [B, heads * head_dim + towers * tower_dim]; `vectors` [M, V]; `rows` [N] says which
    of them is each pair's item; `splits` [B + 1].

    A head's number is ``sign(x) * log1p(|x|)`` of its dot x with the first `head_dim` numbers of the item's vector; a
    tower's is the dot with its own part of what follows them.
    """
    out: F32 = _dots(state, vectors, rows, splits, heads, head_dim, towers, tower_dim)
    if heads:
        _damp(out, heads)
    return out


@intrinsic
def _pointer(typing_context, array):
    def code(context, builder, signature, args):
        return cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data

    return numba.types.CPointer(array.dtype)(array), code


@intrinsic
def _fetch(typing_context, pointer, i):
    """Asks for the cache line of pointer[i]: items lie anywhere in a table that is larger than the caches."""

    def code(context, builder, signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(args[0], [args[1]]), byte)
        builder.call(function, [place, *(ir.Constant(number, k) for k in (0, 3, 1))])  # to read, keep, data
        return context.get_dummy_value()

    return numba.void(pointer, numba.int64), code


def _same_bits(to: Any, result: Any) -> Any:
    @intrinsic
    def cast(typing_context, value):
        def code(context, builder, signature, args):
            return builder.bitcast(args[0], to)

        return result(value), code

    return cast


_bits = _same_bits(ir.IntType(32), numba.int32)
_float = _same_bits(ir.FloatType(), numba.float32)


# Sums may be reordered, so that they run in vector registers: ten times faster, and the same on one machine.
_sums = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"}, no_cfunc_wrapper=True)


@_sums
def _dots(state, vectors, rows, splits, heads, head_dim, towers, tower_dim):
    out = np.empty((len(rows), heads + towers), np.float32)
    begin_state = heads * head_dim
    begin_item = head_dim if heads > 0 else 0
    table, width = _pointer(vectors), vectors.shape[1]
    for b in range(len(splits) - 1):
        for i in range(splits[b], splits[b + 1]):
            r = rows[i]
            if i + 1 < len(rows):
                ahead = np.int64(rows[i + 1]) * width
                for j in range(0, width, _LINE):
                    _fetch(table, ahead + j)
            for k in range(heads):
                total = np.float32(0.0)
                for j in range(head_dim):
                    total += state[b, k * head_dim + j] * vectors[r, j]
                out[i, k] = total
            for k in range(towers):
                total = np.float32(0.0)
                for j in range(tower_dim):
                    total += state[b, begin_state + k * tower_dim + j] * vectors[r, begin_item + k * tower_dim + j]
                out[i, heads + k] = total
    return out


# Not called from `_dots`: numba would hand its leave to reorder sums down to these, and Kahan's correction would go.
@numba.njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)
def _damp(out, heads):
    """sign(x) * log1p(|x|) of the first columns, in place."""
    flat = np.empty(_LINE * heads, np.float32)
    for first in range(0, len(out), _LINE):
        n = min(_LINE, len(out) - first)
        for i in range(n):
            for k in range(heads):
                flat[i * heads + k] = out[first + i, k]
        for j in range(n * heads):
            flat[j] = _signed_log1p(flat[j])
        for i in range(n):
            for k in range(heads):
                out[first + i, k] = flat[i * heads + k]


@numba.njit(cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _signed_log1p(x):
    """Within 3 units in the last place, without a branch or a call, so that it runs in vector registers: logarithm of
    the Cephes library (Moshier), and Kahan's correction for what ``1 + |x|`` loses."""
    size = abs(x)
    sum_ = np.float32(1.0) + size
    bits = _bits(sum_)
    # sum = m * 2**e with m from sqrt(1/2) to sqrt(2)
    e = np.int32((bits - 0x3F3504F3) >> 23)
    m = _float(np.int32(bits - (e << 23)))
    z = m - np.float32(1.0)
    q = np.float32(7.0376836292e-2)
    q = q * z - np.float32(1.1514610310e-1)
    q = q * z + np.float32(1.1676998740e-1)
    q = q * z - np.float32(1.2420140846e-1)
    q = q * z + np.float32(1.4249322787e-1)
    q = q * z - np.float32(1.6668057665e-1)
    q = q * z + np.float32(2.0000714765e-1)
    q = q * z - np.float32(2.4999993993e-1)
    q = q * z + np.float32(3.3333331174e-1)
    power = np.float32(e)
    y = q * z * z * z + power * np.float32(-2.12194440e-4) - np.float32(0.5) * z * z
    log = z + y + power * np.float32(0.693359375)
    kept = sum_ - np.float32(1.0)
    log1p = log * (size / kept) if kept > 0 else size
    log1p = log1p if size < np.float32(3e38) else size  # what is not finite stays so
    return log1p if x >= 0 else -log1p
