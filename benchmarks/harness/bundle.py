"""The benchmark's models, with random weights: a VM of 192-64-32-1, its slot model, and an FM of a chosen size.

Both are made once into a cache folder and are the same bytes on every machine. Nothing is trained: the work per pair is
what counts, and that every peer gives the same answers.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

from benchmarks.harness.onnxwrite import Graph
from models.api import Feature, FeatureSpec
from models.bundle import Dims, Input, Manifest, Model, read_bundle, write_bundle
from models.bundle import Graph as GraphEntry
from models.inputs import slot_width
from topics.errors import BundleError

HISTORY = 10
SPEC = FeatureSpec(
    request=(Feature("hour"), Feature("age"), Feature("visits"), Feature("depth")),
    item=(
        Feature("category", "category"), Feature("price"), Feature("ctr"), Feature("size"), Feature("rank"),
        Feature("quality"),
    ),
    history_length=HISTORY,
    topic="category",
)  # fmt: skip
SLOTS = ("direct", "topic", "state", "aggregate")
EMBEDDING, PROFILE = 17, 16
HEADS, HEAD_DIM, TOWERS, TOWER_DIM = 6, 64, 4, 32
USERS, ITEMS = 16_384, 65_536
C, R, COUNTERS, CODE = len(SPEC.item), len(SPEC.request), 8, 64
SLOT_WIDTH = slot_width(SLOTS, EMBEDDING, HEADS + TOWERS)
VM_WIDTHS = (192, 64, 32, 1)
REQUEST_WIDTH, ITEM_WIDTH = 66, 48
"""of the VM's 192 inputs: those of the request, and those learned for the item"""
VM_PLUS_WIDTHS = (SLOT_WIDTH + 1 + COUNTERS + C, 64, 32, 1)
POOLED = 4
FM_INPUT = POOLED * CODE + R + CODE + C + COUNTERS
VERSION = "3"


def fm_widths(hidden: int) -> tuple[int, ...]:
    return (FM_INPUT, hidden, hidden, hidden, hidden, EMBEDDING)


def flops(widths: tuple[int, ...]) -> int:
    """Multiply-adds times two of one row."""
    return 2 * sum(a * b for a, b in pairwise(widths))


SIZES = {"light": 64, "heavy": 1760, "huge": 9100}
"""hidden width of the FM: heavy is about 20 MFLOP a pair, huge about 500"""


