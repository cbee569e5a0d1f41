"""A bundle on one device through ONNX Runtime.

Large batches run in chunks of at most `max_pairs` pairs and `max_requests` requests, so memory is bounded whatever
comes. On a GPU every chunk is padded to one of a few sizes, all run once by `warm_up`: the first run of a new size
costs seconds there, and a new size each time lets the arena grow.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from models.api import F32, I32, I64, NO_SCORE, SLOTS, U32, U64, FilledSlots, PairBatch, Slots, VmScores
from models.bundle import Bundle, Graph, load_bundle
from models.dots import state_dots
from models.features import requests, select
from models.inputs import PAIR_SOURCES, Array, BatchInputs, any_slot, item_source, slot_columns
from models.rolling import rolling_features
from state.counts import Counts
from topics.errors import BundleError, DeviceError

log = logging.getLogger(__name__)

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_OUT_OF_MEMORY = ("failed to allocate memory", "out of memory", "cuda_error_out_of_memory", "bad_alloc")


def open_runtime(path: Path | str, device: str = "cpu", threads: int = 1, **options: Any) -> OnnxRuntime:
    """Loads, checks and warms up a bundle. Raises `BundleError`, `DeviceError`."""
    runtime = OnnxRuntime(load_bundle(path), device, threads, **options)
    runtime.warm_up()
    return runtime


class OnnxRuntime:
    """`models.api.Runtime` over ONNX Runtime. `device`: "cpu", "cuda", "cuda:<n>", "tensorrt:<n>".

    Raises `DeviceError` when the session did not get the device asked for: it never falls back to the CPU silently.
    Logits of the VM that are not finite come out as `NO_SCORE`, those of the slot model as the base logit, numbers of
    profiles and item vectors as 0; all count in `non_finite`. States and embeddings are handed on as the graph gave
    them, for the embedder leaves such rows out.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: str = "cpu",
        threads: int = 1,
        max_pairs: int = 2048,
        max_requests: int = 2048,
        sizes: Sequence[int] = (64, 512, 4096),
        gpu_memory_bytes: int = 0,
    ) -> None:
        self.info = bundle.info
        self.non_finite = 0
        self._graphs = bundle.manifest.graphs
        self._dims = bundle.manifest.dims
        self._topic_column = -1
        if self.info.spec.topic is not None:
            self._topic_column = [f.name for f in self.info.spec.item].index(self.info.spec.topic)
        kind, _, index = device.partition(":")
        if kind not in _PROVIDERS or not (index or "0").isdecimal():
            raise DeviceError(f"device {device!r} is unknown; one of cpu, cuda, cuda:<n>, tensorrt, tensorrt:<n>")
        self._pad = kind != "cpu"
        self.device = "cpu" if kind == "cpu" else f"{kind}:{index or 0}"
        self._sizes = sorted(sizes)
        self._max_pairs = self._sizes[-1] if self._pad else max_pairs
        self._max_requests = min(max_requests, self._sizes[-1]) if self._pad else max_requests
        self._sessions = self._open(bundle, kind, int(index or 0), threads, gpu_memory_bytes)

    def _open(self, bundle: Bundle, kind: str, index: int, threads: int, gpu_memory_bytes: int) -> dict[str, Any]:
        return {
            name: _session(name, data, kind, index, threads, gpu_memory_bytes) for name, data in bundle.graphs.items()
        }

    def score(self, batch: PairBatch, counts: Counts | None = None) -> VmScores:
        return self._score(batch, self._counted(batch, counts))

    def _counted(self, batch: PairBatch, counts: Counts | None) -> dict[str, Array]:
        if counts is None or not self.info.rolling:
            return {}
        return {"rolling": rolling_features(counts, batch.splits, batch.ts_ms)}

    def _score(self, batch: PairBatch, counted: dict[str, Array], made: _Made | None = None) -> VmScores:
        logits, profiles = [], []
        wanted = ("logit", "profile") if self._dims.profile else ("logit",)
        for part, outputs in self._over("vm", batch, wanted, counted, made):
            logits.append(outputs[0])
            if self._dims.profile and part.first:
                profiles.append(outputs[1])
        logit = self._finite(_cat(logits, (0,)), NO_SCORE)
        profile = _cat(profiles, (0 if profiles else batch.requests, self._dims.profile))
        return VmScores(logit, self._finite(profile))

    def user_state(self, batch: PairBatch) -> F32:
        if not self._dims.state:
            return np.zeros((batch.requests, 0), np.float32)
        out = []
        for start in range(0, batch.requests, self._max_requests):
            stop = min(start + self._max_requests, batch.requests)
            users = requests(batch, start, stop)
            users = select(users, np.zeros(users.pairs, bool))
            inputs = BatchInputs(users, self.info.spec, self._topic_column)
            out.append(self._run("fm_user", inputs, ("state",), stop - start, 0)[0])
        return _cat(out, (0, self._dims.state))

    def embed(self, batch: PairBatch) -> F32:
        if not self._dims.embedding:
            return np.zeros((batch.pairs, 0), np.float32)
        parts = [outputs[0] for _, outputs in self._over("fm_pair", batch, ("embedding",))]
        return _cat(parts, (0, self._dims.embedding))

    def item_vectors(self, items: U64, item_features: F32) -> tuple[F32, U32]:
        vectors, topics = [], []
        graph = self._graphs.get("fm_item")
        if graph is not None:
            names = [o.name for o in self._sessions["fm_item"].get_outputs()]
            with_topic = "topic" in names and self._topic_column < 0
            wanted = ("vector", "topic") if with_topic else ("vector",)
            for start in range(0, len(items), self._max_pairs):
                cut = slice(start, start + self._max_pairs)
                feed = {
                    key: np.ascontiguousarray(item_source(i.source, i.buckets, items[cut], item_features[:, cut]))
                    for key, i in graph.inputs.items()
                }
                outputs = self._run_feed("fm_item", feed, wanted, 0, len(items[cut]), per_pair=set(feed))
                vectors.append(outputs[0])
                if with_topic:
                    topics.append(outputs[1].astype(np.uint32))
        if self._topic_column >= 0:
            topic = item_features[self._topic_column].astype(np.uint32)
        else:
            topic = np.concatenate(topics) if topics else np.zeros(len(items), np.uint32)
        width = self._dims.item if graph is not None else 0
        return self._finite(_cat(vectors, (0 if vectors else len(items), width))), topic

    def dots(self, state: F32, item_vectors: F32, splits: I64, rows: I32 | None = None) -> F32:
        d = self._dims
        if rows is None:
            rows = np.arange(len(item_vectors), dtype=np.int32)
        return state_dots(
            np.ascontiguousarray(state, np.float32), np.ascontiguousarray(item_vectors, np.float32), rows, splits,
            d.heads, d.head_dim, d.towers, d.tower_dim,
        )  # fmt: skip

    def score_plus(self, batch: PairBatch, slots: Slots | FilledSlots, counts: Counts | None = None) -> F32:
        return self.score_both(batch, slots, counts)[1]

    def score_both(self, batch: PairBatch, slots: Slots | FilledSlots, counts: Counts | None = None) -> tuple[F32, F32]:
        counted = self._counted(batch, counts)
        made: _Made = {}
        base = self._score(batch, counted, made).logit
        if "vm_plus" not in self._graphs or not batch.pairs:
            return base, base
        if isinstance(slots, FilledSlots):
            known, columns = slots.source < len(SLOTS), slots.columns
        else:
            known, columns = any_slot(slots, self.info.slots), None
        if not known.any():
            return base, base
        if columns is None:
            assert isinstance(slots, Slots)
            columns = slot_columns(slots, self.info.slots)
        extra = {"slots": columns, "base_logit": base, **counted}
        parts = [outputs[0] for _, outputs in self._over("vm_plus", batch, ("logit",), extra, made)]
        plus = _cat(parts, (0,))
        # Gating: a pair of which nothing is known has the base logit to the bit, and so has one whose logit is not
        # a number; a pair that has no base logit has no score at all.
        finite = np.isfinite(plus)
        self.non_finite += int((~finite).sum())
        return base, np.where(known & finite & (base > NO_SCORE), plus, base).astype(np.float32, copy=False)

    def warm_up(self) -> None:
        """Runs every graph once at every size it will be run at (once at a small size on a CPU)."""
        from models.probe import probe_batch

        for n in self._sizes if self._pad else [2]:
            for b in [s for s in self._sizes if s <= min(n, self._max_requests)] if self._pad else [2]:
                batch = probe_batch(self.info.spec, b, n, seed=0)
                self.score(batch)
                self.embed(batch)
                self.user_state(batch)
                vectors, _ = self.item_vectors(batch.items, batch.item_features)
                slots = Slots.empty(n, self.info.dim, self.info.dots)
                for name in self.info.slots:
                    getattr(slots, name + "_age_ms")[:] = 0
                if self.info.state_dim:
                    self.dots(np.zeros((b, self.info.state_dim), np.float32), vectors, batch.splits)
                counts = Counts.unknown(b, n)
                counts.known[:] = True
                self.score_plus(batch, slots, counts)
        self.non_finite = 0

    def close(self) -> None:
        self._sessions.clear()

    def _over(
        self,
        name: str,
        batch: PairBatch,
        outputs: Sequence[str],
        extra: dict[str, Array] | None = None,
        made: _Made | None = None,
    ) -> Iterator[tuple[_Part, list[Array]]]:
        """Runs a pair graph chunk by chunk, in order. Out of memory: halves the chunk and tries again. `made` keeps the
        inputs of the chunks for another graph over the same batch."""
        todo = list(_parts(batch.splits, self._max_pairs, self._max_requests))[::-1]
        while todo:
            part = todo.pop()
            place = (part.start, part.stop, part.pair_start, part.pair_stop)
            inputs = made.get(place) if made is not None else None
            if inputs is None:
                inputs = BatchInputs(_cut(batch, part), self.info.spec, self._topic_column)
                if made is not None:
                    made[place] = inputs
            pairs = part.pair_stop - part.pair_start
            for source, values in (extra or {}).items():
                inputs.put(source, values[part.pair_start : part.pair_stop])
            try:
                result = self._run(name, inputs, outputs, part.stop - part.start, pairs)
            except MemoryError:
                halves = part.halves(batch.splits)
                if not halves:
                    raise
                log.warning("%s: out of memory at %d pairs, trying %s halves", name, pairs, len(halves))
                todo += halves[::-1]
                continue
            yield part, result

    def _run(self, name: str, inputs: BatchInputs, outputs: Sequence[str], b: int, n: int) -> list[Array]:
        graph: Graph = self._graphs[name]
        feed = {key: inputs.get(i.source, i.buckets) for key, i in graph.inputs.items()}
        per_pair = {key for key, i in graph.inputs.items() if i.source in PAIR_SOURCES}
        return self._run_feed(name, feed, outputs, b, n, per_pair)

    def _run_feed(
        self, name: str, feed: dict[str, Array], outputs: Sequence[str], b: int, n: int, per_pair: set[str]
    ) -> list[Array]:
        # A graph never sees an empty axis (reductions over nothing are undefined): one row of zeros stands in.
        size_n = self._size(max(n, 1))
        size_b = self._size(max(b, 1))
        for key, values in feed.items():
            want = size_n if key in per_pair else size_b
            if len(values) < want:
                padded = np.zeros((want, *values.shape[1:]), values.dtype)
                padded[: len(values)] = values
                feed[key] = padded
        try:
            result: list[Array] = self._sessions[name].run(list(outputs), feed)
        except Exception as e:  # onnxruntime raises its own classes, none of them public
            text = str(e)
            if any(word in text.lower() for word in _OUT_OF_MEMORY):
                raise MemoryError(f"graph {name}, {n} pairs of {b} requests on {self.device}: {text}") from None
            if self.device != "cpu":
                raise DeviceError(f"graph {name} on {self.device}: {text}") from None
            raise BundleError(f"graph {name}: {text}") from None
        per_request = {"profile", "state"}
        return [r[: b if o in per_request else n] for o, r in zip(outputs, result, strict=True)]

    def _size(self, n: int) -> int:
        if not self._pad:
            return n
        return next((s for s in self._sizes if s >= n), n)

    def _finite(self, values: Array, instead: np.float32 = np.float32(0)) -> F32:
        values = values.astype(np.float32, copy=False)
        finite = np.isfinite(values)
        if finite.all():
            return values
        self.non_finite += int((~finite).sum())
        return np.where(finite, values, instead)


