"""The main job on a real broker: every impression ranked exactly once, also when every role is killed in mid-stream."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from feeder import Feeder
from pipeline import ROOT, Roles

from models.runtime import open_runtime
from state.api import StoreDims, StoreSettings
from streams.audit import audit, read_all, store_differences
from streams.backtest import BacktestConfig, backtest
from streams.settings import load
from topics import admin
from topics.events import Candidates, Impression, Item, decode_ranked_ads
from topics.kafka import KafkaSettings
from topics.readers import EventLog, open_log
from topics.replay import replay
from topics.simulator import preset, write

pytestmark = pytest.mark.broker
BUNDLE = load().model.bundle
ALL_PAIRS = ("verifier.top_k=10000", "verifier.per_user_cap=1000000")


def mind_day() -> Path | None:
    for folder in (os.environ.get("SOLARIS_DATA"), ROOT.parent / "shared" / "data"):
        if folder and (path := Path(folder) / "mind_20191114" / "behaviors.tsv").exists():
            return path
    return None


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "tiny.jsonl"
    write(preset("tiny"), path)
    return path


def dims() -> StoreDims:
    info = open_runtime(BUNDLE).info
    return StoreDims(info.dim, info.state_dim, info.profile_dim)


def counted(log: Path) -> tuple[int, int]:
    """(impressions, span in ms) of a log."""
    n, first, last = 0, None, 0
    for e in open_log(log):
        n += isinstance(e, Impression)
        if not isinstance(e, Item):
            first = e.ts if first is None else first
            last = e.ts
    return n, last - (first or 0)


def test_every_impression_once_although_each_role_is_killed(
    kafka: KafkaSettings, tmp_path: Path, simulated: Path
) -> None:
    log = mind_day() or simulated
    impressions, span_ms = counted(log)
    admin.create(kafka)
    with Roles(kafka, tmp_path / "roles", BUNDLE) as roles:
        roles.start_all()
        roles.wait_ready()
        feeder = Feeder(log, kafka)
        feeder.start(span_ms / 400_000)  # longer than the kills take; the rest comes at once
        killed = 0
        for role in ("ranker", "embedder", "verifier"):
            roles.wait_ranked(len(read_all(kafka, "ranked-ads")) + 5)
            time.sleep(1)
            roles.kill(role)
            killed += 1
            roles.start(role)
        assert feeder.going, "every kill was to come in mid-stream"
        assert feeder.finish(300)
        assert feeder.error is None
        roles.wait_ranked(impressions)
        roles.settle()
        codes = roles.stop()
    found = audit(kafka)
    assert found.clean, (found, roles.logs())
    assert (found.impressions, found.ranked, found.rejected) == (impressions, impressions, 0)
    assert codes == {"verifier": 0, "embedder": 0, "ranker": 0}
    assert killed == 3
    changelog = read_all(kafka, "embeddings")
    assert changelog
    for role in ("embedder", "ranker"):
        for p in range(kafka.partitions):
            folder = tmp_path / "roles" / "state" / role / str(p)
            scratch = tmp_path / "rebuilt" / role / str(p)
            assert store_differences(folder, changelog, p, StoreSettings(), dims(), scratch) == []


def test_live_and_backtest_give_the_same_ranked_ads(kafka: KafkaSettings, tmp_path: Path, simulated: Path) -> None:
    """When embeddings arrive before their impressions: candidates first, impressions once the embedder is done. Similar
    users are left out: their index is built anew at its own times, by the clock here and by event time there."""
    admin.create(kafka)
    events = list(open_log(simulated))
    offered = sum(isinstance(e, Candidates) for e in events)
    impressions = sum(isinstance(e, Impression) for e in events)
    with Roles(kafka, tmp_path / "roles", BUNDLE, (*ALL_PAIRS, "ranker.neighbours=0")) as roles:
        roles.start_all()
        replay(EventLog(simulated), kafka, "max", topics=("items", "candidates"))
        roles.settle()
        assert len(read_all(kafka, "precompute")) == offered
        roles.wait_applied(len(read_all(kafka, "embeddings")))
        replay(EventLog(simulated), kafka, "max", topics=("impressions",))
        roles.wait_ranked(impressions)
    assert audit(kafka).clean
    live = {a.id: a for a in (decode_ranked_ads(r.value or b"") for r in read_all(kafka, "ranked-ads"))}
    items_first = sorted(events, key=lambda e: not isinstance(e, Item))
    config = BacktestConfig(with_fm=False, neighbours=0)
    want = backtest(items_first, open_runtime(BUNDLE), config, keep_answers=True).answers
    assert want is not None
    assert len(want) == len(live) == impressions
    assert {s for a in want for s in a.sources} >= {"direct", "none"}, "the log exercises slots"
    for a in want:
        b = live[a.id]
        mine = sorted(zip(a.positions, a.ads, a.sources, a.ages_ms, strict=True))
        theirs = sorted(zip(b.positions, b.ads, b.sources, b.ages_ms, strict=True))
        assert mine == theirs, a.id
        by_position = dict(zip(b.positions, b.scores, strict=True))
        assert [by_position[p] for p in a.positions] == pytest.approx(a.scores, abs=2e-6)
