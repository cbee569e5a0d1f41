"""Torch modules to ONNX graphs with a dynamic batch, compared with torch at 1, 2 and 1000 rows."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.api import F32, FeatureSpec, PairBatch
from models.bundle import MAX_BUCKETS, Input
from models.inputs import BUCKETED, PAIR_SOURCES, BatchInputs
from models.probe import ROWS, probe_batch
from models.rolling import ROLLING
from topics.errors import BundleError

OPSET = 18
FM_PAIR = (
    "row", "item_bucket", "item_id", "item_code", "item_features", "counters", "request_features",
    "history_id", "history_code", "history_features", "history_age", "history_kind", "history_mask",
)  # fmt: skip
FM_USER = ("history_code", "history_features", "history_age", "history_kind", "history_mask")
FM_ITEM = ("item_code", "item_features")
VM = (
    "row", "item_bucket", "item_features", "counters", "request_features", "history_features", "history_mask",
)  # fmt: skip
IDS = {"item_id": ("item_bucket", MAX_BUCKETS), "history_id": ("history_bucket", MAX_BUCKETS)}
"""Inputs that are another source at a fixed number of buckets: so many that equal means the same item."""
VM_PLUS = ("base_logit", "slots", "counters", "item_features")
COUNTED = ("rolling",)
"""behind `VM` and `VM_PLUS` in a VM with rolling counts"""


def with_counts(sources: Sequence[str], rolling: bool) -> tuple[str, ...]:
    """`VM` or `VM_PLUS` of a VM with rolling counts or without."""
    return (*sources, *COUNTED) if rolling else tuple(sources)


def tensors(
    batch: PairBatch,
    spec: FeatureSpec,
    topic_column: int,
    sources: Sequence[str],
    buckets: Mapping[str, int],
    extra: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> list[Tensor]:
    """The sources of a batch in order, as the runtime would feed them."""
    inputs = BatchInputs(batch, spec, topic_column)
    for key, values in (extra or {}).items():
        inputs.put(key, values)
    given = [given_input(s, buckets) for s in sources]
    return [torch.from_numpy(inputs.get(i.source, i.buckets)).to(device) for i in given]


def made_up_rolling(rng: np.random.Generator, n: int) -> F32:
    """[n, len(ROLLING)] rows to compare graphs on, some of them unknown."""
    known = (rng.random((n, 1)) < 0.7).astype(np.float32)
    out: F32 = np.concatenate([known, known * rng.normal(size=(n, len(ROLLING) - 1))], axis=1, dtype=np.float32)
    return out


def given_input(name: str, buckets: Mapping[str, int]) -> Input:
    if name in IDS:
        return Input(*IDS[name])
    return Input(name, max(buckets[name], 1) if name in BUCKETED else 0)


def export(
    module: nn.Module,
    spec: FeatureSpec,
    topic_column: int,
    sources: Sequence[str],
    buckets: Mapping[str, int],
    outputs: Sequence[str],
    slot_width: int = 0,
    tolerance: float = 2e-4,
) -> tuple[bytes, dict[str, Input]]:
    """ONNX bytes and the manifest's inputs. Raises `BundleError` when ONNX Runtime's numbers are not torch's."""
    module = module.eval().cpu()

    def example(n: int) -> list[Tensor]:
        batch = probe_batch(spec, min(n, 40), n, seed=3)
        rng = np.random.default_rng(n)
        extra = {
            "base_logit": rng.normal(size=n).astype(np.float32),
            "slots": rng.normal(size=(n, slot_width)).astype(np.float32),
            "rolling": made_up_rolling(rng, n),
        }
        return tensors(batch, spec, topic_column, sources, buckets, extra)

    axes = {s: {0: "pairs" if given_input(s, buckets).source in PAIR_SOURCES else "requests"} for s in sources}
    axes |= {o: {0: "requests" if o in ("profile", "state") else "pairs"} for o in outputs}
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(example(7)), buffer, input_names=list(sources), output_names=list(outputs),
            dynamic_axes=axes, opset_version=OPSET, dynamo=False,
        )  # fmt: skip
    data = buffer.getvalue()
    session = _session(data)
    used = [i.name for i in session.get_inputs()]
    for n in ROWS:
        given = example(n)
        with torch.no_grad():
            expected = module(*given)
        expected = expected if isinstance(expected, tuple) else (expected,)
        feed = {s: t.numpy() for s, t in zip(sources, given, strict=True) if s in used}
        for key, want, got in zip(outputs, expected, session.run(list(outputs), feed), strict=True):
            if got.shape != tuple(want.shape) or not np.isfinite(got).all():
                raise BundleError(
                    f"export of {key} at {n} rows gives shape {got.shape}, or numbers that are not finite"
                )
            error = float(np.abs(got - want.numpy()).max(initial=0.0))
            if error > tolerance * (1 + float(want.abs().max())):
                raise BundleError(f"export of {key} at {n} rows is off torch's numbers by {error:g}")
    inputs = {s: given_input(s, buckets) for s in sources if s in used}
    return data, inputs


def _session(data: bytes) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
