# mypy: ignore-errors
# (numba gives these functions their types)
"""Many ids to their hashes: of a JSON list, without making strings of them, or of strings joined.

`hash_list` reads the lists that programs usually write: strings of plain ASCII without escapes, at most 128 long, and
integers as plain digits. Its hashes are those of `topics.ids`. A list with anything else in it is left undecided, not
wrong: the decoder and `topics.ids.hash_ids` say what it holds, or what is wrong with it.

The hash is XXH3 with 64 bits, seed 0 and the default secret, for inputs of up to 128 bytes, as specified in
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.

All kernels lie in this one file because numba notices a change only in the file of the kernel itself.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from topics.events import MAX_ITEMS

MAX_BYTES = 128
"""of an id that is hashed here; longer ones take another branch of XXH3"""
_MAX_DIGITS = 18
"""of an integer that is surely within 64 bits"""
_QUOTE, _SPACE, _COMMA, _MINUS, _ZERO, _NINE, _OPEN, _CLOSE, _BACKSLASH, _NEWLINE = b'" ,-09[]\\\n'

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364"
)
"""the first 128 of the default secret's 192 bytes"""


def _secret(at: int) -> np.uint64:
    return np.uint64(int.from_bytes(_SECRET[at : at + 8], "little"))


_SECRETS = np.array([_secret(8 * k) for k in range(16)])
_FLIP_3 = np.uint64(int.from_bytes(_SECRET[:4], "little") ^ int.from_bytes(_SECRET[4:8], "little"))
_FLIP_8 = _secret(8) ^ _secret(16)
_FLIP_16_LOW, _FLIP_16_HIGH = _secret(24) ^ _secret(32), _secret(40) ^ _secret(48)
_PRIME_1, _PRIME_2, _PRIME_3 = map(np.uint64, (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))
_PRIME_MX1, _PRIME_MX2 = map(np.uint64, (0x165667919E3779F9, 0x9FB21C651E98DF25))


