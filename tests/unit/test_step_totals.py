"""What is said to be counted is among the counters of the steps, and none of it is lost with a model or a partition."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.catalogue import Catalogue
from models.runtime import open_runtime
from streams.roles import BaseStep, PairLane, RankerStep, StateLane, VerifierStep
from streams.settings import DEMO_BUNDLE, Settings, load
from streams.step import Record
from topics.events import Features, Impression, Item, encode

T0 = 1_700_000_000_000


def settings(folder: Path) -> Settings:
    return load(sets=[f"store.dir={folder}"], environment={})


@pytest.mark.parametrize("kind", [VerifierStep, StateLane, PairLane, RankerStep])
def test_what_could_not_be_used_as_it_was(kind: type[BaseStep], tmp_path: Path) -> None:
    step = kind(open_runtime(DEMO_BUNDLE), settings(tmp_path))
    assert {"non_finite", "mistyped", "items_evicted"}.isdisjoint(step.totals())
    step.catalogue = step.encoder.catalogue = Catalogue(step.runtime.info.spec, capacity=8)
    keys = [f"N{k}".encode() for k in range(9)]
    step.items(keys, [encode(Item(f"N{k}", T0, {"price": 1.0})) for k in range(9)])
    features: Features = {"history": ["N1"], "history_ts": ["yesterday"]}
    step.encoder.impressions([Impression("i", "u", T0, ["N1"], features=features)])
    step.runtime.non_finite += 3
    first = step.totals()
    assert {k: first[k] for k in ("non_finite", "mistyped", "items_evicted")} == {
        "non_finite": 3, "mistyped": 1, "items_evicted": 2,
    }  # fmt: skip
    fresh = open_runtime(DEMO_BUNDLE)
    step.next_runtime = lambda: fresh
    step.idle()
    fresh.non_finite += 1
    assert step.totals()["non_finite"] == 4


def test_builds_of_the_index_of_similar_users_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("state.neighbours.collect", fails)
    step = RankerStep(open_runtime(DEMO_BUNDLE), settings(tmp_path))
    step.open(0, None, {"embeddings": (0, 0)})
    try:
        step.restored(0)
        event = encode(Impression("i", "u", T0, ["N1"]))
        step.run([Record("impressions", 0, k, b"u", event, T0) for k in range(20)])  # so that its clock stands
        step.idle()
        (neighbours,) = step._neighbours.values()
        assert neighbours.wait(120)
        assert (step.totals()["neighbour_builds"], step.totals()["neighbour_failures"]) == (1, 1)
    finally:
        step.close(0)
    assert step.totals()["neighbour_failures"] == 1
