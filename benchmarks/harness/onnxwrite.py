"""ONNX graphs written as protobuf by hand: what the benchmark's models need, with nothing to install.

    g = Graph("vm"); x = g.input("x", ["pairs", 192]); y = g.gemm(x, 192, 64); g.output(y, "logit", ["pairs", 64])

Field numbers are those of onnx.proto (IR version 8, operator set 17).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_FLOAT, _INT64 = 1, 7
_TYPES = {np.dtype(np.float32): _FLOAT, np.dtype(np.int64): _INT64}


class Graph:
    """One graph; methods add a node and return the name of its output. Weights are drawn from `rng`."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name = name
        self.rng = np.random.default_rng(seed)
        self._nodes: list[bytes] = []
        self._weights: list[bytes] = []
        self._inputs: list[bytes] = []
        self._outputs: list[bytes] = []
        self._count = 0

    def input(self, name: str, shape: Sequence[int | str], integer: bool = False) -> str:
        self._inputs.append(_text(1, name) + _bytes(2, _tensor_type(_INT64 if integer else _FLOAT, shape)))
        return name

    def output(self, value: str, name: str, shape: Sequence[int | str]) -> None:
        self._node("Identity", [value], output=name)
        self._outputs.append(_text(1, name) + _bytes(2, _tensor_type(_FLOAT, shape)))

    def constant(self, values: npt.NDArray[Any]) -> str:
        self._count += 1
        name = f"w{self._count}"
        dims = b"".join(_varint_field(1, d) for d in values.shape)
        data = np.ascontiguousarray(values)
        self._weights.append(
            dims + _varint_field(2, _TYPES[data.dtype]) + _text(8, name) + _bytes(9, data.tobytes())
        )  # fmt: skip
        return name

    def node(self, kind: str, *inputs: str, **attributes: int | float | list[int]) -> str:
        return self._node(kind, list(inputs), attributes)

    def concat(self, *parts: str) -> str:
        return self.node("Concat", *parts, axis=1)

    def clip(self, value: str, limit: float = 5.0) -> str:
        low, high = (self.constant(np.array(v, np.float32)) for v in (-limit, limit))
        return self.node("Clip", value, low, high)

    def linear(self, value: str, rows: int, columns: int) -> str:
        weight, bias = self._layer(rows, columns)
        return self.node("Gemm", value, self.constant(weight), self.constant(bias))

    def linear_of_parts(
        self, parts: Sequence[tuple[str, int]], columns: int, once: tuple[str, int] | None = None, row: str = ""
    ) -> str:
        """A linear layer over several inputs, each with its width, one product added to the other: no copy of them side
        by side. `once` is of the request: its share is computed once a request and looked up by `row`, as
        `models.nets.Vm` does it."""
        every = [*([once] if once else []), *parts]
        weight, bias = self._layer(sum(width for _, width in every), columns)
        total, at = self.constant(bias), 0
        for value, width in every:
            total = self.node("Gemm", value, self.constant(weight[at : at + width]), total)
            if once and not at:
                total = self.node("Gather", total, row, axis=0)
            at += width
        return total

    def _layer(self, rows: int, columns: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        weight = self.rng.normal(0, (1.5 / rows) ** 0.5, (rows, columns)).astype(np.float32)
        return weight, self.rng.normal(0, 0.1, columns).astype(np.float32)

    def mlp(self, value: str, widths: Sequence[int]) -> str:
        """Linear layers with ReLU between them."""
        for k in range(len(widths) - 1):
            value = self.linear(value, widths[k], widths[k + 1])
            if k + 2 < len(widths):
                value = self.node("Relu", value)
        return value

    def table(self, ids: str, rows: int, width: int) -> str:
        values = self.rng.normal(0, 0.3, (rows, width)).astype(np.float32)
        return self.node("Gather", self.constant(values), ids, axis=0)

    def flat(self, value: str) -> str:
        """[*, 1] -> [*]"""
        return self.node("Squeeze", value, self.constant(np.array([1], np.int64)))

    def reshape(self, value: str, shape: Sequence[int]) -> str:
        return self.node("Reshape", value, self.constant(np.array(shape, np.int64)))

    def model(self) -> bytes:
        graph = (
            b"".join(_bytes(1, n) for n in self._nodes)
            + _text(2, self.name)
            + b"".join(_bytes(5, w) for w in self._weights)
            + b"".join(_bytes(11, i) for i in self._inputs)
            + b"".join(_bytes(12, o) for o in self._outputs)
        )
        return _varint_field(1, 8) + _bytes(7, graph) + _bytes(8, _text(1, "") + _varint_field(2, 17))

    def _node(
        self, kind: str, inputs: list[str], attributes: dict[str, Any] | None = None, output: str | None = None
    ) -> str:
        self._count += 1
        out = output or f"v{self._count}"
        data = b"".join(_text(1, i) for i in inputs) + _text(2, out) + _text(4, kind)
        for name, value in (attributes or {}).items():
            data += _bytes(5, _text(1, name) + _attribute(value))
        self._nodes.append(data)
        return out


def _attribute(value: int | float | list[int]) -> bytes:
    if isinstance(value, list):
        return b"".join(_varint_field(8, v) for v in value) + _varint_field(20, 7)
    if isinstance(value, int):
        return _varint_field(3, value) + _varint_field(20, 2)
    return _key(2, 5) + struct.pack("<f", value) + _varint_field(20, 1)


def _tensor_type(kind: int, shape: Sequence[int | str]) -> bytes:
    dims = b"".join(_bytes(1, _varint_field(1, d) if isinstance(d, int) else _text(2, d)) for d in shape)
    return _bytes(1, _varint_field(1, kind) + _bytes(2, dims))


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint_field(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value)


def _bytes(number: int, data: bytes) -> bytes:
    return _key(number, 2) + _varint(len(data)) + data


def _text(number: int, text: str) -> bytes:
    return _bytes(number, text.encode())
