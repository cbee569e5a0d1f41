"""`torch.export` programs of a bundle's graphs: written without anything pickled, and refused when something is.

A program is torch's own archive (a zip of JSON and raw tensors). torch reads two kinds of entries in it with pickle:
sample inputs, which are left out here, and tensors or objects whose JSON says `use_pickle`. It also evaluates the
arithmetic of symbolic shapes as Python. `check` refuses all of these before torch sees the file, so a program is data
as a graph is. The extra entry `inputs.json` names the sources in the order of the program's arguments.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from models.api import FeatureSpec
from models.bundle import Input
from models.export import given_input, made_up_rolling, tensors
from models.inputs import PAIR_SOURCES
from models.probe import ROWS, probe_batch
from topics.errors import BundleError

INPUTS = "inputs.json"
OUTPUTS = "outputs.json"
SAMPLES = "/data/sample_inputs/model.pt"
_ENTRIES = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|\.data/(version|serialization_id)|models/model\.json|"
    r"data/(weights/(weight_\d+|model_weights_config\.json)|constants/(tensor_\d+|model_constants_config\.json)|"
    r"sample_inputs/model\.pt)|extra/(inputs|outputs)\.json)"
)
_SYMBOL = re.compile(r"'[a-z]+\d+'")
_ARITHMETIC = re.compile(r"[A-Za-z0-9 +*/(),=<>-]*")
_NAMES = {"Symbol", "Integer", "Add", "Mul", "Pow", "Max", "Min", "Mod", "FloorDiv", "True", "False", "positive",
          "nonnegative", "integer"}  # fmt: skip
MAX_BYTES = (2 << 30) - 1


def export_program(
    module: nn.Module,
    spec: FeatureSpec,
    topic_column: int,
    sources: Sequence[str],
    buckets: Mapping[str, int],
    outputs: Sequence[str],
    slot_width: int = 0,
) -> bytes:
    """The module as a program with a dynamic batch. Raises `BundleError` when its numbers are not the module's at 1, 2
    and 1000 rows."""
    module = module.eval().cpu()

    def example(n: int) -> tuple[torch.Tensor, ...]:
        batch = probe_batch(spec, min(n, 40), n, seed=3)
        rng = np.random.default_rng(n)
        extra = {
            "base_logit": rng.normal(size=n).astype(np.float32),
            "slots": rng.normal(size=(n, slot_width)).astype(np.float32),
            "rolling": made_up_rolling(rng, n),
        }
        return tuple(tensors(batch, spec, topic_column, sources, buckets, extra))

    inputs = [given_input(s, buckets) for s in sources]
    pairs, requests = torch.export.Dim("pairs", min=1), torch.export.Dim("requests", min=1)
    shapes = tuple({0: pairs if i.source in PAIR_SOURCES else requests} for i in inputs)
    with torch.no_grad():
        program = torch.export.export(_Positional(module), example(50), dynamic_shapes=(shapes,), strict=False)
    named = {INPUTS: msgspec.json.encode(inputs).decode(), OUTPUTS: msgspec.json.encode(list(outputs)).decode()}
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files=named)
    data = _without_samples(buffer)
    loaded, _, _ = load_program(data)
    for n in ROWS:
        given = example(n)
        with torch.no_grad():
            want, got = module(*given), loaded(*given)
        for key, w, g in zip(outputs, _tuple(want), _tuple(got), strict=True):
            if w.shape != g.shape or not torch.allclose(w, g, rtol=1e-5, atol=1e-5):
                raise BundleError(f"torch.export of {key} at {n} rows is off the module's numbers")
    return data


def load_program(data: bytes) -> tuple[Any, list[Input], list[str]]:
    """-> (module, its arguments' sources in order, names of its outputs). Raises `BundleError` (see `check`)."""
    check(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        root = archive.namelist()[0].partition("/")[0]
        try:
            inputs = msgspec.json.decode(archive.read(f"{root}/extra/{INPUTS}"), type=list[Input])
            outputs = msgspec.json.decode(archive.read(f"{root}/extra/{OUTPUTS}"), type=list[str])
        except (KeyError, msgspec.DecodeError) as e:
            raise BundleError(f"program: {e}") from None
    try:
        return torch.export.load(io.BytesIO(data)).module(), inputs, outputs
    except Exception as e:  # torch raises many kinds, of none of which it promises anything
        raise BundleError(f"program: torch {torch.__version__} cannot read it: {e}") from None


def check(data: bytes) -> None:
    """Refuses what torch would run rather than read. Raises `BundleError`."""
    if len(data) > MAX_BYTES:
        raise BundleError(f"program: {len(data)} bytes, at most {MAX_BYTES}")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        names = [i.filename for i in archive.infolist()]
        for info in archive.infolist():
            if not _ENTRIES.fullmatch(info.filename) or names.count(info.filename) > 1:
                raise BundleError(f"program: entry {info.filename!r} has no place in a program without pickles")
            if info.filename.endswith(SAMPLES) and info.file_size:
                raise BundleError("program: holds sample inputs, which torch reads with pickle; export it without")
            if info.filename.endswith("config.json"):
                _refuse_pickles(msgspec.json.decode(archive.read(info)), info.filename)
            if info.filename.endswith("models/model.json"):
                _refuse_code(msgspec.json.decode(archive.read(info)))
    except (zipfile.BadZipFile, msgspec.DecodeError, UnicodeDecodeError, RecursionError, NotImplementedError) as e:
        raise BundleError(f"program: no archive of torch.export: {e}") from None


def _refuse_pickles(config: Any, where: str) -> None:
    entries = config.get("config") if isinstance(config, dict) else None
    if not isinstance(entries, dict):
        raise BundleError(f"program: {where} is no table of tensors")
    for key, meta in entries.items():
        if not isinstance(meta, dict) or meta.get("use_pickle") is not False:
            raise BundleError(f"program: {where}: {key} is pickled; only plain tensors are read")


def _refuse_code(node: Any) -> None:
    """Strings that torch evaluates (`expr_str`) must be arithmetic of sizes in sympy's few names for it."""
    if isinstance(node, dict):
        text = node.get("expr_str")
        if text is not None and not _is_arithmetic(text):
            raise BundleError(f"program: {text!r} is no arithmetic of sizes")
        for value in node.values():
            _refuse_code(value)
    elif isinstance(node, list):
        for value in node:
            _refuse_code(value)


def _is_arithmetic(text: Any) -> bool:
    if not isinstance(text, str):
        return False
    text = _SYMBOL.sub("0", text)
    return bool(_ARITHMETIC.fullmatch(text)) and set(re.findall(r"[A-Za-z]\w*", text)) <= _NAMES


def _without_samples(buffer: io.BytesIO) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            new.writestr(info.filename, b"" if info.filename.endswith(SAMPLES) else old.read(info))
    return out.getvalue()


def _tuple(values: Any) -> tuple[torch.Tensor, ...]:
    return values if isinstance(values, tuple) else (values,)


class _Positional(nn.Module):
    """Any module under one signature, so that dynamic sizes are given the same way."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *sources: torch.Tensor) -> Any:
        return self.module(*sources)