_Made = dict[tuple[int, int, int, int], BatchInputs]
"""inputs by (start, stop, pair_start, pair_stop) of their part"""


class _Part:
    """Pairs `pair_start:pair_stop` of requests `start:stop`; `first` when it is those requests' first part."""

    __slots__ = ("first", "pair_start", "pair_stop", "start", "stop")

    def __init__(self, start: int, stop: int, pair_start: int, pair_stop: int, first: bool = True) -> None:
        self.start, self.stop, self.pair_start, self.pair_stop, self.first = start, stop, pair_start, pair_stop, first

    def halves(self, splits: I64) -> list[_Part]:
        if self.stop - self.start > 1:
            middle = (self.start + self.stop) // 2
            cut = int(splits[middle])
            return [
                _Part(self.start, middle, self.pair_start, cut, self.first),
                _Part(middle, self.stop, cut, self.pair_stop),
            ]
        cut = (self.pair_start + self.pair_stop) // 2
        if cut == self.pair_start:
            return []
        return [
            _Part(self.start, self.stop, self.pair_start, cut, self.first),
            _Part(self.start, self.stop, cut, self.pair_stop, False),
        ]


def _parts(splits: I64, max_pairs: int, max_requests: int) -> Iterator[_Part]:
    """Whole requests while they fit; a request larger than `max_pairs` in several parts of its own."""
    n, start = len(splits) - 1, 0
    while start < n:
        first_pair = int(splits[start])
        stop = int(np.searchsorted(splits, first_pair + max_pairs, side="right")) - 1
        stop = min(stop, start + max_requests, n)
        if stop > start:
            yield _Part(start, stop, first_pair, int(splits[stop]))
            start = stop
            continue
        last = int(splits[start + 1])
        for cut in range(first_pair, last, max_pairs):
            yield _Part(start, start + 1, cut, min(cut + max_pairs, last), cut == first_pair)
        start += 1


