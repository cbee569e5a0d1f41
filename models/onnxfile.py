"""A look into ONNX files without the `onnx` package: does one refer to data outside itself?

Only the protobuf wire format is read. Field numbers are those of onnx.proto: ModelProto.graph = 7, .functions = 25;
GraphProto.node = 1, .initializer = 5, .sparse_initializer = 15; FunctionProto.node = 7; NodeProto.attribute = 5;
AttributeProto.t = 5, .g = 6, .tensors = 10, .graphs = 11, .sparse_tensor = 22, .sparse_tensors = 23;
SparseTensorProto.values = 1, .indices = 2; TensorProto.external_data = 13, .data_location = 14.
"""

from __future__ import annotations

from collections.abc import Iterator

_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_MAX_DEPTH = 64


def refuse_external_data(data: bytes) -> None:
    """Raises ValueError when the file is not protobuf or a tensor of it lies in another file."""
    _walk(memoryview(data), "model", 0)


def _walk(data: memoryview, kind: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError("graphs nest too deep")
    children = _CHILDREN[kind]
    for field, wire, value in _fields(data):
        if kind == "tensor" and (field == 13 or (field == 14 and value != 0)):
            raise ValueError("a tensor's data is in another file; export with the weights inside")
        if field in children and wire == 2:
            assert isinstance(value, memoryview)
            _walk(value, children[field], depth + 1)


def _fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield field, wire, value
        elif wire == 2:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError("not an ONNX file: truncated")
            yield field, wire, data[at : at + size]
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
            if at > end:
                raise ValueError("not an ONNX file: truncated")
        else:
            raise ValueError(f"not an ONNX file: wire type {wire}")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("not an ONNX file: bad varint")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
