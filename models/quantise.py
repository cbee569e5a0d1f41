"""int8 for the heavy graph on a CPU: weights and activations of its matrix products, with the error it makes.

Scales of the activations are fixed ahead, from sample requests. ONNX Runtime's dynamic quantisation takes them from
each batch instead: a pair's embedding would then depend on the pairs it is computed with (by 0.5 on the demo bundle,
at a deviation of 1), which the check of a bundle refuses.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.api import F32, FeatureSpec, PairBatch
from models.bundle import Input
from models.inputs import Array, BatchInputs


def int8(
    graph: bytes, inputs: Mapping[str, Input], spec: FeatureSpec, topic_column: int, samples: Sequence[PairBatch]
) -> bytes:
    """The graph with int8 matrix products, calibrated on `samples` (requests with pairs, at least one batch)."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Samples(CalibrationDataReader):
        def __init__(self) -> None:
            self._feeds = _feeds(inputs, spec, topic_column, samples)

        def get_next(self) -> dict[str, Array] | None:
            return next(self._feeds, None)

    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it logs advice about pre-processing to the root logger
    try:
        with tempfile.TemporaryDirectory(prefix="solaris-int8-") as folder:
            before, after = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
            before.write_bytes(graph)
            quantize_static(
                str(before), str(after), Samples(), quant_format=QuantFormat.QDQ, per_channel=True,
                op_types_to_quantize=["MatMul", "Gemm"], activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            )  # fmt: skip
            return after.read_bytes()
    finally:
        root.setLevel(level)


def compare(
    float32: bytes,
    quantised: bytes,
    inputs: Mapping[str, Input],
    spec: FeatureSpec,
    topic_column: int,
    batches: Sequence[PairBatch],
    label: F32,
) -> dict[str, float]:
    """What int8 costs and gives on requests it was not calibrated on: errors of the embedding (numbers of deviation 1)
    and of the FM's logit, log loss before and after, bytes, and processor time."""
    from models.metrics import log_loss

    feeds = list(_feeds(inputs, spec, topic_column, batches))
    (old, slow), (new, fast) = (_run(graph, feeds) for graph in (float32, quantised))
    error = np.abs(new - old)
    return {
        "embedding_mean_error": round(float(error[:, :-1].mean()), 5),
        "embedding_max_error": round(float(error[:, :-1].max()), 5),
        "logit_mean_error": round(float(error[:, -1].mean()), 5),
        "logit_max_error": round(float(error[:, -1].max()), 5),
        "log_loss_float32": round(log_loss(old[:, -1], label), 6),
        "log_loss_int8": round(log_loss(new[:, -1], label), 6),
        "bytes_float32": len(float32),
        "bytes_int8": len(quantised),
        "speed": round(slow / fast, 2),
    }


def _feeds(
    inputs: Mapping[str, Input], spec: FeatureSpec, topic_column: int, batches: Sequence[PairBatch]
) -> Iterator[dict[str, Array]]:
    for batch in batches:
        sources = BatchInputs(batch, spec, topic_column)
        yield {key: sources.get(given.source, given.buckets) for key, given in inputs.items()}


def _run(graph: bytes, feeds: Sequence[dict[str, Array]]) -> tuple[F32, float]:
    """([N, D], seconds of processor time, the second of two runs)"""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session: Any = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    for _ in range(2):
        began = time.process_time()
        out: F32 = np.concatenate([session.run(["embedding"], feed)[0] for feed in feeds])
        took = time.process_time() - began
    return out, max(took, 1e-9)
