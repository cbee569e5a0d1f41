"""How much of the foundation model's gain reaches the vertical model: `solaris evaluate`.

On the test part of a log (after FM and VM parts in time) every variant below is scored by log loss, and by its
*transfer ratio* (LL_vm - LL_x) / (LL_vm - LL_fm) with an interval from resampling users. No ratio is given where the
FM gains under 1 % over the VM or the interval of that gain spans zero: it would be noise over nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models import metrics
from models.api import F32
from models.dataset import Dataset
from models.export import VM_PLUS
from models.inputs import EXTRA, slot_columns, slot_spans
from models.nets import PairFm, StateFm, VmPlus
from models.runtime import OnnxRuntime
from models.served import ServedStore, fresh_slots
from models.train import Report, Trainer, TrainSettings, delayed, log_uniform

DELAYS_MS = (0, 2_000, 10_000, 60_000, 300_000)
COVERAGE = (0.2, 0.4, 0.6, 0.8, 1.0)
STALE_MS = (0, 3_600_000, 6 * 3_600_000, 24 * 3_600_000)
SERVED_MS = 1_000
RESAMPLES = 400
MIN_GAIN = 0.01
STEPS = (
    ("as_served_direct", ("direct",)),
    ("as_served_direct_aggregate", ("direct", "aggregate")),
    ("as_served_direct_aggregate_topic", ("direct", "aggregate", "topic")),
    ("as_served", ("direct", "aggregate", "topic", "state")),
    ("as_served_state_only", ("state",)),
)
"""Slots given, one fallback more at a time."""


def evaluate(
    data: Dataset, settings: TrainSettings, seeds: Sequence[int], report: Report | None = None
) -> dict[str, Any]:
    """All variants for every seed, and their means. The numbers of a seed come from one FM."""
    runs = [_Run(data, replace(settings, seed=s), report).result() for s in seeds]
    names = runs[0]["variants"]
    mean: dict[str, Any] = {}
    for name in names:
        losses = [r["variants"][name]["log_loss"] for r in runs]
        ratios = [r["variants"][name].get("transfer_ratio") for r in runs]
        mean[name] = {"log_loss": round(float(np.mean(losses)), 6)}
        if all(x is not None for x in ratios):
            mean[name]["transfer_ratio"] = round(float(np.mean([x["ratio"] for x in ratios])), 4)
    ratio = {
        key: mean.get(name, {}).get("transfer_ratio")
        for key, name in {
            "direct": "fresh_direct", "as_served": "as_served_direct", "with_fallbacks": "as_served",
            "soft_label": "soft_label",
        }.items()
    }  # fmt: skip
    return {"seeds": list(seeds), "vm": settings.vm, "fm": settings.preset, "transfer_ratio": ratio, "mean": mean,
            "runs": runs, "data_sha256": data.digest}  # fmt: skip


class _Run:
    def __init__(self, data: Dataset, settings: TrainSettings, report: Report | None) -> None:
        self.t = Trainer(data, settings, report)
        self.part = self.t.parts.test
        self.label = self.t.labels(self.part)
        self.users = np.repeat(
            data.impressions.users[self.part.start : self.part.stop], np.diff(self.t.splits(self.part))
        )
        self.variants: dict[str, dict[str, Any]] = {}
        self.vm_losses = self.fm_losses = np.zeros(0)
        self.gain_interval = (0.0, 0.0)

    def result(self) -> dict[str, Any]:
        t = self.t
        pair, state = t.train_fm()
        before = range(t.parts.vm.stop)
        vm = t.train_vm(before)
        runtime = t.runtime(*t.graphs(pair, state, vm))
        base, base_vm = t.vm_logits(runtime, self.part), t.vm_logits(runtime, t.parts.vm)
        fm = t.fm_logits(runtime, self.part)
        self._anchor(base, fm)
        self._soft_label(runtime, pair, state, before)
        store = t.served(runtime, [t.parts.vm, self.part])
        try:
            out = self._slots(runtime, store, base, base_vm)
        finally:
            store.close()
        return {"seed": t.settings.seed, **out, "variants": self.variants}

    def _anchor(self, base: F32, fm: F32) -> None:
        self.vm_losses, self.fm_losses = metrics.losses(base, self.label), metrics.losses(fm, self.label)
        gains = self._resampled(lambda vm, fm, _: (vm - fm) / vm, self.fm_losses)
        self.gain_interval = (float(np.quantile(gains, 0.025)), float(np.quantile(gains, 0.975)))
        self._add("vm", base)
        self._add("fm", fm)

    def _soft_label(self, runtime: OnnxRuntime, pair: PairFm, state: StateFm, before: range) -> None:
        """The same VM with the FM's soft labels as an auxiliary target."""
        t = self.t
        teacher = np.zeros(t.data.impressions.pairs, np.float32)
        splits = t.data.impressions.splits
        a, z = int(splits[before.start]), int(splits[before.stop])
        teacher[a:z] = t.fm_logits(runtime, before)
        settings, t.settings = t.settings, replace(t.settings, soft_weight=t.settings.soft_weight or 0.5)
        student = t.train_vm(before, teacher)
        t.settings = settings
        self._add("soft_label", t.vm_logits(t.runtime(*t.graphs(pair, state, student)), self.part))

    def _slots(self, runtime: OnnxRuntime, store: ServedStore, base: F32, base_vm: F32) -> dict[str, Any]:
        t = self.t
        delays = log_uniform(t._rng, len(t.parts.vm))
        train_columns = t.slot_columns(store, t.parts.vm, delays)
        columns = {d: t.slot_columns(store, self.part, d) for d in (*DELAYS_MS, SERVED_MS)}
        served = columns[SERVED_MS]
        direct = served[:, self._flag("direct")] > 0
        full: VmPlus | None = None
        for name, wanted in STEPS:
            slots = [s for s in wanted if s in t.slots]
            plus = t.train_plus(t.parts.vm, base_vm, self._only(train_columns, slots))
            self._add(name, self._score(plus, base, self._only(served, slots)), without_direct=~direct)
            if name == "as_served":
                full = plus
        assert full is not None
        control = t.train_plus(t.parts.vm, base_vm, self._flags(train_columns))
        self._add("control_flags_and_ages", self._score(control, base, self._flags(served)), without_direct=~direct)
        for d in DELAYS_MS:
            self._add(f"as_served_delay_{d // 1000}s", self._score(full, base, columns[d]))
        del columns
        self._fresh(runtime, base, base_vm)
        impressions = len(t.parts.vm) + len(self.part)
        return {
            "coverage": {s: round(float((served[:, self._flag(s)] > 0).mean()), 4) for s in t.slots},
            "fm_pairs_per_impression": round(store.pairs / impressions, 2),
            "fm_states_per_impression": round(store.states / impressions, 2),
            "fm_gain": round(1 - float(self.fm_losses.sum() / self.vm_losses.sum()), 5),
            "fm_gain_interval": [round(x, 5) for x in self.gain_interval],
            "test_pairs": len(self.label),
            "ctr": round(float(self.label.mean()), 5),
        }

    def _fresh(self, runtime: OnnxRuntime, base: F32, base_vm: F32) -> None:
        """Direct embeddings at zero age, at partial coverage (masks drawn as in training), and from old histories."""
        t = self.t
        only = ("direct",)

        def columns(part: range, stale_ms: int) -> F32:
            out = []
            for piece in t._pieces(part):
                old = delayed(piece, np.full(piece.requests, stale_ms, np.int64)) if stale_ms else piece
                slots = fresh_slots(runtime, old)
                slots.direct_age_ms[:] = stale_ms
                out.append(self._only(slot_columns(slots, t.slots), only))
            return np.concatenate(out)

        train_columns, test = columns(t.parts.vm, 0), columns(self.part, 0)
        plus = t.train_plus(t.parts.vm, base_vm, train_columns)
        self._add("fresh_direct", self._score(plus, base, test))
        unmatched = plus
        rng = np.random.default_rng(t.settings.seed + 1)
        share = rng.random(len(train_columns)).astype(np.float32)
        masked = train_columns * (rng.random(len(train_columns)) < share)[:, None]
        plus = t.train_plus(t.parts.vm, base_vm, masked.astype(np.float32))
        draw = rng.random(len(test))
        for c in COVERAGE:
            part = test * (draw < c)[:, None].astype(np.float32)
            self._add(f"coverage_{c:.0%}", self._score(plus, base, part))
            self._add(f"coverage_{c:.0%}_unmatched_not_gated", self._score(unmatched, base, part, gated=False))
        ages = np.array(STALE_MS)[rng.integers(0, len(STALE_MS), len(t.parts.vm))]
        aged = self._aged(runtime, t.parts.vm, ages)
        plus = t.train_plus(t.parts.vm, base_vm, aged)
        for stale in STALE_MS:
            self._add(f"stale_{stale // 3_600_000}h", self._score(plus, base, columns(self.part, stale)))

    def _aged(self, runtime: OnnxRuntime, part: range, ages: npt.NDArray[np.int64]) -> F32:
        t, out, done = self.t, [], 0
        for piece in t._pieces(part):
            mine = ages[done : done + piece.requests]
            done += piece.requests
            slots = fresh_slots(runtime, delayed(piece, mine))
            slots.direct_age_ms[:] = np.repeat(mine, np.diff(piece.splits))
            out.append(self._only(slot_columns(slots, t.slots), ("direct",)))
        return np.concatenate(out)

    # -- columns of single slots ---------------------------------------------------------------------------------

    def _spans(self) -> dict[str, tuple[int, int]]:
        return slot_spans(self.t.slots, self.t.dims.embedding, self.t.dims.dots)

    def _flag(self, slot: str) -> int:
        return self._spans()[slot][1] - EXTRA[slot]

    def _only(self, columns: F32, slots: Sequence[str]) -> F32:
        out = np.zeros_like(columns)
        for s in slots:
            a, z = self._spans()[s]
            out[:, a:z] = columns[:, a:z]
        return out

    def _flags(self, columns: F32) -> F32:
        """Control: that something is known and how old it is, without what it says."""
        out = np.zeros_like(columns)
        for s, (_, z) in self._spans().items():
            out[:, self._flag(s) : z] = columns[:, self._flag(s) : z]
        return out

    def _score(self, plus: VmPlus, base: F32, columns: F32, gated: bool = True) -> F32:
        t, out, at = self.t, [], 0
        with torch.no_grad():
            for piece in t._pieces(self.part):
                cut = slice(at, at + piece.pairs)
                given = {"base_logit": base[cut], "slots": columns[cut]}
                out.append(plus(*t._tensors(piece, VM_PLUS, {}, given)).cpu().numpy())
                at += piece.pairs
        logit = np.concatenate(out)
        known = np.logical_or.reduce([columns[:, self._flag(s)] > 0 for s in t.slots])
        return np.where(known, logit, base).astype(np.float32) if gated else logit

    # -- figures -------------------------------------------------------------------------------------------------

    def _add(self, name: str, logit: F32, without_direct: npt.NDArray[np.bool_] | None = None) -> None:
        entry = metrics.summary(logit, self.label, self.t.splits(self.part))
        losses = metrics.losses(logit, self.label)
        if self._ratio_means_something() and name not in ("vm", "fm"):
            entry["transfer_ratio"] = self._ratio(losses, np.ones(len(losses), bool))
            if without_direct is not None and without_direct.any():
                entry["recovery_without_direct"] = self._ratio(losses, without_direct)
        self.variants[name] = entry

    def _ratio_means_something(self) -> bool:
        gain = 1 - float(self.fm_losses.sum() / self.vm_losses.sum())
        return gain >= MIN_GAIN and self.gain_interval[0] > 0

    def _ratio(self, losses: npt.NDArray[np.float64], rows: npt.NDArray[np.bool_]) -> dict[str, Any] | None:
        vm, fm, mine = self.vm_losses[rows].sum(), self.fm_losses[rows].sum(), losses[rows].sum()
        if vm - fm <= MIN_GAIN * vm:
            return None
        drawn = self._resampled(lambda v, f, x: (v - x) / (v - f), losses, rows)
        drawn = drawn[np.isfinite(drawn)]
        low, high = (round(float(np.quantile(drawn, q)), 4) for q in (0.025, 0.975))
        return {"ratio": round(float((vm - mine) / (vm - fm)), 4), "interval": [low, high]}

    def _resampled(
        self,
        statistic: Callable[[Any, Any, Any], Any],
        losses: npt.NDArray[np.float64],
        rows: npt.NDArray[np.bool_] | None = None,
    ) -> npt.NDArray[np.float64]:
        """The statistic of summed losses (vm, fm, x) over `RESAMPLES` draws of users with replacement."""
        keep = np.ones(len(self.users), bool) if rows is None else rows
        _, user = np.unique(self.users[keep], return_inverse=True)
        n = int(user.max()) + 1
        sums = np.stack([np.bincount(user, x[keep], n) for x in (self.vm_losses, self.fm_losses, losses)])
        rng = np.random.default_rng(7)
        weights = rng.multinomial(n, np.full(n, 1 / n), RESAMPLES)
        vm, fm, mine = (weights @ sums.T).T
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(statistic(vm, fm, mine), np.float64)
