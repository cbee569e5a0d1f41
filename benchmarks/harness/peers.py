"""The cases of the peers: each does our role's work on the same topics, beside our role and by turns with it.

Both processes are frozen while the input is written, then ours drains it, then the peer: the same records, minutes or
less apart, so a machine that changes its pace changes both. The ratio of each turn counts, and the answers of the last
turn are compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.harness import oddities
from benchmarks.harness.bundle import ITEMS, USERS, bundle
from benchmarks.harness.cluster import Answers, Process, Role, Sample, Topics
from benchmarks.harness.equal import same_ranked, same_requests
from benchmarks.harness.events import Kafka
from benchmarks.harness.floors import ACCEPTED
from benchmarks.harness.run import PARTITIONS, UNCAPPED, US, Run, rates
from state.api import StoreSettings

WARM_EVENTS = 500
TURNS = 3
PER_EVENT = 3000
"""impressions of a turn of a peer that takes a millisecond or more for each"""
STEADY, STEADY_ROUNDS = 0.95, 2
"""A JVM is measured once so many rounds in a row cost no less than `STEADY` of the best one so far: its compiler works
on the same cores and counts as the process's own."""


def faust(run: Run) -> None:
    script = [sys.executable, "benchmarks/peers/faust_verifier.py"]
    ratios = {how: _verifier(run, "faust", how, script) for how in ("take", "per_event")}
    for how, values in ratios.items():
        run.figures.add(f"verifier.faust_{how}.over_ours", values)
    how = min(ratios, key=lambda k: run.figures[f"verifier.faust_{k}.over_ours"])
    run.figures.add("verifier.faust_over_ours", ratios[how], note=f"the better of the two forms: {how}")


def quix(run: Run) -> None:
    from benchmarks.peers.quix_env import quix_python

    script = [str(quix_python()), "benchmarks/peers/quix_verifier.py"]
    for how in ("exactly_once", "at_least_once"):
        ratios = _verifier(run, "quix", how, script)
        run.figures.add(f"verifier.quix_{how}.over_ours", ratios)
        if how == "exactly_once":
            run.figures.add("verifier.quix_over_ours", ratios, note="both transactional")


def kstreams(run: Run) -> None:
    from benchmarks.peers.kstreams_env import kstreams_command

    command = kstreams_command()
    ratios = _ranker(run, "kstreams", "exactly_once", lambda config: [*command, str(config)], jvm=True)
    run.figures.add("ranker.kstreams_over_ours", ratios, note="both transactional")


def quix_ranker(run: Run) -> None:
    from benchmarks.peers.quix_env import quix_python

    script = [str(quix_python()), "benchmarks/peers/quix_ranker.py"]
    for how in ("exactly_once", "at_least_once"):
        ratios = _ranker(run, "quix", how, lambda config: [*script, str(config)])
        run.figures.add(f"ranker.quix_{how}.over_ours", ratios)
        if how == "exactly_once":
            run.figures.add("ranker.quix_over_ours", ratios, note="both transactional")


def _verifier(run: Run, peer: str, how: str, script: Sequence[str]) -> list[float]:
    name = f"{peer}_{how}"
    topics = run.topics(f"verifier-{name}")
    out = topics.kafka.topic(name)
    topics.create(out)
    kafka, folder = topics.kafka, run.folder / f"verifier-{name}"
    arguments = [
        kafka.bootstrap, kafka.prefix, str(bundle("light")), str(PARTITIONS), out, how, str(folder), str(ACCEPTED),
    ]  # fmt: skip
    with (
        run.role("verifier", topics, UNCAPPED) as role,
        Process(name, [*script, *arguments], folder) as process,
        closing(Answers(kafka, kafka.topic("precompute"))) as ours,
        closing(Answers(kafka, out)) as theirs,
    ):
        role.wait_ready()
        feed = _Feed(topics, "candidates", role, process, ours, theirs)
        feed.both(run.candidates[:WARM_EVENTS])
        ratios = feed.turns(run, "verifier", name, run.candidates, "event")
        same = same_requests(ours.values, theirs.values)
    run.figures.add(f"verifier.{name}.same_answers", same, "share")
    return ratios


