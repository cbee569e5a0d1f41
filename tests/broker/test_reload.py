"""A bundle replaced under running roles: bad ones are refused, a good one is taken; vectors of two FMs never meet."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from pipeline import Roles

from models.bundle import read_bundle
from streams.audit import audit, read_all
from streams.monitor.processes import Processes
from streams.settings import load
from topics import admin
from topics.events import Impression, decode_ranked_ads
from topics.ids import hash_id
from topics.kafka import KafkaSettings
from topics.packed import decode_embedding
from topics.readers import EventLog, open_log
from topics.replay import replay
from topics.simulator import preset, write

pytestmark = pytest.mark.broker


def replace(bundle: Path, change) -> None:
    """Writes a changed manifest in the place of the old one at once, as a deployment does."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    aside = bundle.with_name("manifest.new")
    aside.write_text(json.dumps(manifest))
    os.replace(aside, bundle / "manifest.json")


def counters(kafka: KafkaSettings, name: str) -> dict[str, int]:
    """Role -> newest value of a counter."""
    out: dict[str, int] = {}
    for r in read_all(kafka, "stats"):
        said = json.loads(r.value or b"{}")
        out[said["role"]] = said["counters"].get(name, 0)
    return out


def wait_counter(roles: Roles, name: str, at_least: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        found = counters(roles.kafka, name)
        if len(found) == 3 and min(found.values()) >= at_least:
            return
        time.sleep(0.5)
    raise AssertionError(f"{name}: {found}\n{roles.logs()}")


def wait_started_again(roles: Roles) -> None:
    """Until every role has been ready twice, under the same pid."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        starts: dict[tuple[str, int], set[int]] = {}
        for r in read_all(roles.kafka, "stats"):
            said = json.loads(r.value or b"{}")
            if said["ready"]:
                starts.setdefault((said["role"], said["pid"]), set()).add(said["started_ms"])
        if [len(s) for s in starts.values()] == [2, 2, 2]:
            return
        time.sleep(0.5)
    raise AssertionError(f"{starts}\n{roles.logs()}")


def test_a_bad_bundle_is_refused_and_a_good_one_taken_while_roles_run(kafka: KafkaSettings, tmp_path: Path) -> None:
    log = tmp_path / "tiny.jsonl"
    write(preset("tiny"), log)
    impressions = sum(isinstance(e, Impression) for e in open_log(log))
    bundle = Path(shutil.copytree(load().model.bundle, tmp_path / "bundle"))
    old = read_bundle(bundle).info
    admin.create(kafka)
    with Roles(kafka, tmp_path / "roles", bundle, ["model.reload_s=0.3"]) as roles:
        roles.start_all()
        roles.wait_ready()
        replay(EventLog(log), kafka, "max", topics=("items", "candidates"))
        roles.settle()
        replay(EventLog(log), kafka, "max", topics=("impressions",))
        roles.wait_ranked(impressions)
        roles.settle()
        good = (bundle / "manifest.json").read_text()
        (bundle / "manifest.json").write_text(good[: len(good) // 2])
        wait_counter(roles, "bundles_refused", 1)
        (bundle / "manifest.json").write_text(good)
        replace(bundle, lambda m: m["fm"].update(version="2"))
        wait_counter(roles, "bundles_accepted", 1)
        new = read_bundle(bundle).info
        chunks_before = len(read_all(kafka, "embeddings"))
        other = tmp_path / "again.jsonl"
        write(preset("tiny").with_(seed=1), other)
        more = sum(isinstance(e, Impression) for e in open_log(other))
        replay(EventLog(other), kafka, "max", topics=("items", "candidates"))
        roles.settle()
        replay(EventLog(other), kafka, "max", topics=("impressions",))
        roles.wait_ranked(impressions + more)
        roles.settle()
        replace(bundle, lambda m: m.update(count_lag_ms=1_000))  # not swapped in: the loops start again, in place
        wait_started_again(roles)
        assert set(roles.stop().values()) == {0}, roles.logs()
    said = Processes(3_600_000)
    for r in read_all(kafka, "stats"):
        said.stats(r.timestamp_ms, r.value)
    assert said.done("ranker", 0, 1 << 62)["impressions"] == impressions + more, "counters began at zero again"
    assert len(said.latest()) == 3
    assert old.fm_hash != new.fm_hash
    assert audit(kafka).clean
    chunks = [decode_embedding(r.value) for r in sorted(read_all(kafka, "embeddings"), key=lambda r: r.timestamp_ms)]
    assert {c.model for c in chunks[:chunks_before]} == {old.fm_hash}
    assert {c.model for c in chunks[chunks_before:]} == {new.fm_hash}
    by_model: dict[int, set[tuple[int, int, int]]] = {old.fm_hash: set(), new.fm_hash: set()}
    for c in chunks:
        by_model[c.model].update((c.user, item, c.ts_ms) for item in c.items.tolist())
    hits = {old.fm: 0, new.fm: 0}
    for r in read_all(kafka, "ranked-ads"):
        a = decode_ranked_ads(r.value or b"")
        of_model = by_model[new.fm_hash if a.fm == new.fm else old.fm_hash]
        for ad, source, age in zip(a.ads, a.sources, a.ages_ms, strict=True):
            if source == "direct":
                assert (hash_id(a.user), hash_id(ad), a.ts - (age or 0)) in of_model
                hits[a.fm] += 1
    assert min(hits.values()) > 0
