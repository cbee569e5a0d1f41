"""One chaos run: the log's replay, the events, the wait for the last answers, the verdict."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import chaos_checks as checks
from chaos_events import Actions, Event
from chaos_fleet import Fleet
from chaos_watch import Watch
from feeder import Feeder
from pipeline import Roles

from models.runtime import open_runtime
from state.api import StoreDims, StoreSettings
from streams.audit import audit, read_all
from streams.settings import load
from topics import admin
from topics.brokers import JavaKafka
from topics.events import Impression
from topics.kafka import KafkaSettings
from topics.readers import EventLog, open_log
from topics.replay import replay
from topics.simulator import preset, write

BUNDLE = load(environment={}).model.bundle
FM_CALLS_RATIO = (0.98, 1.05)
"""pairs in committed chunks against a run without faults"""
FM_COMPUTED_RATIO = 1.6
"""pairs computed, aborted transactions included, against a run without faults"""
PAUSE_LIMIT_MS = 120_000
ANSWER_WAIT_S = 300.0
"""generous: a machine with other work takes a minute to start a process"""
KNOWN_ENDS = (0, 1, 3, -15)
"""stopped, an error of ours in one line, a client call that hung, SIGTERM before the process had begun"""
SETS = (
    # Everything offered is accepted, so that two runs ask the FM for the same pairs.
    "verifier.top_k=10000", "verifier.per_user_cap=1000000", "verifier.backlog_high_pairs=1000000000",
    # Small steps: more of them are in flight when something is killed.
    "loop.batch_records=40", "loop.session_timeout_ms=6000", "loop.transaction_timeout_ms=10000",
)  # fmt: skip


class Run:
    def __init__(self, folder: Path, seed: int, events: list[Event], users: int, gap_s: float, unreachable_s: float):
        self.folder, self.seed, self.events, self.gap_s = folder, seed, events, gap_s
        self.unreachable_s = unreachable_s
        self.users = users
        self.began = time.monotonic()
        self.wrong: list[str] = []
        self.report: dict[str, Any] = {"seed": seed}

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def run(self) -> dict[str, Any]:
        log = self.folder / "log.jsonl"
        write(replace(preset("tiny"), users=self.users, hours=24.0, seed=self.seed), log)
        times = [e.ts for e in open_log(log) if isinstance(e, Impression)]
        self.impressions, self.span_ms = len(times), times[-1] - times[0]
        self.say(f"seed {self.seed}: {self.impressions} impressions, {len(self.events)} events of chaos")
        broker = JavaKafka(self.folder / "kafka", tied=True)
        broker.start()
        try:
            plain = KafkaSettings(bootstrap=broker.bootstrap)
            reference = self._without_faults(replace(plain, prefix="calm."), log)
            self._with_faults(replace(plain, prefix="chaos."), log, broker, *reference)
        finally:
            broker.kill()
        self.report["seconds"] = round(time.monotonic() - self.began, 1)
        self.report["wrong"] = self.wrong
        return self.report

    def _without_faults(self, kafka: KafkaSettings, log: Path) -> tuple[int, int]:
        """FM calls (committed, computed) when nothing goes wrong."""
        admin.create(kafka)
        # On a busy machine a process may be silent for longer than the short session timeout of the chaos run.
        with Roles(kafka, self.folder / "calm", BUNDLE, [*SETS, "loop.session_timeout_ms=60000"]) as roles:
            roles.start_all()
            roles.wait_ready(600)
            replay(EventLog(log), kafka, "max")
            roles.wait_ranked(self.impressions, 600)
            roles.settle(600)
            time.sleep(1.2)  # the last word on `stats`
            roles.stop()
        calls, computed = checks.pairs_embedded(read_all(kafka, "embeddings")), checks.pairs_computed(kafka)
        self.say(f"without faults: {calls} FM calls")
        return calls, computed

    def _with_faults(self, kafka: KafkaSettings, log: Path, broker: JavaKafka, calls: int, computed: int) -> None:
        admin.create(kafka)
        rng = random.Random(self.seed)
        roles = Roles(kafka, self.folder / "chaos", BUNDLE, SETS)
        fleet = Fleet(roles, self.say)
        actions = Actions(fleet, broker, rng, self.say, self.unreachable_s)
        watch = Watch(kafka)
        feeder = Feeder(log, kafka, self.say)
        codes: dict[str, int] = {}
        try:
            for role in ("verifier", "embedder", "ranker"):
                fleet.add(role, role)
            roles.wait_ready(600)
            # Slow enough that the log outlasts the events; what is left then is replayed at once.
            expected_s = sum(self.gap_s + _expected_s(e, self.unreachable_s) for e in self.events)
            feeder.start(self.span_ms / 1000 / (1.4 * expected_s))
            self._events(actions, watch, feeder)
            if not feeder.finish(600) or feeder.error is not None:
                self.wrong.append(f"the replay did not end: {feeder.error}")
            self._wait_answers(watch, roles)
            self._check("without_owner", checks.unowned(kafka, 120.0))
            codes = fleet.close()
        finally:
            watch.close()
            fleet.close()
            roles.stop()
        self.report["kills"] = actions.kills
        self.report["resumed_replays"] = feeder.resumed
        self.report["ended_by_itself"] = [f"{n}: code {c}: {t}" for n, c, t in fleet.exits]
        self._check("unclean_stops", [f"{n}: code {c}" for n, c in codes.items() if c != 0])
        self._check("unknown_ends", [f"{n}: code {c}: {t}" for n, c, t in fleet.exits if c not in KNOWN_ENDS])
        self._judge(kafka, calls, computed)

    def _events(self, actions: Actions, watch: Watch, feeder: Feeder) -> None:
        lines = []
        started = []
        for e in self.events:
            time.sleep(self.gap_s * actions.rng.uniform(0.3, 1.7))
            at = time.monotonic()
            before = actions.kills
            self.say(f"{e.what} {e.where} {e.detail}")
            actions.do(e)
            started.append(at)
            lines.append(
                {"t_s": round(at - self.began, 1), "what": e.what, "where": e.where, "detail": e.detail,
                 "kills": actions.kills - before, "took_s": round(time.monotonic() - at, 1)}
            )  # fmt: skip
        time.sleep(self.gap_s)
        if not feeder.going:
            self.say("the log ended before the events did: the last of them met no traffic")
        ends = [*started[1:], time.monotonic()]
        for line, at, end in zip(lines, started, ends, strict=True):
            line["pause_ms"] = round(watch.longest_gap_ms(at, end))
        pauses = sorted(line["pause_ms"] for line in lines)
        self.report["events"] = lines
        self.report["pauses_ms"] = {"p50": pauses[len(pauses) // 2], "max": pauses[-1]}
        limit = PAUSE_LIMIT_MS + 1000 * self.unreachable_s
        if pauses[-1] > limit:
            self.wrong.append(f"a pause of {pauses[-1]} ms on ranked-ads; the bound is {limit:.0f} ms")

    def _wait_answers(self, watch: Watch, roles: Roles) -> None:
        """Until all is answered, or nothing comes any more (what is missing shows in the audit)."""
        while watch.count < self.impressions:
            last = watch.arrivals[-1] if watch.arrivals else self.began
            if time.monotonic() - last > ANSWER_WAIT_S:
                self.wrong.append(f"{watch.count} of {self.impressions} answers, and none for {ANSWER_WAIT_S:g} s")
                self.say(roles.logs())
                return
            time.sleep(0.2)
        deadline = time.monotonic() + ANSWER_WAIT_S
        while time.monotonic() < deadline:
            try:
                # Each candidates event becomes one request, and each request one state at least.
                if len(read_all(roles.kafka, "precompute")) >= len(read_all(roles.kafka, "candidates")):
                    roles.settle(300)
                    return
            except AssertionError as e:  # a role ended meanwhile: the fleet starts it again
                self.say(str(e).splitlines()[0])
            time.sleep(1.0)
        self.wrong.append("the verifier did not come to the end of the candidates")

    def _judge(self, kafka: KafkaSettings, calls: int, computed: int) -> None:
        r = self.report
        found = audit(kafka)
        r["impressions"], r["ranked"], r["lost"] = found.impressions, found.ranked, found.lost
        r["duplicated"], r["invented"], r["unfounded"] = found.duplicated, found.invented, found.unfounded
        if not found.clean or found.impressions != self.impressions or found.rejected:
            self.wrong.append(f"audit: {found.as_dict()}")
        changelog = read_all(kafka, "embeddings")
        between = checks.repeated_or_lost(read_all(kafka, "candidates"), read_all(kafka, "precompute"), changelog)
        r["between_roles"] = between
        self.wrong += [f"{name}: {n}" for name, n in between.items() if n]
        info = open_runtime(BUNDLE).info
        dims = StoreDims(info.dim, info.state_dim, info.profile_dim)
        scratch = self.folder / "rebuilt"
        different = checks.differences(self.folder / "chaos" / "state", changelog, StoreSettings(), dims, scratch)
        r["store_differences"] = len(different)
        self.wrong += different[:10]
        r["fm_calls_ratio"] = round(checks.pairs_embedded(changelog) / calls, 4)
        r["fm_computed_ratio"] = round(checks.pairs_computed(kafka) / max(1, computed), 4)
        if not FM_CALLS_RATIO[0] <= r["fm_calls_ratio"] <= FM_CALLS_RATIO[1]:
            self.wrong.append(f"FM calls committed: {r['fm_calls_ratio']} of a calm run's, bounds {FM_CALLS_RATIO}")
        if r["fm_computed_ratio"] > FM_COMPUTED_RATIO:
            self.wrong.append(f"FM calls computed: {r['fm_computed_ratio']} of a calm run's, bound {FM_COMPUTED_RATIO}")

    def _check(self, name: str, found: list[str]) -> None:
        self.report[name] = found
        if found:
            self.wrong.append(f"{name}: {found}")


def _expected_s(e: Event, unreachable_s: float) -> float:
    """Roughly, on two cores."""
    return {
        "kill_broker": 8.0, "kill_all": 8.0, "point": 9.0, "zombie": 26.0, "freeze_alone": 10.0, "swap": 18.0,
        "broker_restart": 8.0, "broker_slow": 10.0, "broker_frozen": unreachable_s,
    }.get(e.what, 0.5)  # fmt: skip
