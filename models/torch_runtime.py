"""A bundle through torch instead of ONNX Runtime: the same interface, chunks and checks, over `torch.export` programs.

For FMs that ONNX cannot carry, and to compare the two. Needs the extra `train`. Programs lie in a folder of their own,
``<graph>.pt2`` each, beside a bundle whose manifest says everything else; a graph without a program is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from models.bundle import OUTPUTS, Bundle, load_bundle
from models.inputs import Array
from models.program import MAX_BYTES, load_program
from models.runtime import OnnxRuntime
from topics.errors import BundleError, DeviceError


def open_torch_runtime(
    bundle: Path | str, programs: Path | str, device: str = "cpu", threads: int = 1, **options: Any
) -> TorchRuntime:
    """Loads, checks and warms up. Raises `BundleError`, `DeviceError`."""
    runtime = TorchRuntime(load_bundle(bundle), read_programs(programs), device, threads, **options)
    runtime.warm_up()
    return runtime


def read_programs(folder: Path | str) -> dict[str, bytes]:
    """The programs of a folder by graph. Raises `BundleError`."""
    found = {}
    for file in sorted(Path(folder).glob("*.pt2")):
        if file.stat().st_size > MAX_BYTES:
            raise BundleError(f"{file}: {file.stat().st_size} bytes, at most {MAX_BYTES}")
        found[file.stem] = file.read_bytes()
    return found


class TorchRuntime(OnnxRuntime):
    """`models.api.Runtime` over programs. `device`: "cpu", "cuda" or "cuda:<n>".

    Raises `DeviceError` when torch has not the device asked for, `BundleError` when a graph of the bundle has no
    program, or one without the graph's outputs. `threads` are torch's, of the whole process.
    """

    def __init__(
        self, bundle: Bundle, programs: Mapping[str, bytes], device: str = "cpu", threads: int = 1, **options: Any
    ) -> None:
        self._programs = programs
        super().__init__(bundle, device, threads, **options)

    def _open(self, bundle: Bundle, kind: str, index: int, threads: int, gpu_memory_bytes: int) -> dict[str, Any]:
        if kind == "tensorrt":
            raise DeviceError("device tensorrt: torch has none; one of cpu, cuda, cuda:<n>")
        if kind == "cuda" and (not torch.cuda.is_available() or index >= torch.cuda.device_count()):
            raise DeviceError(
                f"device cuda:{index}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs; "
                "check the driver and torch's CUDA build, or ask for device cpu"
            )
        if kind == "cuda" and gpu_memory_bytes:
            whole = torch.cuda.get_device_properties(index).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, gpu_memory_bytes / whole), index)
        torch.set_num_threads(threads)
        place = torch.device(kind, index) if kind == "cuda" else torch.device("cpu")
        sessions: dict[str, Any] = {}
        graphs = {}
        for name, graph in bundle.manifest.graphs.items():
            if name not in self._programs:
                raise BundleError(f"{bundle.path}: graph {name} has no program {name}.pt2")
            module, inputs, outputs = load_program(self._programs[name])
            if missing := {o for o, must in OUTPUTS[name].items() if must} - set(outputs):
                raise BundleError(f"{bundle.path}: program {name}.pt2 has no output {sorted(missing)}")
            keys = [f"{k}:{i.source}" for k, i in enumerate(inputs)]
            graphs[name] = msgspec.structs.replace(graph, inputs=dict(zip(keys, inputs, strict=True)))
            sessions[name] = _Session(module.to(place), keys, outputs, place)
        self._graphs = graphs
        return sessions


class _Session:
    """What `OnnxRuntime` uses of a session."""

    def __init__(self, module: Any, inputs: Sequence[str], outputs: Sequence[str], place: torch.device) -> None:
        self._module, self._inputs, self._outputs, self._place = module, list(inputs), list(outputs), place

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self._outputs]

    def run(self, outputs: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
        given = [torch.from_numpy(np.ascontiguousarray(feed[key])).to(self._place) for key in self._inputs]
        with torch.inference_mode():
            got = self._module(*given)
        got = got if isinstance(got, tuple) else (got,)
        named = dict(zip(self._outputs, got, strict=True))
        return [named[o].cpu().numpy() for o in outputs]
