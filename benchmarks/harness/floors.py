"""The floor of a role: decode + model + encode on the same batches in memory. No Kafka, no gate, no state.

Decoding is the role's own (with the rules an event must keep), *model* is the columns the graphs are fed with and their
run, encoding is the role's own record. CPU time of the thread that does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.harness.events import Kafka, Workload
from models.api import PairBatch, Slots
from models.catalogue import Catalogue
from models.features import Encoder
from models.runtime import OnnxRuntime, open_runtime
from streams.decoding import hashed_candidates
from streams.ranker import Ranker, Ranking
from topics.events import decode_impression, decode_item, encode
from topics.packed import decode_precompute, encode_precompute

BATCH = 500
ACCEPTED = 50
"""pairs of a request, as the verifier's default `top_k` lets through"""


class Floors:
    def __init__(self, bundle: Path, workload: Workload) -> None:
        self.runtime: OnnxRuntime = open_runtime(bundle)
        self.catalogue = Catalogue(self.runtime.info.spec)
        self.catalogue.update(decode_item(r.value) for r in workload.catalogue())
        self.encoder = Encoder(self.runtime.info.spec, self.catalogue)

    def verifier(self, records: list[Kafka]) -> float:
        """CPU seconds per event."""

        def work(batch: list[Kafka]) -> None:
            events = [hashed_candidates(r.value) for r in batch]
            pairs = self.encoder.candidates(events)
            scores = self.runtime.score(pairs)
            splits = pairs.splits.tolist()
            keep = [lo + np.argsort(-scores.logit[lo:hi], kind="stable")[:ACCEPTED] for lo, hi in pairwise(splits)]
            for request in self.encoder.to_precompute(
                pairs, keep, scores.logit, scores.profile, [e.id for e in events]
            ):
                encode_precompute(request)

        return _cpu(work, records)

    def ranker(self, records: list[Kafka]) -> float:
        """CPU seconds per impression. The slots are at hand: half of the pairs direct, all the others filled too."""
        ranker = Ranker(self.runtime, self.encoder)
        n = BATCH * 50
        slots = self._slots(n)

        def work(batch: list[Kafka]) -> None:
            events = [decode_impression(r.value) for r in batch]
            pairs = self.encoder.impressions(events)
            at = slots if pairs.pairs == n else self._slots(pairs.pairs)
            logit = self.runtime.score_plus(pairs, at)
            score = (1.0 / (1.0 + np.exp(-logit))).astype(np.float32)
            bids = np.concatenate([np.asarray(e.bids, np.float32) for e in events])
            rows = np.repeat(np.arange(pairs.requests), np.diff(pairs.splits))
            order = np.lexsort((-score * bids, rows))
            source = np.zeros(pairs.pairs, np.int8)
            age = np.zeros(pairs.pairs, np.int64)
            ranking = Ranking(pairs, logit, logit, score, source, age, at.ages(), order)
            for a in ranker.answers(events, ranking, [0] * len(events), 0, [False] * len(events)):
                encode(a)

        return _cpu(work, records)

    def _slots(self, n: int) -> Slots:
        info, rng = self.runtime.info, np.random.default_rng(1)
        slots = Slots.empty(n, info.dim, info.dots)
        for name in info.slots:
            values = getattr(slots, name)
            values[:] = rng.standard_normal(values.shape, np.float32)
            getattr(slots, name + "_age_ms")[:] = 3_600_000
        slots.direct_age_ms[::2] = -1
        slots.direct[::2] = 0
        return slots

    def session(self, records: list[Kafka], batch_pairs: int) -> tuple[float, float]:
        """(CPU, wall) seconds per pair of the bare FM session at this batch size: inputs made beforehand."""
        requests = [decode_precompute(r.value) for r in records]
        per_call = max(1, batch_pairs // len(requests[0].items))
        batches: list[PairBatch] = [
            self.encoder.from_precompute(requests[k : k + per_call])
            for k in range(0, len(requests) - per_call + 1, per_call)
        ]
        graph = self.runtime._graphs["fm_pair"]
        from models.inputs import BatchInputs

        feeds = []
        for b in batches:
            inputs = BatchInputs(b, self.runtime.info.spec, self.runtime._topic_column)
            feeds.append({key: inputs.get(i.source, i.buckets) for key, i in graph.inputs.items()})
        session = self.runtime._sessions["fm_pair"]
        session.run(["embedding"], feeds[0])
        pairs, cpu, wall = 0, time.process_time(), time.monotonic()
        for b, feed in zip(batches, feeds, strict=True):
            session.run(["embedding"], feed)
            pairs += b.pairs
        return (time.process_time() - cpu) / pairs, (time.monotonic() - wall) / pairs


def _cpu(work: Callable[[list[Kafka]], None], records: list[Kafka]) -> float:
    batches = [records[k : k + BATCH] for k in range(0, len(records) - BATCH + 1, BATCH)]
    work(batches[0])
    began = time.process_time()
    for batch in batches:
        work(batch)
    return (time.process_time() - began) / (BATCH * len(batches))
