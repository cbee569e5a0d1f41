"""`njit` for functions that only other kernels call: without the wrappers for Python callers, most of whose code would
unpack the large tuples of arrays, compiling takes a third of the time."""

from __future__ import annotations

from numba import njit

inner = njit(cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")
outer = njit(cache=True, no_cfunc_wrapper=True, error_model="numpy")
