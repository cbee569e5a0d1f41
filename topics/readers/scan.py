# mypy: ignore-errors
# (numba gives these functions their types)
"""A compiled check of the lines of a JSON Lines log: what a replay must know of a line, without making objects of it.

`scan` decides the lines that look as programs usually write them: one JSON object in plain ASCII without escapes, no
name of interest twice, integers as plain digits. Of such a line it checks the whole syntax, and type, ids, user, time
and item list by the rules of `topics.replay_records`. What it leaves undecided is not wrong for that: those lines go
through the decoder. What it decides, the decoder would have accepted with the same result.

Two passes over a line, as in Langdale and Lemire, "Parsing Gigabytes of JSON per Second" (2019): the first finds the
places of all quotes, and outside of strings those of ``{}[]:,`` and of the first byte of anything else but spaces, 64
bytes at a time; the second walks over these places, the line's *tokens*.

All kernels lie in this one file because numba notices a change only in the file of the kernel itself.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from topics.events import MAX_ID_CHARS, MAX_ITEMS, MAX_TS

UNDECIDED, CANDIDATES, IMPRESSION, FEEDBACK, ITEM = range(5)
"""types; those that are decided in the order of `topics.replay_records.TOPICS`"""

_BLOCK = 64
_MAX_DEPTH = 32
_MAX_DIGITS = 18
"""of an integer that is surely within 64 bits"""
_TYPE, _ID, _USER, _TS, _ITEMS, _ADS, _CLICKED = range(1, 8)
_QUOTE, _SPACE, _COMMA, _COLON, _MINUS, _DOT, _ZERO, _NINE = b'" ,:-.09'
_OBJECT, _LIST, _OBJECT_END, _LIST_END = b"{[}]"
_NEWLINE = 10
_FOLD = 0x20
"""the bit by which [ and { differ, and ] and }; the other bytes that are looked for have it"""
_LOWER_E = ord("e")
_0, _1 = np.uint64(0), np.uint64(1)


def _words(*words: bytes) -> Any:
    """uint64 [words, 2]: their first eight bytes, and the next eight."""
    return np.array([np.frombuffer(word.ljust(16, b"\0"), "<u8") for word in words])


_NAMES = _words(b"type", b"id", b"user", b"ts", b"items", b"ads", b"clicked")
_TYPES = _words(b"candidates", b"impression", b"feedback", b"item")
_LITERALS = _words(b"true", b"false", b"null")
_NEED = np.array(
    [0] + [1 << _ID | 1 << _USER | 1 << _TS | 1 << items for items in (_ITEMS, _ADS, _CLICKED)] + [1 << _ID | 1 << _TS]
)
"""by type: the names that must be there"""


def scan(text: bytes) -> Any:
    """int64 [7, lines] for one of the texts of `jsonl.texts`. Rows: the type (one of the above), where in the text the
    key begins and where it ends, the event time, the number of candidate or shown items, where the line begins and
    where it ends. Of undecided lines only the last two are filled."""
    found = np.zeros((7, text.count(b"\n")), np.int64)
    _scan(np.frombuffer(text, np.uint8), len(text) - _BLOCK, found)
    return found


@intrinsic
def _pointer(typing_context, array):
    """To the first element. Functions below take pointers: an array costs two atomic counts in every call."""

    def code(context, builder, signature, args):
        return cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data

    return numba.types.CPointer(array.dtype)(array), code


def _load(builder: Any, args: Any, kind: Any) -> Any:
    """What lies at text[i]; `args` are text and i."""
    return builder.load(builder.bitcast(builder.gep(args[0], [args[1]]), kind.as_pointer()), align=1)


_VECTOR = ir.VectorType(ir.IntType(8), _BLOCK)


def _all(byte: int) -> Any:
    return ir.Constant(_VECTOR, [byte] * _BLOCK)


def _finder(byte: int, fold: int = 0) -> Any:
    """f(text, i): a bit for each of the 64 bytes at text[i] that is `byte` once the bits `fold` are set in it."""

    @intrinsic
    def find(typing_context, text, i):
        def code(context, builder, signature, args):
            found = builder.or_(_load(builder, args, _VECTOR), _all(fold))
            return builder.bitcast(builder.icmp_unsigned("==", found, _all(byte)), ir.IntType(64))

        return numba.uint64(text, numba.int64), code

    return find


_quotes = _finder(_QUOTE)
_backslashes = _finder(ord("\\"))
_spaces = _finder(_SPACE)
_opens = _finder(_OBJECT, _FOLD)
_closes = _finder(_OBJECT_END, _FOLD)
_commas = _finder(_COMMA)
_colons = _finder(_COLON)
_newlines = _finder(_NEWLINE)


@intrinsic
def _strange(typing_context, text, i):
    """The bits of control characters and of bytes beyond ASCII."""

    def code(context, builder, signature, args):
        found = _load(builder, args, _VECTOR)
        return builder.bitcast(builder.icmp_signed("<", found, _all(32)), ir.IntType(64))

    return numba.uint64(text, numba.int64), code


@intrinsic
def _eight(typing_context, text, i):
    """The eight bytes at text[i], the first one lowest."""

    def code(context, builder, signature, args):
        return _load(builder, args, ir.IntType(64))

    return numba.uint64(text, numba.int64), code


@intrinsic
def _lowest(typing_context, bits):
    """Number of the lowest bit set."""

    def code(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return numba.int64(numba.uint64), code


_jit = numba.njit(cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
_outer = numba.njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)


@_jit
def _tokenize(text, first, end, tokens):
    """Number of tokens of the line; -1 when it is not plain. `end` is put behind them."""
    count = 0
    inside = _0  # all ones where a string goes on from the block before
    scalar = _0  # 1 where a scalar does
    for at in range(first, end, _BLOCK):
        valid = ~_0 if end - at >= _BLOCK else (_1 << np.uint64(end - at)) - _1
        if (_strange(text, at) | _backslashes(text, at)) & valid:
            return -1
        quotes = _quotes(text, at) & valid
        string = quotes
        string ^= string << np.uint64(1)
        string ^= string << np.uint64(2)
        string ^= string << np.uint64(4)
        string ^= string << np.uint64(8)
        string ^= string << np.uint64(16)
        string ^= string << np.uint64(32)
        string ^= inside  # set from each opening quote up to the closing one, which is not
        inside = ~_0 if string >> np.uint64(63) else _0
        marks = (_opens(text, at) | _closes(text, at) | _commas(text, at) | _colons(text, at)) & ~string
        other = ~(marks | string | quotes | _spaces(text, at)) & valid
        found = ((marks | (other & ~(other << _1 | scalar))) & valid) | quotes
        scalar = other >> np.uint64(63)
        while found:
            tokens[count] = at + _lowest(found)
            count += 1
            found &= found - _1
    tokens[count] = end
    return -1 if inside else count


@_jit
def _word(text, first, end, words, count):
    """Which of the words lies there: its row + 1, or 0."""
    size = end - first
    if not 0 < size <= 16:
        return 0
    low = _eight(text, first)
    high = _0
    if size <= 8:
        low &= ~_0 >> np.uint64(64 - 8 * size)
    else:
        high = _eight(text, first + 8) & ~_0 >> np.uint64(128 - 8 * size)
    for row in range(count):
        if words[2 * row] == low and words[2 * row + 1] == high:
            return row + 1
    return 0


@_jit
def _ends(text, i, end):
    """Whether a scalar may end before `i`."""
    return i >= end or text[i] == _COMMA or text[i] == _LIST_END or text[i] == _OBJECT_END or text[i] == _SPACE


@_jit
def _digits(text, i, end):
    while i < end and _ZERO <= text[i] <= _NINE:
        i += 1
    return i


@_jit
def _integer(text, i, end):
    """After an integer of at most `_MAX_DIGITS` digits, written as str() writes it; -1 for anything else."""
    first = i + 1 if text[i] == _MINUS else i
    after = _digits(text, first, end)
    if after == first or after - first > _MAX_DIGITS or not _ends(text, after, end):
        return -1
    if text[first] == _ZERO and (after - first > 1 or first > i):
        return -1
    return after


@_jit
def _is_scalar(text, i, end):
    """Whether a number, true, false or null begins at `i`, and ends where it may."""
    if text[i] != _MINUS and not _ZERO <= text[i] <= _NINE:
        after = i
        while not _ends(text, after, end):
            after += 1
        return _word(text, i, after, _pointer(_LITERALS), len(_LITERALS)) > 0
    if text[i] == _MINUS:
        i += 1
    after = _digits(text, i, end)
    if after == i or (text[i] == _ZERO and after - i > 1):
        return False
    if after < end and text[after] == _DOT:
        i = after + 1
        after = _digits(text, i, end)
        if after == i:
            return False
    if after < end and text[after] | _FOLD == _LOWER_E:
        i = after + 1
        if i < end and (text[i] == _MINUS or text[i] == ord("+")):
            i += 1
        after = _digits(text, i, end)
        if after == i:
            return False
    return _ends(text, after, end)


@_jit
def _value(text, end, tokens, t):
    """The token after the value that begins at token `t`; -1: not JSON, or nested too deep."""
    objects = _0  # a bit for each level that is open, the innermost last: 1 an object, 0 a list
    depth = 0
    while True:
        i = tokens[t]
        if i >= end:
            return -1
        byte = text[i]
        if byte == _QUOTE:
            t += 2
        elif byte in (_OBJECT, _LIST):
            t += 1
            depth += 1
            if depth > _MAX_DEPTH:
                return -1
            objects = objects << _1 | (_1 if byte == _OBJECT else _0)
            i = tokens[t]
            if i >= end:
                return -1
            if text[i] != (_OBJECT_END if byte == _OBJECT else _LIST_END):
                if byte == _OBJECT:
                    t = _name(text, end, tokens, t)
                    if t < 0:
                        return -1
                continue
        elif _is_scalar(text, i, end):
            t += 1
        else:
            return -1
        while True:  # a value has ended before token t
            if depth == 0:
                return t
            i = tokens[t]
            if i >= end:
                return -1
            byte = text[i]
            t += 1
            in_object = objects & _1
            if byte == _COMMA:
                if in_object:
                    t = _name(text, end, tokens, t)
                    if t < 0:
                        return -1
                break
            if byte != (_OBJECT_END if in_object else _LIST_END):
                return -1
            depth -= 1
            objects >>= _1


@_jit
def _name(text, end, tokens, t):
    """The token after the `"name":` at token `t`; -1 when there is none."""
    if tokens[t] >= end or text[tokens[t]] != _QUOTE or tokens[t + 2] >= end or text[tokens[t + 2]] != _COLON:
        return -1
    return t + 3


@_jit
def _ids(text, end, tokens, t):
    """(the token after the list of ids that begins at `t`, how many); -1: it is no list of usable ids."""
    if tokens[t] >= end or text[tokens[t]] != _LIST:
        return -1, 0
    t += 1
    if tokens[t] < end and text[tokens[t]] == _LIST_END:
        return t + 1, 0
    count = 0
    while True:
        i = tokens[t]
        if i >= end:
            return -1, 0
        if text[i] == _QUOTE:
            if not 1 < tokens[t + 1] - i <= MAX_ID_CHARS + 1:
                return -1, 0
            t += 2
        else:
            if _integer(text, i, end) < 0:
                return -1, 0
            t += 1
        count += 1
        i = tokens[t]
        if i >= end or count > MAX_ITEMS:
            return -1, 0
        t += 1
        if text[i] == _LIST_END:
            return t, count
        if text[i] != _COMMA:
            return -1, 0


@_jit
def _line(text, end, tokens, found, n):
    """Fills column n of `found` for the line of these tokens, if it can be decided."""
    seen = kind = ts = items = 0
    id_first = id_end = user_first = user_end = 0
    integer_id = False
    listed = 0  # the name that `items` came under
    if tokens[0] >= end or text[tokens[0]] != _OBJECT:
        return
    t = 1
    while True:
        first = tokens[t] + 1
        t = _name(text, end, tokens, t)
        if t < 0 or tokens[t] >= end:
            return
        name = _word(text, first, tokens[t - 2], _pointer(_NAMES), len(_NAMES))
        if name:
            if seen & 1 << name:
                return
            seen |= 1 << name
        i = tokens[t]
        if name == 0:
            t = _value(text, end, tokens, t)
            if t < 0:
                return
        elif name >= _ITEMS:
            if listed:
                return  # lists of two types: which one counts is not known yet
            t, items = _ids(text, end, tokens, t)
            listed = name
            if t < 0:
                return
        elif text[i] == _QUOTE:
            after = tokens[t + 1]
            if name == _TS or not 1 < after - i <= MAX_ID_CHARS + 1:
                return
            if name == _ID:
                id_first, id_end = i + 1, after
            elif name == _USER:
                user_first, user_end = i + 1, after
            else:
                kind = _word(text, i + 1, after, _pointer(_TYPES), len(_TYPES))
            t += 2
        else:
            after = _integer(text, i, end)
            if after < 0:
                return
            if name == _ID:
                id_first, id_end, integer_id = i, after, True
            elif name == _TS and text[i] != _MINUS:
                for k in range(i, after):
                    ts = ts * 10 + (np.int64(text[k]) - _ZERO)
                if ts > MAX_TS:
                    return
            else:
                return
            t += 1
        i = tokens[t]
        if i >= end:
            return
        t += 1
        if text[i] == _OBJECT_END:
            break
        if text[i] != _COMMA:
            return
    if tokens[t] < end or kind == 0 or seen & _NEED[kind] != _NEED[kind] or (integer_id and kind != ITEM):
        return
    found[0, n] = kind
    found[1, n] = id_first if kind == ITEM else user_first
    found[2, n] = id_end if kind == ITEM else user_end
    found[3, n] = ts
    found[4, n] = items if kind in (CANDIDATES, IMPRESSION) else 0


@_jit
def _split(text, end, found):
    """Fills the last two rows. Length of the longest line."""
    n = first = longest = 0
    for at in range(0, end, _BLOCK):
        ends = _newlines(text, at)
        while ends:
            last = at + _lowest(ends)
            ends &= ends - _1
            found[5, n] = first
            found[6, n] = last
            longest = max(longest, last - first)
            first = last + 1
            n += 1
    return longest


@_outer
def _scan(text, end, found):
    # In one call without the interpreter's lock: a thread that works ahead has to wait for it after each.
    bytes_ = _pointer(text)
    tokens = np.empty(_split(bytes_, end, found) + _BLOCK + 1, np.int64)
    places = _pointer(tokens)
    for n in range(found.shape[1]):
        first, last = found[5, n], found[6, n]
        while last > first and (bytes_[last - 1] == 13 or bytes_[last - 1] == _SPACE):  # as the lines of Windows end
            last -= 1
        if _tokenize(bytes_, first, last, places) > 0:
            _line(bytes_, last, places, found, n)
