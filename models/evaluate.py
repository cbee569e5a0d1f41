"""How much of the foundation model's gain reaches the vertical model: `solaris evaluate`.

On the test part of a log (after FM and VM parts in time) every variant below is scored by log loss, and by its
*transfer ratio* (`models.ratios`), against the VM and against three controls, for an embedding counts by what it adds
to them: a VM that knows only whether and when the pair was computed (`over_repeat`), one with hand counters of the
request's own history (`over_counters`), and one with rolling counts of the stream (`over_rolling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from models import metrics
from models.api import F32
from models.dataset import Dataset
from models.export import VM_PLUS, with_counts
from models.inputs import EXTRA, slot_columns
from models.nets import PairFm, StateFm, VmPlus
from models.ratios import F64, Mask, Ratios
from models.runtime import OnnxRuntime
from models.served import ServedStore, fresh_slots
from models.similar import FORMS
from models.train import Report, Trainer, delayed
from models.train_settings import TrainSettings

DELAYS_MS = (0, 2_000, 10_000, 60_000, 300_000)
COVERAGE = (0.2, 0.4, 0.6, 0.8, 1.0)
STALE_MS = (0, 3_600_000, 6 * 3_600_000, 24 * 3_600_000)
SERVED_MS = 1_000
STEPS = (
    ("as_served_direct", ("direct",)),
    ("as_served_direct_aggregate", ("direct", "aggregate")),
    ("as_served_direct_aggregate_topic", ("direct", "aggregate", "topic")),
    ("as_served_direct_aggregate_topic_state", ("direct", "aggregate", "topic", "state")),
    ("as_served", ("direct", "aggregate", "topic", "state", "similar")),
    ("as_served_state_only", ("state",)),
)
"""Slots given, one fallback more at a time; similar users where the user has no aggregate."""
CONTROLS = ("repeat", "counters", "rolling")
"""VMs that what is as served is also measured against: see the module"""


def evaluate(
    data: Dataset, settings: TrainSettings, seeds: Sequence[int], report: Report | None = None
) -> dict[str, Any]:
    """All variants for every seed, and their means. The numbers of a seed come from one FM."""
    runs = [_Run(data, replace(settings, seed=s), report).result() for s in seeds]
    return {**summarise(runs), "vm": settings.vm, "fm": settings.preset, "data_sha256": data.digest, "runs": runs}


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds; a ratio only where every seed has one."""
    mean: dict[str, Any] = {}
    for name in runs[0]["variants"]:
        entries = [r["variants"][name] for r in runs]
        mean[name] = {"log_loss": round(float(np.mean([e["log_loss"] for e in entries])), 6)}
        for key in ("transfer_ratio", *(f"over_{c}" for c in CONTROLS), "recovery_without_direct"):
            ratios = [e.get(key) for e in entries]
            if all(x is not None for x in ratios):
                mean[name][key] = round(float(np.mean([x["ratio"] for x in ratios])), 4)
        for key in ("gain", *(f"gain_over_{c}" for c in CONTROLS)):
            if all(key in e for e in entries):
                mean[name][key] = round(float(np.mean([e[key]["gain"] for e in entries])), 5)
    ratio = {
        key: mean.get(name, {}).get("transfer_ratio")
        for key, name in {
            "direct": "fresh_direct", "as_served": "as_served_direct", "with_fallbacks": "as_served",
            "soft_label": "soft_label",
        }.items()
    }  # fmt: skip
    return {"seeds": [r["seed"] for r in runs], "transfer_ratio": ratio, "mean": mean}