def hash_list(text: bytes | memoryview) -> npt.NDArray[np.uint64] | None:
    """uint64 [n] hashes of a JSON list's ids, in order; None: undecided. `text` is that list and nothing else."""
    out = np.empty(len(text) // 2 + 1, np.uint64)
    count = _list(np.frombuffer(text, np.uint8), out)
    return out[:count] if count >= 0 else None


def hash_joined(text: bytes, count: int) -> npt.NDArray[np.uint64] | None:
    """uint64 [count] hashes of ids joined by newlines, UTF-8; None: there are not so many, or one is empty or longer
    than `MAX_BYTES`."""
    out = np.empty(count, np.uint64)
    return out if _joined(np.frombuffer(text, np.uint8), out) else None


@intrinsic
def _pointer(typing_context, array):
    """To the first element. Functions below take pointers: an array costs two atomic counts in every call."""

    def code(context, builder, signature, args):
        return cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data

    return numba.types.CPointer(array.dtype)(array), code


def _loader(bits: int) -> Any:
    """f(text, i): the little-endian word of so many bits at text[i], as uint64."""

    @intrinsic
    def load(typing_context, text, i):
        def code(context, builder, signature, args):
            place = builder.bitcast(builder.gep(args[0], [args[1]]), ir.IntType(bits).as_pointer())
            word = builder.load(place, align=1)
            return word if bits == 64 else builder.zext(word, ir.IntType(64))

        return numba.uint64(text, numba.int64), code

    return load


_four, _eight = _loader(32), _loader(64)


@intrinsic
def _folded(typing_context, a, b):
    """The two halves of the 128-bit product, xored."""

    def code(context, builder, signature, args):
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        high = builder.lshr(product, ir.Constant(wide, 64))
        return builder.trunc(builder.xor(product, high), ir.IntType(64))

    return numba.uint64(numba.uint64, numba.uint64), code


@intrinsic
def _swapped(typing_context, word):
    """Bytes in the other order."""

    def code(context, builder, signature, args):
        return builder.bswap(args[0])

    return numba.uint64(numba.uint64), code


_jit = numba.njit(cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_jit
def _rotated(h, by):
    return h << np.uint64(by) | h >> np.uint64(64 - by)


@_jit
def _avalanche(h):
    h ^= h >> np.uint64(37)
    h *= _PRIME_MX1
    return h ^ h >> np.uint64(32)


@_jit
def _mixed(text, i, secrets, k):
    """Sixteen bytes with the secret from its byte 8 * k on."""
    return _folded(_eight(text, i) ^ secrets[k], _eight(text, i + 8) ^ secrets[k + 1])


@_jit
def _hash(text, first, n):
    """XXH3-64 of text[first : first + n], 1 to `MAX_BYTES` bytes; 0 becomes 1, as `topics.ids.hash_id` has it."""
    size = np.uint64(n)
    last = first + n
    if n <= 3:
        h = (
            np.uint64(text[first]) << np.uint64(16)
            | np.uint64(text[first + (n >> 1)]) << np.uint64(24)
            | np.uint64(text[last - 1])
            | size << np.uint64(8)
        ) ^ _FLIP_3
        h ^= h >> np.uint64(33)
        h *= _PRIME_2
        h ^= h >> np.uint64(29)
        h *= _PRIME_3
        h ^= h >> np.uint64(32)
    elif n <= 8:
        h = (_four(text, last - 4) + (_four(text, first) << np.uint64(32))) ^ _FLIP_8
        h ^= _rotated(h, 49) ^ _rotated(h, 24)
        h *= _PRIME_MX2
        h ^= (h >> np.uint64(35)) + size
        h *= _PRIME_MX2
        h ^= h >> np.uint64(28)
    elif n <= 16:
        low = _eight(text, first) ^ _FLIP_16_LOW
        high = _eight(text, last - 8) ^ _FLIP_16_HIGH
        h = _avalanche(size + _swapped(low) + high + _folded(low, high))
    else:
        secrets = _pointer(_SECRETS)
        h = size * _PRIME_1
        if n > 32:
            if n > 64:
                if n > 96:
                    h += _mixed(text, first + 48, secrets, 12) + _mixed(text, last - 64, secrets, 14)
                h += _mixed(text, first + 32, secrets, 8) + _mixed(text, last - 48, secrets, 10)
            h += _mixed(text, first + 16, secrets, 4) + _mixed(text, last - 32, secrets, 6)
        h += _mixed(text, first, secrets, 0) + _mixed(text, last - 16, secrets, 2)
        h = _avalanche(h)
    return h if h else np.uint64(1)


@_jit
def _space(text, i, end):
    while i < end and (text[i] == _SPACE or 9 <= text[i] <= 10 or text[i] == 13):
        i += 1
    return i


@numba.njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)
def _list(array, out):
    """How many ids were put into `out`; -1: undecided."""
    text, end = _pointer(array), len(array)
    i = _space(text, 0, end)
    if i >= end or text[i] != _OPEN:
        return -1
    i = _space(text, i + 1, end)
    if i < end and text[i] == _CLOSE:
        return 0 if _space(text, i + 1, end) == end else -1
    count = 0
    while i < end and count < MAX_ITEMS:
        if text[i] == _QUOTE:
            first = i + 1
            i = first
            while i < end and text[i] != _QUOTE:
                if text[i] < _SPACE or text[i] >= 128 or text[i] == _BACKSLASH:
                    return -1
                i += 1
            last = i
            i += 1
        else:
            first = i
            if text[i] == _MINUS:
                i += 1
            digits = i
            while i < end and _ZERO <= text[i] <= _NINE:
                i += 1
            last = i
            if not 1 <= i - digits <= _MAX_DIGITS or (text[digits] == _ZERO and last - first > 1):
                return -1
        if not 1 <= last - first <= MAX_BYTES:
            return -1
        out[count] = _hash(text, first, last - first)
        count += 1
        i = _space(text, i, end)
        if i >= end:
            return -1
        if text[i] == _CLOSE:
            return count if _space(text, i + 1, end) == end else -1
        if text[i] != _COMMA:
            return -1
        i = _space(text, i + 1, end)
    return -1


@numba.njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)
def _joined(array, out):
    """Whether `out` has been filled."""
    text, end = _pointer(array), len(array)
    first = 0
    for k in range(len(out)):
        last = first
        while last < end and text[last] != _NEWLINE:
            last += 1
        if not 1 <= last - first <= MAX_BYTES:
            return False
        out[k] = _hash(text, first, last - first)
        first = last + 1
    return first == end + 1