def _ranker(run: Run, peer: str, how: str, command: Callable[[Path], Sequence[str]], jvm: bool = False) -> list[float]:
    name = f"{peer}_{how}" if peer == "quix" else peer
    topics = run.topics(f"ranker-{name}")
    out = topics.kafka.topic(name)
    topics.create(out)
    run.warm(topics)
    topics.send("embeddings", oddities.state(run.workload, run.floors.runtime.info.fm_hash))
    folder = run.folder / f"ranker-{name}"
    folder.mkdir(parents=True)
    config = folder / "config.json"
    config.write_text(json.dumps(ranker_config(run, topics, out, how, folder), indent=1))
    with (
        run.role("ranker", topics, ["ranker.vm_scores_share=0"]) as role,
        Process(name, command(config), folder) as process,
        closing(Answers(topics.kafka, topics.kafka.topic("ranked-ads"))) as ours,
        closing(Answers(topics.kafka, out)) as theirs,
    ):
        role.wait_ready()
        embeddings = topics.kafka.topic("embeddings")
        end = topics.end(embeddings)
        process.wait_for("its state", lambda: topics.committed(out, embeddings) >= end, every_s=0.5)
        feed = _Feed(topics, "impressions", role, process, ours, theirs)
        drained = run.drained if jvm else run.drained[:PER_EVENT]
        feed.both(run.impressions[-WARM_EVENTS:])
        if jvm:
            feed.settle([run.impressions[k : k + len(drained)] for k in range(0, len(run.impressions), len(drained))])
        ratios = feed.turns(run, "ranker", name, drained, "impression")
        same = same_ranked([r.value for r in drained], ours.values, theirs.values)
        odd = oddities.impressions(run.workload)
        feed.both(odd)
        same_odd = same_ranked([r.value for r in odd], ours.values, theirs.values)
    run.figures.add(f"ranker.{name}.same_answers", same, "share")
    run.figures.add(f"ranker.{name}.same_odd_answers", same_odd, "share", f"{len(odd)} impressions of odd users")
    return ratios


def ranker_config(run: Run, topics: Topics, out: str, how: str, folder: Path) -> dict[str, Any]:
    """What a peer needs to know to do the ranker's work."""
    kafka, store, info = topics.kafka, StoreSettings(), run.floors.runtime.info
    dims = run.floors.runtime._dims
    guarantee = {"exactly_once": "exactly_once_v2", "at_least_once": "at_least_once"}[how]
    return {
        "bootstrap": kafka.bootstrap, "prefix": kafka.prefix, "partitions": kafka.partitions,
        "application_id": out, "state_dir": str(folder / "state"), "guarantee": guarantee,
        "impressions": kafka.topic("impressions"), "embeddings": kafka.topic("embeddings"),
        "items": kafka.topic("items"), "ranked_ads": out,
        "bundle": str(bundle("light")), "vm": info.vm, "fm": info.fm, "fm_hash": str(info.fm_hash),
        "ttl_ms": store.ttl_ms, "window_ms": store.window_ms,
        "user_buckets": USERS, "item_buckets": ITEMS, "history_length": info.spec.history_length,
        "request_features": [f.name for f in info.spec.request], "item_features": [f.name for f in info.spec.item],
        "topic_feature": info.spec.topic, "dim": info.dim, "profile": info.profile_dim,
        "heads": dims.heads, "head_dim": dims.head_dim, "towers": dims.towers, "tower_dim": dims.tower_dim,
    }  # fmt: skip


class _Feed:
    """Feeds one input topic that our role and the peer both read."""

    def __init__(self, topics: Topics, topic: str, role: Role, peer: Process, ours: Answers, theirs: Answers) -> None:
        self._topics, self._topic, self._role, self._peer = topics, topic, role, peer
        self._ours, self._theirs = ours, theirs

    def both(self, records: Sequence[Kafka]) -> None:
        """Has both answer, side by side; their answers are all there is in the two `Answers` then."""
        pairs = ((self._role, self._ours), (self._peer, self._theirs))
        for _, answers in pairs:
            answers.clear()
        self._topics.send(self._topic, records)
        for process, answers in pairs:
            process.wait_for("answers", lambda answers=answers: answers.arrived(len(records)))  # type: ignore[misc]

    def settle(self, rounds: Sequence[Sequence[Kafka]]) -> None:
        """Feeds round after round until the peer's CPU time for one stops falling, or there are no more."""
        last, steady = float("inf"), 0
        for records in rounds:
            _, theirs = self._turn(records)
            steady = steady + 1 if theirs.cpu_s >= STEADY * last else 0
            if steady == STEADY_ROUNDS:
                return
            last = min(last, theirs.cpu_s)

    def turns(self, run: Run, role: str, name: str, records: Sequence[Kafka], what: str) -> list[float]:
        """Their CPU time over ours, turn by turn. The answers of the last turn stay in the two `Answers`."""
        pairs = [self._turn(records) for _ in range(2 if run.quick else TURNS)]
        rates(run, f"{role}.{name}", [theirs for _, theirs in pairs], len(records), what)
        mine = [ours.cpu_s / len(records) * US for ours, _ in pairs]
        run.figures.add(f"{role}.{name}.ours_cpu_us", mine, f"us/{what}", "our role in the same turns")
        return [theirs.cpu_s / ours.cpu_s for ours, theirs in pairs]

    def _turn(self, records: Sequence[Kafka]) -> tuple[Sample, Sample]:
        """One input for both: ours drains it, then the peer."""
        both = ((self._role, self._ours), (self._peer, self._theirs))
        for process, answers in both:
            process.freeze()
            answers.clear()
        self._topics.send(self._topic, records)
        ours, theirs = (
            process.release(lambda answers=answers: answers.arrived(len(records)))  # type: ignore[misc]
            for process, answers in both
        )
        return ours, theirs
