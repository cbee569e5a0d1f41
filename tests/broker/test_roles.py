"""Each role alone on its topics, and two processes of each role with a join and a leave in mid-stream."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from feeder import Feeder
from pipeline import Roles

from models.catalogue import Catalogue
from models.features import Encoder
from models.runtime import open_runtime
from streams.audit import audit, read_all
from streams.gate import GateSettings
from streams.settings import load
from streams.verifier import Verifier
from topics import admin
from topics.events import Candidates, Impression, decode_ranked_ads
from topics.kafka import KafkaSettings, producer
from topics.packed import decode_embedding, decode_precompute, encode_precompute
from topics.readers import EventLog, open_log
from topics.replay import replay
from topics.simulator import preset, write

pytestmark = pytest.mark.broker
BUNDLE = load().model.bundle
ALL_PAIRS = ("verifier.top_k=10000", "verifier.per_user_cap=1000000")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "tiny.jsonl"
    write(preset("tiny"), path)
    return path


def test_verifier_alone(kafka: KafkaSettings, tmp_path: Path, log: Path) -> None:
    offered = {e.id: len(e.items) for e in open_log(log) if isinstance(e, Candidates)}
    admin.create(kafka)
    replay(EventLog(log), kafka, "max", topics=("items", "candidates"))
    with Roles(kafka, tmp_path / "roles", BUNDLE, [*ALL_PAIRS, "verifier.backlog_high_pairs=1000000000"]) as roles:
        roles.start("verifier")
        roles.wait_records("precompute", len(offered))
        assert roles.stop() == {"verifier": 0}, roles.logs()
    requests = [decode_precompute(r.value) for r in read_all(kafka, "precompute")]
    assert {q.event_id: len(q.items) for q in requests} == offered
    assert len(requests) == len(offered)


def test_embedder_alone(kafka: KafkaSettings, tmp_path: Path, log: Path) -> None:
    runtime = open_runtime(BUNDLE)
    catalogue = Catalogue(runtime.info.spec)
    verifier = Verifier(runtime, Encoder(runtime.info.spec, catalogue), GateSettings())
    events = [e for e in open_log(log) if isinstance(e, Candidates)][:40]
    requests = verifier.process(events, [0] * len(events))
    admin.create(kafka)
    client = producer(kafka)
    for event, request in zip(events, requests, strict=True):
        client.produce(kafka.topic("precompute"), encode_precompute(request), event.user.encode())
    client.produce(kafka.topic("precompute"), b"not a request", b"somebody")
    client.flush()
    with Roles(kafka, tmp_path / "roles", BUNDLE) as roles:
        roles.start("embedder")
        roles.settle()
        assert roles.stop() == {"embedder": 0}, roles.logs()
    chunks = [decode_embedding(r.value) for r in read_all(kafka, "embeddings")]
    assert sorted(c.event_id for c in chunks if len(c.state)) == sorted(e.id for e in events)
    embedded = {(c.user, item) for c in chunks for item in c.items.tolist()}
    assert embedded == {(q.user, item) for q in requests for item in q.items.tolist()}
    assert len(read_all(kafka, "dlq")) == 1, "one dead letter though two lanes saw the record"


def test_ranker_alone_serves_without_any_embedding(kafka: KafkaSettings, tmp_path: Path, log: Path) -> None:
    impressions = sum(isinstance(e, Impression) for e in open_log(log))
    admin.create(kafka)
    replay(EventLog(log), kafka, "max", topics=("items", "impressions"))
    with Roles(kafka, tmp_path / "roles", BUNDLE) as roles:
        roles.start("ranker")
        roles.wait_ranked(impressions)
        assert roles.stop() == {"ranker": 0}, roles.logs()
    assert audit(kafka).clean
    assert {s for r in read_all(kafka, "ranked-ads") for s in decode_ranked_ads(r.value or b"").sources} == {"none"}


def test_second_processes_join_and_the_first_ones_leave(kafka: KafkaSettings, tmp_path: Path, log: Path) -> None:
    events = [e for e in open_log(log) if isinstance(e, Impression | Candidates)]
    impressions = sum(isinstance(e, Impression) for e in events)
    span_s = (events[-1].ts - events[0].ts) / 1000
    admin.create(kafka)
    with Roles(kafka, tmp_path / "roles", BUNDLE) as roles:
        roles.start_all()
        roles.wait_ready()
        feeder = Feeder(log, kafka)
        feeder.start(span_s / 400)  # longer than the joins take; the rest comes at once
        roles.wait_ranked(1)
        for role in ("verifier", "embedder", "ranker"):
            roles.start(role, f"{role}-second")
        roles.wait_ready()
        time.sleep(2)
        codes = roles.stop(["verifier", "embedder", "ranker"])
        assert feeder.going, "the leave was to come in mid-stream"
        assert feeder.finish(300)
        assert feeder.error is None
        roles.wait_ranked(impressions)
        roles.settle()
        codes |= roles.stop()
    assert set(codes.values()) == {0}, (codes, roles.logs())
    assert len(codes) == 6
    found = audit(kafka)
    assert found.clean, (found, roles.logs())
    assert found.ranked == impressions
    assert len(read_all(kafka, "precompute")) == sum(isinstance(e, Candidates) for e in events)
