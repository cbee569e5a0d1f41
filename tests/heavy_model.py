"""A bundle whose FM costs a chosen time per pair on this machine, whatever machine it is: for tests of overload."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.harness.onnxwrite import Graph
from models.bundle import Graph as GraphEntry
from models.bundle import Input, load_bundle, write_bundle
from models.probe import probe_batch
from models.runtime import OnnxRuntime
from streams.settings import load

_WIDTH = 512
_CODE = 64
_MEASURED_PAIRS, _MEASURED_ROUNDS = 128, 16


def heavy_bundle(path: Path, pair_s: float) -> Path:
    """The demo bundle with an `fm_pair` that takes `pair_s` seconds a pair on one core of this machine, when nothing
    else runs on it. One weight matrix is used as often as that takes, so the bundle is small all the same."""
    _write(path.with_name(path.name + "-measured"), _MEASURED_ROUNDS)
    runtime = OnnxRuntime(load_bundle(path.with_name(path.name + "-measured")))
    batch = probe_batch(runtime.info.spec, 8, _MEASURED_PAIRS, seed=0)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        runtime.embed(batch)
        took.append(time.perf_counter() - began)
    # The quickest: other work on the machine makes a measurement longer, never shorter.
    round_s = min(took) / _MEASURED_PAIRS / _MEASURED_ROUNDS
    _write(path, max(1, round(pair_s / round_s)))
    return path


def _write(path: Path, rounds: int) -> None:
    demo = load_bundle(load(environment={}).model.bundle)
    g = Graph("fm_pair", 1)
    x = g.linear(g.input("item_code", ["pairs", _CODE]), _CODE, _WIDTH)
    weight = g.constant((g.rng.normal(0, 1, (_WIDTH, _WIDTH)) / _WIDTH**0.5).astype(np.float32))
    for _ in range(rounds):
        x = g.node("Tanh", g.node("MatMul", x, weight))
    g.output(g.linear(x, _WIDTH, demo.info.dim), "embedding", ["pairs", demo.info.dim])
    entry = GraphEntry("fm_pair.onnx", "", 0, {"item_code": Input("item_code")})
    manifest = msgspec.structs.replace(demo.manifest, graphs={**demo.manifest.graphs, "fm_pair": entry})
    write_bundle(path, manifest, {**demo.graphs, "fm_pair": g.model()})