def _cut(batch: PairBatch, part: _Part) -> PairBatch:
    piece = requests(batch, part.start, part.stop)
    begin = part.pair_start - int(batch.splits[part.start])
    length = part.pair_stop - part.pair_start
    if length == piece.pairs:
        return piece
    keep = np.zeros(piece.pairs, bool)
    keep[begin : begin + length] = True
    return select(piece, keep)


def _cat(parts: list[Array], empty: tuple[int, ...]) -> Array:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(empty, np.float32)


@cache
def _preload_cuda() -> None:
    """Loads the CUDA libraries of the nvidia-* wheels, where there are any: the system's loader does not find them.
    What it could not load it prints; a session that misses it says so (`DeviceError`)."""
    import onnxruntime as ort

    if hasattr(ort, "preload_dlls"):
        with redirect_stdout(sys.stderr):
            ort.preload_dlls()


def _session(name: str, data: bytes, kind: str, index: int, threads: int, gpu_memory_bytes: int) -> Any:
    import onnxruntime as ort

    provider = _PROVIDERS[kind]
    if provider not in ort.get_available_providers():
        raise DeviceError(
            f"device {kind}: onnxruntime {ort.__version__} has no {provider} (it has "
            f"{', '.join(ort.get_available_providers())}); install onnxruntime-gpu or ask for device cpu"
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_mem_pattern = False  # a pattern is kept for every shape seen: memory grows with batch sizes
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[Any] = [provider]
    if kind != "cpu":
        _preload_cuda()
        cuda: dict[str, Any] = {"device_id": index, "arena_extend_strategy": "kSameAsRequested"}
        if gpu_memory_bytes:
            cuda["gpu_mem_limit"] = gpu_memory_bytes
        providers = [("CUDAExecutionProvider", cuda)]
        if kind == "tensorrt":
            providers.insert(0, (provider, {"device_id": index, "trt_fp16_enable": True}))
    try:
        session = ort.InferenceSession(data, options, providers=providers)
    except Exception as e:
        full = any(word in str(e).lower() for word in _OUT_OF_MEMORY)
        error = BundleError if kind == "cpu" and not full else DeviceError
        raise error(f"graph {name} on {kind}: {e}") from None
    got = session.get_providers()
    if provider not in got:
        raise DeviceError(
            f"device {kind}: the session for graph {name} got {', '.join(got)} instead of {provider}; "
            "check the driver and CUDA libraries (the extra `gpu`), or ask for device cpu"
        )
    return session