def cache_folder() -> Path:
    root = os.environ.get("SOLARIS_BENCH_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "solaris-bench"


def bundle(size: str = "light") -> Path:
    """The folder of the bundle, made on first use."""
    path = cache_folder() / f"bundle-{size}-{VERSION}"
    try:
        read_bundle(path)
        return path
    except BundleError:
        pass
    graphs = {"vm": _vm(), "vm_plus": _vm_plus(), "fm_user": _fm_user(), "fm_item": _fm_item()}
    graphs["fm_pair"] = _fm_pair(SIZES[size])
    inputs = {
        "vm": ("row", "user_bucket", "item_bucket", "item_code", "counters", "item_features", "request_features"),
        "vm_plus": ("base_logit", "slots", "counters", "item_features"),
        "fm_user": ("history_code", "history_features"),
        "fm_item": ("item_code", "item_features"),
        "fm_pair": ("row", "history_code", "request_features", "item_code", "item_features", "counters"),
    }
    buckets = {"user_bucket": USERS, "item_bucket": ITEMS}
    manifest = Manifest(
        format=1,
        vm=Model("bench-vm", VERSION),
        fm=Model(f"bench-fm-{size}", VERSION),
        spec=SPEC,
        dims=Dims(EMBEDDING, PROFILE, HEADS, HEAD_DIM, TOWERS, TOWER_DIM),
        slots=SLOTS,
        graphs={g: GraphEntry(g + ".onnx", "", 0, {i: Input(i, buckets.get(i, 0)) for i in inputs[g]}) for g in graphs},
    )
    write_bundle(path, manifest, {name: g.model() for name, g in graphs.items()})
    return path


def _vm() -> Graph:
    g = Graph("vm", 1)
    row = g.input("row", ["pairs"], integer=True)
    user = g.table(g.input("user_bucket", ["requests"], integer=True), USERS + 1, REQUEST_WIDTH - R)
    item = g.table(g.input("item_bucket", ["pairs"], integer=True), ITEMS + 1, ITEM_WIDTH)
    code = g.input("item_code", ["pairs", CODE])
    counters = g.input("counters", ["pairs", COUNTERS])
    features = g.clip(g.input("item_features", ["pairs", C]))
    request = g.concat(user, g.clip(g.input("request_features", ["requests", R])))
    own = [(item, ITEM_WIDTH), (code, CODE), (g.concat(counters, features), COUNTERS + C)]
    hidden = g.linear_of_parts(own, VM_WIDTHS[1], (request, REQUEST_WIDTH), row)
    g.output(g.flat(g.mlp(g.node("Relu", hidden), VM_WIDTHS[1:])), "logit", ["pairs"])
    g.output(g.linear(request, REQUEST_WIDTH, PROFILE), "profile", ["requests", PROFILE])
    return g


def _vm_plus() -> Graph:
    g = Graph("vm_plus", 2)
    base = g.input("base_logit", ["pairs"])
    column = g.reshape(base, [-1, 1])
    slots = g.clip(g.input("slots", ["pairs", SLOT_WIDTH]), 20.0)
    counters = g.input("counters", ["pairs", COUNTERS])
    features = g.clip(g.input("item_features", ["pairs", C]))
    rest = VM_PLUS_WIDTHS[0] - SLOT_WIDTH
    hidden = g.linear_of_parts([(slots, SLOT_WIDTH), (g.concat(column, counters, features), rest)], VM_PLUS_WIDTHS[1])
    added = g.mlp(g.node("Relu", hidden), VM_PLUS_WIDTHS[1:])
    g.output(g.flat(g.node("Add", column, added)), "logit", ["pairs"])
    return g


def _pooled(g: Graph, code: str, kernels: int) -> str:
    """[B, kernels * 64] weighted sums of the history's item codes."""
    weights = g.constant(g.rng.normal(0, 0.5, (kernels, HISTORY)).astype("float32"))
    return g.reshape(g.node("MatMul", weights, code), [-1, kernels * CODE])


def _fm_user() -> Graph:
    g = Graph("fm_user", 3)
    code = g.input("history_code", ["requests", HISTORY, CODE])
    features = g.clip(g.input("history_features", ["requests", HISTORY, C]))
    heads = _pooled(g, code, HEADS)
    towers = g.linear(g.node("ReduceMean", features, axes=[1], keepdims=0), C, TOWERS * TOWER_DIM)
    width = HEADS * HEAD_DIM + TOWERS * TOWER_DIM
    g.output(g.concat(heads, towers), "state", ["requests", width])
    return g


def _fm_item() -> Graph:
    g = Graph("fm_item", 4)
    code = g.input("item_code", ["pairs", CODE])
    towers = g.linear(g.clip(g.input("item_features", ["pairs", C])), C, TOWERS * TOWER_DIM)
    g.output(g.concat(code, towers), "vector", ["pairs", HEAD_DIM + TOWERS * TOWER_DIM])
    return g


def _fm_pair(hidden: int) -> Graph:
    g = Graph("fm_pair", 5)
    row = g.input("row", ["pairs"], integer=True)
    pooled = _pooled(g, g.input("history_code", ["requests", HISTORY, CODE]), POOLED)
    request = g.concat(pooled, g.clip(g.input("request_features", ["requests", R])))
    code = g.input("item_code", ["pairs", CODE])
    features = g.clip(g.input("item_features", ["pairs", C]))
    counters = g.input("counters", ["pairs", COUNTERS])
    wide = g.concat(g.node("Gather", request, row, axis=0), code, features, counters)
    g.output(g.mlp(wide, fm_widths(hidden)), "embedding", ["pairs", EMBEDDING])
    return g
