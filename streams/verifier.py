"""The verifier's core: candidates in, precompute requests out. No Kafka, no wall clock, no threads.

One VM call scores all pairs of a batch; each partition's `Gate` then decides, event by event. Every event yields one
request, with no items when nothing was accepted: the embedder refreshes the user's state from it all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from models.api import Runtime
from models.features import Encoder
from streams.gate import REASONS, Gate, GateSettings, above_threshold, by_value
from topics.events import Candidates, HashedCandidates
from topics.packed import PrecomputeRequest


@dataclass(slots=True)
class Verifier:
    runtime: Runtime
    encoder: Encoder
    settings: GateSettings
    gates: dict[int, Gate] = field(default_factory=dict)
    """by partition"""
    counters: Counter[str] = field(default_factory=Counter)

    def gate(self, partition: int) -> Gate:
        gate = self.gates.get(partition)
        if gate is None:
            gate = self.gates[partition] = Gate(self.settings)
        return gate

    def process(
        self,
        events: Sequence[Candidates | HashedCandidates],
        partitions: Sequence[int],
        backlog_pairs: Mapping[int, int] | None = None,
    ) -> list[PrecomputeRequest]:
        """One request per event, in order. `partitions` [B] names each event's partition; `backlog_pairs` says by
        partition how many accepted pairs wait at the embedder: those of this batch join them."""
        if not events:
            return []
        batch = self.encoder.candidates(events)
        scores = self.runtime.score(batch)
        # Rounded, so that the last bits of a matrix product, which depend on the batch, do not decide.
        logits = np.round(scores.logit, 4)
        order = by_value(logits, batch.splits)
        ranked = logits[order]
        usable = above_threshold(ranked, batch.splits, self.settings)
        backlog = dict(backlog_pairs or {})
        users, splits = batch.users.tolist(), batch.splits.tolist()
        kept = []
        for b, event in enumerate(events):
            p, lo = partitions[b], splits[b]
            n = self.gate(p).take(users[b], event.ts, ranked[lo : splits[b + 1]], usable[b], backlog.get(p, 0))
            if p in backlog:
                backlog[p] += n
            kept.append(order[lo : lo + n])
        requests = self.encoder.to_precompute(batch, kept, logits, scores.profile, [e.id for e in events])
        self.counters["events"] += len(events)
        return requests

    def totals(self) -> dict[str, int]:
        """Counters since the start, over the partitions held: pairs seen, accepted and refused by reason."""
        out = {"events": self.counters["events"], "pairs_seen": 0, "pairs_accepted": 0}
        out.update({f"refused_{r}": 0 for r in REASONS})
        for gate in self.gates.values():
            out["pairs_seen"] += gate.seen
            out["pairs_accepted"] += gate.accepted
            for reason, n in gate.refused.items():
                out[f"refused_{reason}"] += n
        return out
