"""The benchmark's peers: what their stores say is what ours says, and the comparison of answers can fail."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the benchmarks are no package of the application

from benchmarks.harness import oddities
from benchmarks.harness.bundle import EMBEDDING, PROFILE
from benchmarks.harness.cluster import NotMeasured
from benchmarks.harness.equal import SCORE, same_ranked, same_requests
from benchmarks.harness.events import Workload
from benchmarks.harness.page import FOOT
from benchmarks.peers import kstreams_env
from benchmarks.peers.chunk_list import OneUser, add, chunks
from state.api import ChangelogRecord, Lookup, StoreDims, StoreSettings
from state.reference import ReferenceStore
from topics.events import decode_impression
from topics.ids import hash_id
from topics.packed import decode_embedding, decode_precompute, encode_precompute

ROOT = Path(__file__).parents[2]
NOW = 1_700_000_000_000
MODEL = 9
DIMS = StoreDims(EMBEDDING, 6 * 64 + 4 * 32, PROFILE)


def test_a_users_chunks_give_what_the_reference_store_gives() -> None:
    work, settings = Workload(1, now_ms=NOW), StoreSettings()
    reference = ReferenceStore(settings)
    values: dict[bytes, bytes] = {}
    for offset, r in enumerate(oddities.state(work, MODEL)):
        reference.apply([ChangelogRecord(offset, r.value)])
        values[r.key] = add(values.get(r.key, b""), r.value, settings)
    seen = {"ts_ms": 0, "topic_ts_ms": 0, "state_ts_ms": 0, "aggregate_ts_ms": 0}
    for r in oddities.impressions(work):
        event = decode_impression(r.value)
        items = np.array([hash_id(a) for a in event.ads], np.uint64)
        topics = np.array([1 + hash_id(f"c{k % 43}") % (1 << 20) for k in range(len(items))], np.uint32)
        asked = (
            np.array([hash_id(event.user)], np.uint64), np.array([0, len(items)], np.int64), items, topics,
            np.array([event.ts], np.int64), MODEL, DIMS,
        )  # fmt: skip
        mine = OneUser(values.get(r.key, b""), settings).lookup(*asked)
        other = reference.lookup(*asked)
        for name in Lookup.__dataclass_fields__:
            np.testing.assert_allclose(getattr(mine, name), getattr(other, name), atol=1e-5, err_msg=name)
        for name in seen:
            seen[name] += int((getattr(other, name) >= 0).sum())
    assert all(seen.values()), seen


def test_a_chunk_past_ttl_and_window_leaves_the_value() -> None:
    settings = StoreSettings(ttl_ms=1000, window_ms=5000)
    work = Workload(2, now_ms=NOW)
    first, second = oddities.state(work, MODEL)[:2]
    gap = decode_embedding(second.value).ts_ms - decode_embedding(first.value).ts_ms
    assert abs(gap) > 5000
    old, new = (first, second) if gap > 0 else (second, first)
    value = add(add(b"", old.value, settings), new.value, settings)
    assert [c.ts_ms for c in chunks(value)] == [decode_embedding(new.value).ts_ms]
    value = add(add(b"", new.value, settings), new.value, settings)
    assert len(chunks(value)) == 2


def _answer(**changes: object) -> bytes:
    answer: dict[str, object] = {
        "type": "ranked_ads", "id": "i", "user": "u", "ts": 5, "ads": ["a", "b", "c"], "positions": [0, 1, 2],
        "scores": [0.9, 0.5, 0.5 - SCORE / 4], "sources": ["direct", "state", "none"], "ages_ms": [1, 2, None],
        "vm": "v", "fm": "f", "state": "live", "received_ms": 1, "ranked_ms": 2,
    }  # fmt: skip
    return msgspec.json.encode(answer | changes)


IMPRESSION = msgspec.json.encode({"type": "impression", "id": "i", "user": "u", "ts": 5, "ads": ["a", "b", "c"]})


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, 1.0),
        ({"received_ms": 7, "ranked_ms": 8}, 1.0),
        ({"scores": [0.9, 0.5 + SCORE / 2, 0.5]}, 1.0),
        ({"scores": [0.9, 0.5 + 3 * SCORE, 0.5]}, 0.0),
        ({"sources": ["topic", "state", "none"]}, 0.0),
        ({"ages_ms": [1, 3, None]}, 0.0),
        ({"ads": ["a", "b", "d"]}, 0.0),
        ({"ads": ["a", "b"], "positions": [0, 1], "scores": [0.9, 0.5], "sources": ["direct", "state"],
          "ages_ms": [1, 2]}, 0.0),
        ({"fm": "g"}, 0.0),
        ({"id": "j"}, 0.0),
        ({"ads": ["a", "c", "b"], "positions": [0, 2, 1], "scores": [0.9, 0.5 - SCORE / 4, 0.5],
          "sources": ["direct", "none", "state"], "ages_ms": [1, None, 2]}, 1.0),
        ({"ads": ["b", "a", "c"], "positions": [1, 0, 2], "scores": [0.5, 0.9, 0.5 - SCORE / 4],
          "sources": ["state", "direct", "none"], "ages_ms": [2, 1, None]}, 0.0),
    ],
)  # fmt: skip
def test_ranked_ads_are_compared_pair_by_pair(changes: dict[str, object], same: float) -> None:
    assert same_ranked([IMPRESSION], [_answer()], [_answer(**changes)]) == same


def test_places_may_change_only_where_the_worth_is_the_same() -> None:
    bids = msgspec.json.encode(msgspec.json.decode(IMPRESSION) | {"bids": [1.0, 3.0, 1.0]})
    swapped = _answer(
        ads=["a", "c", "b"], positions=[0, 2, 1], scores=[0.9, 0.5 - SCORE / 4, 0.5],
        sources=["direct", "none", "state"], ages_ms=[1, None, 2],
    )  # fmt: skip
    assert same_ranked([bids], [_answer()], [swapped]) == 0.0


def test_requests_are_compared_pair_by_pair() -> None:
    ours = [r.value for r in Workload(3).requests(4, 10, 4)]
    other = decode_precompute(ours[0])
    other.items = other.items[::-1]
    moved = decode_precompute(ours[1])
    moved.scores = moved.scores + np.float32(0.01)
    theirs = [encode_precompute(other), encode_precompute(moved), ours[2]]
    assert same_requests(ours, ours) == 1.0
    assert same_requests(ours, theirs) == 0.25
    assert same_requests([], theirs) == 0.0


def test_a_machine_without_java_or_maven_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SOLARIS_BENCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NotMeasured, match="Java 17"):
        kstreams_env.kstreams_command()
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    java.chmod(0o755)
    with pytest.raises(NotMeasured, match="mvn"):
        kstreams_env.kstreams_command()
    kstreams_env.build_folder().mkdir(parents=True)
    assert kstreams_env.kstreams_command()[0] == str(java), "what was built before needs no Maven"


def test_kafka_streams_is_of_the_brokers_version() -> None:
    def kafka(pom: Path) -> str:
        found = re.search(r"<artifactId>(?:kafka_2\.13|kafka-streams)</artifactId>\s*<version>(.*?)<", pom.read_text())
        assert found is not None, pom
        return found.group(1)

    ours = kafka(kstreams_env.PROJECT / "pom.xml")
    assert ours == kafka(ROOT / "topics" / "brokers" / "kafka" / "pom.xml")
    assert f"Kafka Streams {ours}" in FOOT
