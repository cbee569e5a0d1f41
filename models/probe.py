"""Runs a bundle's graphs on made-up requests: what a bundle must show before it serves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from models.api import CATEGORY_BUCKETS, FeatureSpec, PairBatch, Slots
from models.bundle import OUTPUTS, Bundle
from models.inputs import INT64, source_shape
from state.counts import Counts
from topics.errors import BundleError

ROWS = (1, 2, 1000)


def probe(bundle: Bundle) -> None:
    """Inputs, outputs, dtypes and lengths as the manifest says; each graph runs at 1, 2 and 1000 rows, gives finite
    numbers, and gives a request the same numbers in every batch. Raises `BundleError`."""
    from models.runtime import OnnxRuntime

    runtime = OnnxRuntime(bundle, "cpu", threads=2)
    try:
        for name, session in runtime._sessions.items():
            _check_signature(bundle, name, session)
        first: dict[str, Any] = {}
        for n in ROWS:
            batch = probe_batch(bundle.manifest.spec, min(n, 40), n, seed=1)
            for key, values in _outputs(bundle, runtime, batch).items():
                if runtime.non_finite or not np.isfinite(values).all():
                    raise BundleError(f"{bundle.path}: {key} is not finite on {n} probe rows")
                reference = first.setdefault(key, values[:1])
                if not np.allclose(values[:1], reference, rtol=1e-3, atol=1e-3):
                    raise BundleError(
                        f"{bundle.path}: {key} of the same pair differs between batches of 1 and {n} rows; "
                        "is the batch axis dynamic?"
                    )
    finally:
        runtime.close()


def probe_batch(spec: FeatureSpec, b: int, n: int, seed: int) -> PairBatch:
    """B requests with N pairs: random ids and features, histories from empty to full. The first request and its first
    pair are the same for every b and n of a seed."""
    c, r, length = len(spec.item), len(spec.request), spec.history_length

    def columns(features: tuple[Any, ...], size: int, rng: np.random.Generator) -> Any:
        out = np.zeros((len(features), size), np.float32)
        for j, f in enumerate(features):
            rows = rng.integers(0, CATEGORY_BUCKETS, size) if f.kind == "category" else rng.normal(0, 3, size)
            out[j] = rows
        return out

    def fill(lengths: list[int], pairs: list[int], rng: np.random.Generator) -> PairBatch:
        count, total, past = len(lengths), sum(pairs), sum(lengths)
        return PairBatch(
            users=rng.integers(1, 2**63, count).astype(np.uint64),
            ts_ms=rng.integers(10**12, 2 * 10**12, count),
            splits=np.cumsum([0, *pairs]).astype(np.int64),
            items=rng.integers(1, 2**63, total).astype(np.uint64),
            item_features=columns(spec.item, total, rng).reshape(c, total),
            request_features=columns(spec.request, count, rng).T.reshape(count, r),
            history=rng.integers(1, 2**63, past).astype(np.uint64),
            history_ts=rng.integers(10**12 - 10**6, 10**12, past),
            history_kind=rng.integers(0, 4, past).astype(np.uint8),
            history_splits=np.cumsum([0, *lengths]).astype(np.int64),
            history_features=columns(spec.item, past, rng).reshape(c, past),
        )

    from models.features import concat

    # The first request's pairs: one of its own generator, so that it is the same whatever follows.
    head = fill([min(3, length)], [1], np.random.default_rng(seed))
    if n <= 1 and b <= 1:
        return head
    rng = np.random.default_rng(seed + 1)
    others = max(b - 1, 1)
    cuts = [0, *np.sort(rng.integers(0, n, others - 1)).tolist(), n - 1]
    rest = fill([k % (length + 1) for k in range(others)], [max(z - a, 0) for a, z in pairwise(cuts)], rng)
    return concat([head, rest])


def _check_signature(bundle: Bundle, name: str, session: Any) -> None:
    where = f"{bundle.path}: graph {name}"
    manifest = bundle.manifest
    given = {i.name: i for i in session.get_inputs()}
    if set(given) != set(manifest.graphs[name].inputs):
        raise BundleError(
            f"{where}: has inputs {sorted(given)}, the manifest names {sorted(manifest.graphs[name].inputs)}"
        )
    for key, wanted in manifest.graphs[name].inputs.items():
        kind = "tensor(int64)" if wanted.source in INT64 else "tensor(float)"
        if given[key].type != kind:
            raise BundleError(f"{where}: input {key} is {given[key].type}; source {wanted.source} is {kind}")
        shape, after = given[key].shape, source_shape(wanted.source, manifest.spec, bundle.info.extra["slot_width"])
        if len(shape) != 1 + len(after):
            raise BundleError(
                f"{where}: input {key} has {len(shape)} axes; source {wanted.source} has {1 + len(after)}"
            )
        if isinstance(shape[0], int):
            raise BundleError(f"{where}: input {key} has a fixed batch of {shape[0]}; export it with a dynamic axis")
        for got, want in zip(shape[1:], after, strict=True):
            if isinstance(got, int) and got != want:
                raise BundleError(f"{where}: input {key} has shape {shape}; source {wanted.source} has [*, {after}]")
    outputs = {o.name: o for o in session.get_outputs()}
    needs = {key for key, must in OUTPUTS[name].items() if must}
    if name == "vm" and manifest.dims.profile:
        needs.add("profile")
    if missing := needs - set(outputs):
        raise BundleError(f"{where}: has no output {sorted(missing)}; it has {sorted(outputs)}")
    for key in set(outputs) & set(OUTPUTS[name]):
        kind = "tensor(int64)" if key == "topic" else "tensor(float)"
        if outputs[key].type != kind:
            raise BundleError(f"{where}: output {key} is {outputs[key].type}, expected {kind}")


def _outputs(bundle: Bundle, runtime: Any, batch: PairBatch) -> dict[str, Any]:
    info, b, n = bundle.info, batch.requests, batch.pairs
    counts = _counts(batch)
    scores = runtime.score(batch, counts)
    vectors, topics = runtime.item_vectors(batch.items, batch.item_features)
    state = runtime.user_state(batch)
    rng = np.random.default_rng(2)
    slots = Slots.empty(n, info.dim, info.dots)
    for name in info.slots:
        getattr(slots, name + "_age_ms")[:] = 60_000
        values = getattr(slots, name)
        values[:] = rng.normal(size=values.shape[1]).astype(np.float32)
    out = {
        "vm logit": (scores.logit, (n,)),
        "vm profile": (scores.profile, (b, info.profile_dim)),
        "fm_pair embedding": (runtime.embed(batch), (n, info.dim)),
        "fm_user state": (state, (b, info.state_dim)),
        "fm_item vector": (vectors, (n, info.item_dim if "fm_item" in bundle.graphs else 0)),
        "fm_item topic": (topics, (n,)),
        "vm_plus logit": (runtime.score_plus(batch, slots, counts), (n,)),
    }
    for key, (values, shape) in out.items():
        if values.shape != shape:
            raise BundleError(f"{bundle.path}: {key} has shape {values.shape} on {n} probe rows, expected {shape}")
    return {key: values for key, (values, _) in out.items()}


def _counts(batch: PairBatch) -> Counts:
    """Every other request has counts, the same ones for the same pair of any batch."""
    counts = Counts.unknown(batch.requests, batch.pairs)
    counts.known[::2] = True
    for k, values in enumerate((counts.item_shown_day, counts.item_shown_hour, counts.item_clicked_day)):
        values[:] = batch.items % np.uint64(10 ** (6 - k))
    counts.pair_shown[:] = batch.items % np.uint64(50)
    counts.pair_clicked[:] = batch.items % np.uint64(3)
    counts.pair_ts_ms[:] = np.where(counts.pair_shown > 0, np.repeat(batch.ts_ms, np.diff(batch.splits)) - 90_000, -1)
    counts.user_shown[:] = batch.users % np.uint64(2_000)
    counts.user_clicked[:] = batch.users % np.uint64(40)
    return counts