class _Run:
    def __init__(self, data: Dataset, settings: TrainSettings, report: Report | None) -> None:
        self.t = Trainer(data, settings, report)
        self.part = self.t.parts.test
        self.label = self.t.labels(self.part)
        self.users = np.repeat(
            data.impressions.users[self.part.start : self.part.stop], np.diff(self.t.splits(self.part))
        )
        self.variants: dict[str, dict[str, Any]] = {}
        self.losses: dict[str, F64] = {}
        self.calls: dict[str, float] = {}

    def result(self) -> dict[str, Any]:
        t = self.t
        pair, state = t.train_fm()
        before = range(t.parts.vm.stop)
        vm = t.train_vm(before)
        runtime = t.runtime(*t.graphs(pair, state, vm))
        self.base, self.base_vm = t.vm_logits(runtime, self.part), t.vm_logits(runtime, t.parts.vm)
        fm = t.fm_logits(runtime, self.part)
        self.losses["vm"], self.losses["fm"] = (metrics.losses(x, self.label) for x in (self.base, fm))
        self.ratios = Ratios(self.users, self.losses["vm"], self.losses["fm"])
        self._add("vm", self.base)
        self._add("fm", fm)
        conversion = t.conversion(runtime, self.part)
        self._soft_label(runtime, pair, state, before)
        store = t.served(runtime, [t.parts.vm, self.part])
        try:
            impressions = t.served_impressions([t.parts.vm, self.part])
            self.calls = {
                "pairs": round(store.pairs / impressions, 2),
                "states": round(store.states / impressions, 2),
            }
            train_columns, served, coverage = self._as_served(store)
            self._counters(pair, state, before, train_columns, served)
            self._similar(store, train_columns, served)
        finally:
            store.close()
        del train_columns, served
        self._fresh(runtime)
        over = self._over_controls()
        return {
            "seed": t.settings.seed,
            "coverage": coverage,
            "fm_pairs_per_impression": self.calls["pairs"],
            "fm_states_per_impression": self.calls["states"],
            "fm_gain": self.ratios.share["gain"],
            "fm_gain_interval": self.ratios.share["interval"],
            "fm_gain_over": over,
            "test_pairs": len(self.label),
            "ctr": round(float(self.label.mean()), 5),
            "conversion": conversion,
            "variants": self.variants,
        }

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

    def _as_served(self, store: ServedStore) -> tuple[F32, F32, dict[str, float]]:
        """One fallback more at a time, delays, and the control without what the slots say."""
        t = self.t
        train_columns = t.training_columns(store)
        columns = {d: t.slot_columns(store, self.part, d) for d in (*DELAYS_MS, SERVED_MS)}
        served = columns[SERVED_MS]
        self.without_direct = ~(served[:, self._flag("direct")] > 0)
        for name, wanted in STEPS:
            slots = [s for s in wanted if s in t.slots]
            plus = t.train_plus(t.parts.vm, self.base_vm, self._only(train_columns, slots), thin=len(slots) > 1)
            self._add_slots(name, self._score(plus, self.base, self._only(served, slots)), slots)
            if name in ("as_served", "as_served_state_only"):
                prefix = "state" if name.endswith("only") else "as_served"
                for d in DELAYS_MS:
                    self._add(
                        f"{prefix}_delay_{d // 1000}s", self._score(plus, self.base, self._only(columns[d], slots))
                    )
        for name, kept in (("control_repeat", ["direct"]), ("control_flags_and_ages", list(t.slots))):
            control = t.train_plus(t.parts.vm, self.base_vm, self._flags(train_columns, kept))
            self._add_slots(name, self._score(control, self.base, self._flags(served, kept)), kept)
        coverage = {s: round(float((served[:, self._flag(s)] > 0).mean()), 4) for s in t.slots}
        return train_columns, served, coverage

    def _counters(self, pair: PairFm, state: StateFm, before: range, train_columns: F32, served: F32) -> None:
        """VMs with counters, which need no FM, and what slots add to them: hand counters of the request's own history
        (the strong VM), and rolling counts of item, user and pair."""
        t = self.t
        for control, size in (
            ("counters", replace(t.vm_size, strong=True)),
            ("rolling", replace(t.vm_size, rolling=True)),
        ):
            name = f"control_{control}"
            if size == t.vm_size:
                same = {name: "vm", f"{name}_and_state": "as_served_state_only", f"{name}_and_slots": "as_served"}
                for new, old in same.items():
                    self.variants[new], self.losses[new] = self.variants[old], self.losses[old]
                continue
            counted = t.runtime(*t.graphs(pair, state, t.train_vm(before, size=size)))
            base, base_vm = t.vm_logits(counted, self.part), t.vm_logits(counted, t.parts.vm)
            self._add(name, base)
            if control == "rolling":  # as the verifier asks
                self._add(f"{name}_unknown", t.vm_logits(counted, self.part, unknown=True))
            for added, slots in (("state", ["state"]), ("slots", list(t.slots))):
                plus = t.train_plus(t.parts.vm, base_vm, self._only(train_columns, slots), size, len(slots) > 1)
                logit = self._score(plus, base, self._only(served, slots))
                self._add_slots(f"{name}_and_{added}", logit, slots)

    def _similar(self, store: ServedStore, train_columns: F32, served: F32) -> None:
        """Similar users asked for everybody, in each form: as the only fallback, and for users of whom nothing is
        known (all requests taken as theirs)."""
        t, seconds = self.t, np.full(len(self.t.parts.vm), SERVED_MS)
        if "similar" not in t.slots:
            return
        only_direct, only_direct_test = self._only(train_columns, ["direct"]), self._only(served, ["direct"])
        for form in FORMS:
            given = [
                self._only(
                    t.slot_columns(store, part, d, form, ask=np.ones(len(part), bool)), ["similar"]
                )
                for part, d in ((t.parts.vm, seconds), (self.part, SERVED_MS))
            ]  # fmt: skip
            plus = t.train_plus(t.parts.vm, self.base_vm, given[0])
            self._add(f"cold_{form}", self._score(plus, self.base, given[1]))
            plus = t.train_plus(t.parts.vm, self.base_vm, given[0] + only_direct)
            logit = self._score(plus, self.base, given[1] + only_direct_test)
            self._add_slots(f"as_served_direct_{form}", logit, ["direct"])

    def _fresh(self, runtime: OnnxRuntime) -> None:
        """Direct embeddings at zero age, at partial coverage (masks drawn as in training), and from old histories."""
        t = self.t
        train_columns, test = self._aged(runtime, t.parts.vm), self._aged(runtime, self.part)
        plus = t.train_plus(t.parts.vm, self.base_vm, train_columns)
        self._add("fresh_direct", self._score(plus, self.base, test))
        unmatched = plus
        rng = np.random.default_rng(t.settings.seed + 1)
        share = rng.random(len(train_columns)).astype(np.float32)
        masked = train_columns * (rng.random(len(train_columns)) < share)[:, None]
        plus = t.train_plus(t.parts.vm, self.base_vm, masked.astype(np.float32))
        draw = rng.random(len(test))
        for c in COVERAGE:
            part = test * (draw < c)[:, None].astype(np.float32)
            self._add(f"coverage_{c:.0%}", self._score(plus, self.base, part))
            self._add(f"coverage_{c:.0%}_unmatched", self._score(unmatched, self.base, part))
            not_gated = self._score(unmatched, self.base, part, gated=False)
            self._add(f"coverage_{c:.0%}_unmatched_not_gated", not_gated)
        for stale in STALE_MS:
            plus = t.train_plus(t.parts.vm, self.base_vm, self._aged(runtime, t.parts.vm, stale))
            columns = self._aged(runtime, self.part, stale)
            self._add(f"stale_{stale // 3_600_000}h", self._score(plus, self.base, columns))

    def _aged(self, runtime: OnnxRuntime, part: range, age_ms: int | None = None) -> F32:
        """[n, W] direct embeddings of the impressions themselves, or as of the user's last event that was `age_ms` ago
        or more."""
        out = []
        for piece in self.t._pieces(part):
            old = piece if age_ms is None else delayed(piece, np.full(piece.requests, age_ms, np.int64))
            slots = fresh_slots(runtime, old)
            slots.direct_age_ms[:] = age_ms or 0
            out.append(self._only(slot_columns(slots, self.t.slots), ("direct",)))
        return np.concatenate(out)

    # -- columns of single slots ---------------------------------------------------------------------------------

    def _flag(self, slot: str) -> int:
        return self.t.slot_spans[slot][1] - EXTRA[slot]

    def _only(self, columns: F32, slots: Sequence[str]) -> F32:
        out = np.zeros_like(columns)
        for s in slots:
            a, z = self.t.slot_spans[s]
            out[:, a:z] = columns[:, a:z]
        return out

    def _flags(self, columns: F32, slots: Sequence[str]) -> F32:
        """Control: that something is known and how old it is, without what it says."""
        out = np.zeros_like(columns)
        for s in slots:
            z = self.t.slot_spans[s][1]
            out[:, self._flag(s) : z] = columns[:, self._flag(s) : z]
        return out

    def _score(self, plus: VmPlus, base: F32, columns: F32, gated: bool = True) -> F32:
        t, out, at = self.t, [], 0
        first = int(t.data.impressions.splits[self.part.start])
        with torch.no_grad():
            for piece in t._pieces(self.part):
                cut = slice(at, at + piece.pairs)
                index = slice(first + at, first + at + piece.pairs)
                given = {"base_logit": base[cut], "slots": columns[cut], **t.counts_given(plus, index)}
                out.append(plus(*t._tensors(piece, with_counts(VM_PLUS, plus.size.rolling), {}, given)).cpu().numpy())
                at += piece.pairs
        logit = np.concatenate(out)
        known = np.logical_or.reduce([columns[:, self._flag(s)] > 0 for s in t.slots])
        return np.where(known, logit, base).astype(np.float32) if gated else logit

    # -- figures -------------------------------------------------------------------------------------------------

    def _add_slots(self, name: str, logit: F32, slots: Sequence[str]) -> None:
        """A variant as served: with its recovery where there is no direct hit, and the FM calls it needs."""
        self._add(name, logit, self.without_direct)
        pairs = self.calls["pairs"] if set(slots) - {"state"} else 0.0
        states = self.calls["states"] if "state" in slots else 0.0
        self.variants[name]["fm_calls_per_impression"] = {"pairs": pairs, "states": states}

    def _add(self, name: str, logit: F32, without_direct: Mask | None = None) -> None:
        entry = metrics.summary(logit, self.label, self.t.splits(self.part))
        losses = self.losses[name] = metrics.losses(logit, self.label)
        if name != "vm":
            entry["gain"] = Ratios(self.users, self.losses["vm"], losses).share
        if name not in ("vm", "fm") and self.ratios.mean_something:
            entry["transfer_ratio"] = self.ratios.of(losses)
            if without_direct is not None and without_direct.any():
                entry["recovery_without_direct"] = self.ratios.of(losses, without_direct)
        self.variants[name] = entry

    def _over_controls(self) -> dict[str, dict[str, Any]]:
        """Ratios against each of `CONTROLS`; -> what the FM gains over each."""
        gains = {}
        for control in CONTROLS:
            anchor = self.losses[f"control_{control}"]
            ratios = Ratios(self.users, anchor, self.losses["fm"])
            gains[control] = ratios.share
            for name, losses in self.losses.items():
                if name.startswith(("as_served", "state_", "control_counters", "control_rolling")):
                    self.variants[name][f"gain_over_{control}"] = Ratios(self.users, anchor, losses).share
                    if ratios.mean_something:
                        self.variants[name][f"over_{control}"] = ratios.of(losses)
        return gains
