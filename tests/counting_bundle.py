"""A bundle whose VM is a weighted sum of the rolling counts, so that a score tells what was counted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from benchmarks.harness.onnxwrite import Graph
from models.bundle import Dims, Input, load_bundle, write_bundle
from models.bundle import Graph as GraphEntry
from models.rolling import ROLLING, rolling_features
from state.counts import Counts
from streams.settings import DEMO_BUNDLE

WEIGHTS = np.linspace(-0.3, 0.5, len(ROLLING)).astype(np.float32)


def counting_bundle(path: Path) -> Path:
    g = Graph("vm")
    summed = g.node("MatMul", g.input("rolling", ["pairs", len(ROLLING)]), g.constant(WEIGHTS[:, None]))
    g.output(g.flat(summed), "logit", ["pairs"])
    demo = load_bundle(DEMO_BUNDLE).manifest
    entry = GraphEntry("vm.onnx", "", 0, {"rolling": Input("rolling")})
    manifest = msgspec.structs.replace(demo, dims=Dims(), slots=(), graphs={"vm": entry})
    write_bundle(path, manifest, {"vm": g.model()})
    return path


def scores(counts: Counts, splits: np.ndarray, now_ms: np.ndarray) -> np.ndarray:
    """[N] pCTR that this bundle gives."""
    logit = rolling_features(counts, splits, now_ms).astype(np.float64) @ WEIGHTS
    return 1 / (1 + np.exp(-logit))
