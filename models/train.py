"""Trains FM, VM and the VM with slots on one log, and packs them as a bundle.

Impressions are split by time: FM part, VM part, test part. The FM never sees the VM part, so that its embeddings there
are as good (and as bad) as in serving; the VM with slots learns from slots as serving fills them (`models.served`),
with delays from event to servable vector drawn between 50 ms and 300 s.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from models import metrics
from models.api import F32, I64, FeatureSpec, PairBatch
from models.bundle import Bundle, Input, write_bundle
from models.counted import CountedImpressions
from models.dataset import Dataset
from models.export import FM_ITEM, FM_PAIR, FM_USER, VM, VM_PLUS, tensors, with_counts
from models.features import pairs_of, requests, take
from models.inputs import slot_columns
from models.nets import FmSize, PairFm, StateFm, Vm, VmPlus, VmSize
from models.packing import Packing
from models.presets import fm_size, vm_size
from models.quantise import compare, int8
from models.resume import Stages
from models.runtime import OnnxRuntime
from models.served import ServedStore, fresh_slots
from models.similar import Form
from models.thin import thinned
from models.topics import topic_table
from models.train_settings import Parts, TrainSettings
from state.counts import Counts, CountSettings

log = logging.getLogger(__name__)
Mask = npt.NDArray[np.bool_]
Report = Callable[[str, int, int], None]
"""(phase, done, of)"""

BATCH_PAIRS = 1024
PIECE = 512
"""requests scored at a time"""
STATE_RATE = 7.0
"""learning rate of the state FM, in those of the others: it is linear but for its weights of events, and learns little
at theirs"""
INT8_PIECES = 4
"""pieces of 512 requests to calibrate on, and to measure the error on"""
SLOTS = ("direct", "topic", "state", "aggregate", "similar")
WINDOW_MS = 24 * 3_600_000
"""of the store: what happened earlier is not visible"""
MIN_DELAY_MS, MAX_DELAY_MS = 50.0, 300_000.0


class Trainer(Packing):
    """One training run; the steps are methods so that `solaris evaluate` can vary them."""

    def __init__(
        self, data: Dataset, settings: TrainSettings, report: Report | None = None, stages: Stages | None = None
    ) -> None:
        self.data, self.settings, self.stages = data, settings, stages
        self.spec: FeatureSpec = data.spec
        self.topic_column = data.catalogue.topic_column
        self.parts = Parts.of(data.impressions.requests, settings)
        self.fm_size: FmSize = replace(fm_size(settings.preset), conversion=bool(data.converted.any()))
        self.vm_size: VmSize = replace(vm_size(settings.vm), rolling=settings.counters == "rolling")
        self.topics = self._topic_table() if self.topic_column < 0 else None
        has_topics = self.topic_column >= 0 or self.topics is not None
        self.slots = SLOTS if has_topics else tuple(s for s in SLOTS if s != "topic")
        self.report = report or (lambda phase, done, of: None)
        warnings.filterwarnings("ignore", "Initializing zero-element")  # of layers for a log without item features
        torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 1) // 2))
        self._seed(0)

    def _topic_table(self) -> I64 | None:
        """Clusters of items for a log without a category to be the topic; from the FM part, as all of the FM."""
        return topic_table(requests(self.data.impressions, 0, self.parts.fm.stop), self.labels(self.parts.fm))

    @cached_property
    def counted(self) -> CountedImpressions:
        """Rolling counts of every impression. `unknown_share` of the requests before the test part have none."""
        s = self.settings
        unknown = np.random.default_rng([s.seed, 6]).random(self.data.impressions.requests) < s.unknown_share
        unknown[self.parts.test.start :] = False
        return CountedImpressions(self.data, CountSettings(s.count_lag_ms), unknown)

    # -- the foundation model ------------------------------------------------------------------------------------

    def train_fm(self) -> tuple[PairFm, StateFm]:
        """Pair FM and state FM on the FM part, each stopped early on its last tenth."""
        validate = list(self._batches(self.parts.validation, shuffle=False))
        return self._train_pair(validate), self._train_state(validate)

    def _train_pair(self, validate: list[tuple[PairBatch, Tensor, I64]]) -> PairFm:
        self._seed(1)
        pair = PairFm(self.spec, self.fm_size).to(self.settings.device)
        if self._finished("fm_pair", pair):
            return pair.cpu()
        self._fit_columns([pair.item], [pair.request], self.parts.fm)

        def loss(batch: PairBatch, label: Tensor, index: I64) -> Tensor:
            hidden = pair.hidden(*self._tensors(batch, FM_PAIR, self.fm_buckets))
            clicks = cross_entropy(pair.logit(hidden), label)
            if not (self.fm_size.conversion and pair.training):  # early stopping goes by clicks
                return clicks
            converted = torch.from_numpy(self.data.converted[index]).to(label.device)
            return clicks + pair.converted_loss(hidden, converted)

        self._fit(pair, loss, self.parts.fm, self.settings.epochs, "FM", validate)
        with torch.no_grad():
            hidden = [pair.hidden(*self._tensors(b, FM_PAIR, self.fm_buckets)) for b, _, _ in validate[:64]]
            pair.fit_projection(torch.cat(hidden))
        self._keep("fm_pair", pair)
        return pair.cpu()

    def _train_state(self, validate: list[tuple[PairBatch, Tensor, I64]]) -> StateFm:
        self._seed(2)
        state = StateFm(self.spec, self.fm_size).to(self.settings.device)
        if self._finished("fm_state", state):
            return state.cpu()
        self._fit_columns([state.columns], [], self.parts.fm)

        def loss(batch: PairBatch, label: Tensor, index: I64) -> Tensor:
            # The same delays in every epoch's validation, or their luck would choose the epoch.
            rng = self._rng if state.training else np.random.default_rng(len(index))
            delay = log_uniform(rng, batch.requests)
            delay[rng.random(batch.requests) < 0.3] = 0
            return cross_entropy(self._state_logit(state, batch, delay), label)

        rate = STATE_RATE * self.settings.learning_rate
        self._fit(state, loss, self.parts.fm, self.settings.epochs, "FM state", validate, rate)
        self._keep("fm_state", state)
        return state.cpu()

    def _seed(self, stage: int) -> None:
        """Every stage has its own random numbers, so that a resumed run gives what an unbroken one gives."""
        torch.manual_seed(self.settings.seed * 16 + stage)
        self._rng = np.random.default_rng([self.settings.seed, stage])

    def _finished(self, stage: str, module: nn.Module) -> bool:
        if self.stages is None or not self.stages.load(stage, module):
            return False
        log.info("%s: taken from the run that was broken off", stage)
        module.eval()
        return True

    def _keep(self, stage: str, module: nn.Module) -> None:
        if self.stages is not None:
            self.stages.save(stage, module)

    def _state_logit(self, state: StateFm, batch: PairBatch, delay_ms: I64) -> Tensor:
        past = delayed(batch, delay_ms)
        users = state.state(*self._tensors(past, FM_USER, {}))
        vectors = state.vector(*self._tensors(batch, FM_ITEM, {}))
        row = torch.from_numpy(np.repeat(np.arange(batch.requests), np.diff(batch.splits))).to(users.device)
        return state.readout(state.dots(users, vectors, row)).squeeze(-1)

    # -- the vertical model --------------------------------------------------------------------------------------

    def train_vm(self, part: range, teacher: F32 | None = None, size: VmSize | None = None) -> Vm:
        """The base VM on the requests `part`; `teacher` [all pairs] are FM logits for distillation."""
        self._seed(3)
        vm = Vm(self.spec, size or self.vm_size).to(self.settings.device)
        if self._finished("vm", vm):
            return vm.cpu()
        self._fit_columns([vm.item], [vm.request], part)
        self._fit_counts(vm, part)
        weight, temperature = self.settings.soft_weight, self.settings.soft_temperature

        def loss(batch: PairBatch, label: Tensor, index: I64) -> Tensor:
            sources = with_counts(VM, vm.size.rolling)
            hidden, _ = vm.trunk(*self._tensors(batch, sources, self.vm_buckets, self.counts_given(vm, index)))
            hard = cross_entropy(vm.head(hidden).squeeze(-1), label)
            if teacher is None or not weight:
                return hard
            soft = torch.sigmoid(torch.from_numpy(teacher[index]).to(label.device) / temperature)
            auxiliary = cross_entropy(vm.soft(hidden).squeeze(-1), soft)
            return (1 - weight) * hard + weight * auxiliary

        self._fit(vm, loss, part, self.settings.vm_epochs, "VM")
        self._keep("vm", vm)
        return vm.cpu()

    def train_plus(
        self, part: range, base: F32, columns: F32, size: VmSize | None = None, thin: bool = False
    ) -> VmPlus:
        """The VM with slots. base [n] and columns [n, W] belong to the pairs of the requests `part`. With `thin` it
        also learns from requests with slots taken away, others in every epoch."""
        self._seed(4)
        plus = VmPlus(self.spec, columns.shape[1], size or self.vm_size, self.age_columns).to(self.settings.device)
        self._fit_columns([plus.item], [], part)
        self._fit_counts(plus, part)
        first = int(self.data.impressions.splits[part.start])
        sample = self._rng.choice(len(columns), min(len(columns), 100_000), replace=False)
        plus.standard.fit(torch.from_numpy(columns[np.sort(sample)]))

        def loss(batch: PairBatch, label: Tensor, index: I64) -> Tensor:
            slots = columns[index - first]
            if thin:
                slots = thinned(slots, batch.splits, self.slot_spans, self.settings.thin_share, self._rng)
            given = {"base_logit": base[index - first], "slots": slots, **self.counts_given(plus, index)}
            return cross_entropy(plus(*self._tensors(batch, with_counts(VM_PLUS, plus.size.rolling), {}, given)), label)

        # What it sees of the whole service should not get less for the poorer one beside it.
        self._fit(plus, loss, part, self.settings.vm_epochs + thin, "VM with slots")
        return plus.cpu()

    # -- what the trained graphs say -----------------------------------------------------------------------------

    def fm_logits(self, runtime: OnnxRuntime, part: range) -> F32:
        return np.concatenate([runtime.embed(b)[:, -1] for b in self._pieces(part)])

    def conversion(self, runtime: OnnxRuntime, part: range) -> dict[str, float] | None:
        """The conversion head on the clicked pairs of `part`: log loss beside that of their mean rate; None without a
        head or without a click."""
        splits = self.data.impressions.splits
        pairs = slice(int(splits[part.start]), int(splits[part.stop]))
        clicked = self.data.clicked[pairs] > 0
        if not self.fm_size.conversion or not clicked.any():
            return None
        logit = np.concatenate([runtime.embed(b)[:, -2] for b in self._pieces(part)])[clicked]
        label = self.data.converted[pairs][clicked]
        return {
            "log_loss": round(metrics.log_loss(logit, label), 5),
            "log_loss_of_rate": round(metrics.entropy(label), 5),
            "auc": round(metrics.auc(logit, label), 4),
            "clicks": int(clicked.sum()),
            "rate": round(float(label.mean()), 4),
        }

    def vm_logits(self, runtime: OnnxRuntime, part: range, unknown: bool = False) -> F32:
        """[n] with the counts of each impression where the VM sees them, unless they are `unknown`."""
        given = (
            (piece, None if unknown else self.counts_of(runtime, start, piece))
            for start, piece in self._pieces_from(part)
        )
        return np.concatenate([runtime.score(piece, counts).logit for piece, counts in given])

    def counts_of(self, runtime: OnnxRuntime, start: int, piece: PairBatch) -> Counts | None:
        """What to score a piece with whose first request is `start`."""
        return self.counted.counts(start, start + piece.requests) if runtime.info.rolling else None

    def counts_given(self, module: Vm | VmPlus, index: I64 | slice) -> dict[str, F32]:
        """The source `rolling` of the pairs `index`, for a module that sees it."""
        return {"rolling": self.counted.columns[index]} if module.size.rolling else {}

    def labels(self, part: range) -> F32:
        splits = self.data.impressions.splits
        return self.data.clicked[int(splits[part.start]) : int(splits[part.stop])]

    def splits(self, part: range) -> I64:
        splits = self.data.impressions.splits
        return splits[part.start : part.stop + 1] - splits[part.start]

    def served(self, runtime: OnnxRuntime, parts: Sequence[range]) -> ServedStore:
        """A store with what the candidates events up to the end of `parts` leave visible in them."""
        store = ServedStore(runtime, self.data.catalogue)
        candidates = self.data.candidates
        first, last = np.searchsorted(candidates.ts_ms, self._served_span(parts))
        done = 0

        def progress(n: int) -> None:
            nonlocal done
            done += n
            self.report("embedding candidates", done, int(last - first))

        store.add(requests(candidates, int(first), int(last)), progress)
        return store

    def served_impressions(self, parts: Sequence[range]) -> int:
        """Impressions of the time whose candidates `served` embeds: what its FM calls were for."""
        first, last = np.searchsorted(self.data.impressions.ts_ms, self._served_span(parts))
        return int(last - first)

    def _served_span(self, parts: Sequence[range]) -> tuple[int, int]:
        """Event times from a window before the parts to their end (exclusive)."""
        times = self.data.impressions.ts_ms
        return int(times[min(p.start for p in parts)]) - WINDOW_MS, int(times[max(p.stop for p in parts) - 1]) + 1

    def slot_columns(
        self,
        store: ServedStore,
        part: range,
        delay_ms: I64 | int,
        form: Form = "neighbours",
        ask: Mask | None = None,
        cold: Mask | None = None,
    ) -> F32:
        """[n, W] of the pairs of `part` as served; `form`, `ask` and `cold` [requests] as in `ServedStore.slots`."""
        delays = np.broadcast_to(np.asarray(delay_ms, np.int64), len(part))
        out, done = [], 0
        for piece in self._pieces(part):
            mine = slice(done, done + piece.requests)
            asked, unknown = (None if m is None else m[mine] for m in (ask, cold))
            out.append(slot_columns(store.slots(piece, delays[mine], form, asked, unknown), self.slots))
            done += piece.requests
            self.report("slots as served", done, len(part))
        return np.concatenate(out)

    def training_columns(self, store: ServedStore) -> F32:
        """[n, W] of the VM part: delays as drawn by `log_uniform`, and some of the requests as of unknown users."""
        self._seed(5)
        delays = log_uniform(self._rng, len(self.parts.vm))
        cold = self._rng.random(len(self.parts.vm)) < self.settings.cold_share
        return self.slot_columns(store, self.parts.vm, delays, cold=cold)

    # -- a bundle ------------------------------------------------------------------------------------------------

    def quantise(self, graphs: dict[str, bytes], inputs: dict[str, dict[str, Input]]) -> dict[str, float]:
        """Replaces `fm_pair` by its int8 form, calibrated on the VM part; -> what that does on the test part."""
        given = inputs["fm_pair"], self.spec, self.topic_column
        samples = list(islice(self._pieces(self.parts.vm), INT8_PIECES))
        batches = list(islice(self._pieces(self.parts.test), INT8_PIECES))
        label = self.labels(self.parts.test)[: sum(b.pairs for b in batches)]
        before = graphs["fm_pair"]
        graphs["fm_pair"] = int8(before, *given, samples)
        return compare(before, graphs["fm_pair"], *given, batches, label)

    # -- plumbing ------------------------------------------------------------------------------------------------

    def _tensors(
        self, batch: PairBatch, sources: Sequence[str], buckets: dict[str, int], extra: dict[str, Any] | None = None
    ) -> list[Tensor]:
        return tensors(batch, self.spec, self.topic_column, sources, buckets, extra, self.settings.device)

    def _pieces(self, part: range) -> Iterator[PairBatch]:
        for _, piece in self._pieces_from(part):
            yield piece

    def _pieces_from(self, part: range) -> Iterator[tuple[int, PairBatch]]:
        """Pieces with the number of their first request."""
        for start in range(part.start, part.stop, PIECE):
            yield start, requests(self.data.impressions, start, min(start + PIECE, part.stop))

    def _batches(self, part: range, shuffle: bool = True) -> Iterator[tuple[PairBatch, Tensor, I64]]:
        """(requests, labels [n], index [n] of their pairs) of about `BATCH_PAIRS` pairs."""
        impressions = self.data.impressions
        mean = max(1.0, len(self.labels(part)) / len(part))
        size = max(1, round(BATCH_PAIRS / mean))
        order = np.arange(part.start, part.stop)
        if shuffle:
            self._rng.shuffle(order)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            index = pairs_of(impressions, chosen)
            label = torch.from_numpy(self.data.clicked[index]).to(self.settings.device)
            yield take(impressions, chosen), label, index

    def _fit(
        self,
        module: nn.Module,
        loss: Callable[[PairBatch, Tensor, I64], Tensor],
        part: range,
        epochs: int,
        phase: str,
        validate: list[tuple[PairBatch, Tensor, I64]] | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Adam with a cosine schedule. With `validate` the best epoch is kept and the first worse one ends it."""
        wanted = [p for p in module.parameters() if p.requires_grad]
        rate = learning_rate or self.settings.learning_rate
        optimiser = torch.optim.AdamW(wanted, lr=rate, weight_decay=1e-4)
        steps = math.ceil(len(self.labels(part)) / BATCH_PAIRS) * epochs
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps), 1e-5)
        best, kept = math.inf, None
        done = 0
        for epoch in range(epochs):
            module.train()
            for batch, label, index in self._batches(part):
                optimiser.zero_grad()
                value = loss(batch, label, index)
                value.backward()
                nn.utils.clip_grad_norm_(wanted, 1.0)
                optimiser.step()
                if done < steps:
                    schedule.step()
                done += 1
                self.report(phase, min(done, steps), steps)
            module.eval()
            if validate is None:
                continue
            with torch.no_grad():
                sizes = np.array([len(y) for _, y, _ in validate])
                now = float(np.average([float(loss(*v)) for v in validate], weights=sizes))
            log.info("%s epoch %d: validation log loss %.5f", phase, epoch + 1, now)
            if now >= best:
                break
            best, kept = now, {k: v.clone() for k, v in module.state_dict().items()}
        if kept is not None:
            module.load_state_dict(kept)
        module.eval()

    def _fit_counts(self, module: Vm | VmPlus, part: range) -> None:
        if module.counted is not None:
            splits = self.data.impressions.splits
            module.counted.fit(torch.from_numpy(self.counted.columns[int(splits[part.start]) : int(splits[part.stop])]))

    def _fit_columns(self, items: list[Any], request: list[Any], part: range) -> None:
        impressions = self.data.impressions
        a, z = int(impressions.splits[part.start]), int(impressions.splits[part.stop])
        step = max(1, (z - a) // 200_000)
        for columns in items:
            columns.fit(torch.from_numpy(impressions.item_features[:, a:z:step].T.copy()))
        for columns in request:
            columns.fit(torch.from_numpy(impressions.request_features[part.start : part.stop].copy()))


def train(
    data: Dataset,
    settings: TrainSettings,
    out: Path | str,
    report: Report | None = None,
    programs: Path | None = None,
) -> tuple[Bundle, dict[str, Any]]:
    """FM, VM, VM with slots; writes the bundle and returns it with the metrics of the test part. With `programs` the
    graphs are also written to that folder as `torch.export` programs."""
    identity = f"{data.digest} {data.spec.hash()} {data.impressions.requests} {settings} {package_version()}"
    stages = Stages(out, identity)
    t = Trainer(data, settings, report, stages)
    pair, state = t.train_fm()
    before = range(t.parts.vm.stop)
    teacher = None
    if settings.soft_weight:
        stub = Vm(t.spec, t.vm_size)
        teacher = np.zeros(data.impressions.pairs, np.float32)
        splits = data.impressions.splits
        teacher[int(splits[before.start]) : int(splits[before.stop])] = t.fm_logits(
            t.runtime(*t.graphs(pair, state, stub)), before
        )
    vm = t.train_vm(before, teacher)
    runtime = t.runtime(*t.graphs(pair, state, vm))
    store = t.served(runtime, [t.parts.vm, t.parts.test])
    try:
        columns = t.training_columns(store)
        plus = t.train_plus(t.parts.vm, t.vm_logits(runtime, t.parts.vm), columns, thin=True)
        del columns
        graphs, inputs = t.graphs(pair, state, vm, plus)
        quantised = t.quantise(graphs, inputs) if settings.int8 else {}
        full = t.runtime(graphs, inputs)
        measured = measure(t, full, store)
    finally:
        store.close()
    training = {
        "data_sha256": data.digest,
        "code": {"solaris": package_version(), "torch": str(torch.__version__)},
        "settings": asdict(settings),
        "impressions": {name: len(getattr(t.parts, name)) for name in ("fm", "validation", "vm", "test")},
        "test": measured,
        **({"int8": quantised} if quantised else {}),
    }
    if programs is not None:
        programs.mkdir(parents=True, exist_ok=True)
        for name, program in t.programs(pair, state, vm, plus).items():
            (programs / f"{name}.pt2").write_bytes(program)
    bundle = write_bundle(out, t.manifest(graphs, inputs, training), graphs)
    stages.done()
    return bundle, measured


def measure(t: Trainer, runtime: OnnxRuntime, store: ServedStore, delay_ms: int = 1000) -> dict[str, Any]:
    """VM, FM and VM with slots on the test part: as served with `delay_ms`, and with pair and state computed at the
    impression itself."""
    part = t.parts.test
    label, splits = t.labels(part), t.splits(part)
    fresh, served, filled = [], [], {name: 0 for name in t.slots}
    for start, piece in t._pieces_from(part):
        counts = t.counts_of(runtime, start, piece)
        slots = store.slots(piece, np.full(piece.requests, delay_ms, np.int64))
        served.append(runtime.score_plus(piece, slots, counts))
        for name in t.slots:
            filled[name] += int((getattr(slots, name + "_age_ms") >= 0).sum())
        new = fresh_slots(runtime, piece)
        slots.direct, slots.direct_age_ms = new.direct, new.direct_age_ms
        slots.state, slots.state_age_ms = new.state, new.state_age_ms
        fresh.append(runtime.score_plus(piece, slots, counts))
    logits = {
        "vm": t.vm_logits(runtime, part),
        "fm": t.fm_logits(runtime, part),
        "vm_fresh": np.concatenate(fresh),
        "vm_served": np.concatenate(served),
    }
    out: dict[str, Any] = {name: metrics.summary(x, label, splits) for name, x in logits.items()}
    out["coverage"] = {name: round(n / len(label), 4) for name, n in filled.items()}
    out["ctr"] = round(float(label.mean()), 5)
    out["conversion"] = t.conversion(runtime, part)
    gain = out["vm"]["log_loss"] - out["fm"]["log_loss"]
    if gain > 0.01 * out["vm"]["log_loss"]:
        for name in ("vm_fresh", "vm_served"):
            out[name]["transfer_ratio"] = round((out["vm"]["log_loss"] - out[name]["log_loss"]) / gain, 4)
    return out


def package_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("solaris-pipeline")
    except PackageNotFoundError:
        return "unknown"


def log_uniform(rng: np.random.Generator, n: int) -> I64:
    """[n] delays in ms from event to servable vector, as training sees them."""
    return np.exp(rng.uniform(np.log(MIN_DELAY_MS), np.log(MAX_DELAY_MS), n)).astype(np.int64)


def delayed(batch: PairBatch, delay_ms: I64) -> PairBatch:
    """The requests as a candidates event `delay_ms` [B] earlier, or later than the user's last event before that, would
    have seen them: newer history is gone and the clock stands at the newest event left. Events of unknown time stay."""
    row = np.repeat(np.arange(batch.requests), np.diff(batch.history_splits))
    now = batch.ts_ms - delay_ms
    keep = batch.history_ts <= now[row]
    ends = np.concatenate([[0], np.cumsum(keep)])
    newest = np.full(batch.requests, -1, np.int64)
    np.maximum.at(newest, row[keep], batch.history_ts[keep])
    return PairBatch(
        batch.users, np.where(newest >= 0, newest, now), batch.splits, batch.items, batch.item_features,
        batch.request_features, batch.history[keep], batch.history_ts[keep], batch.history_kind[keep],
        ends[batch.history_splits].astype(np.int64), batch.history_features[:, keep],
    )  # fmt: skip
