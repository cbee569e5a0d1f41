"""JSON bytes written from numba: digits, fixed-point numbers and ids into a uint8 buffer.

Every function takes the buffer and a position and returns the position after what it wrote. The caller makes sure
that there is room.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from topics.simulator.jit import inner

_TEN, _ZERO = np.uint64(10), np.uint64(48)


def text(s: str) -> Any:
    """Constant bytes for `put`."""
    return np.frombuffer(s.encode(), np.uint8)


@inner
def put(buf: Any, o: int, s: Any) -> int:
    for i in range(len(s)):
        buf[o + i] = s[i]
    return o + len(s)


@inner
def put_int(buf: Any, o: int, value: int) -> int:
    """A non-negative integer. Unsigned arithmetic: signed division rounds down in Python, which costs branches."""
    v = np.uint64(value)
    n = 1
    limit = _TEN
    while v >= limit:
        n += 1
        limit *= _TEN
    for i in range(n):
        q = v // _TEN
        buf[o + n - 1 - i] = np.uint8(_ZERO + (v - q * _TEN))
        v = q
    return o + n


@inner
def put_fixed(buf: Any, o: int, value: float, decimals: int) -> int:
    """A non-negative number with 2 or 3 decimals, rounded half up: 0.037, 12.50."""
    scale = 1000 if decimals == 3 else 100
    v = int(value * scale + 0.5)
    o = put_int(buf, o, v // scale)
    buf[o] = 46
    o += 1
    rest = v % scale
    if decimals == 3:
        buf[o] = 48 + rest // 100
        rest = rest % 100
        o += 1
    buf[o] = 48 + rest // 10
    buf[o + 1] = 48 + rest % 10
    return o + 2


@inner
def put_id(buf: Any, o: int, letter: int, value: int) -> int:
    """A quoted id: "a17"."""
    buf[o] = 34
    buf[o + 1] = letter
    o = put_int(buf, o + 2, value)
    buf[o] = 34
    return o + 1


@inner
def put_event_id(buf: Any, o: int, letter: int, user: int, sequence: int) -> int:
    """A quoted id of an event: "r17-5"."""
    buf[o] = 34
    buf[o + 1] = letter
    o = put_int(buf, o + 2, user)
    buf[o] = 45
    o = put_int(buf, o + 1, sequence)
    buf[o] = 34
    return o + 1


@inner
def put_ids(buf: Any, o: int, letter: int, ids: Any, n: int) -> int:
    """A list of quoted ids with its brackets."""
    buf[o] = 91
    o += 1
    for i in range(n):
        if i:
            buf[o] = 44
            o += 1
        o = put_id(buf, o, letter, ids[i])
    buf[o] = 93
    return o + 1


@inner
def put_numbers(buf: Any, o: int, values: Any, n: int, decimals: int) -> int:
    """A list of non-negative fixed-point numbers with its brackets."""
    buf[o] = 91
    o += 1
    for i in range(n):
        if i:
            buf[o] = 44
            o += 1
        o = put_fixed(buf, o, values[i], decimals)
    buf[o] = 93
    return o + 1
