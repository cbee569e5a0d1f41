"""Records of `items` as the roles take them: keys are checked, a deleted item is as one never seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.runtime import open_runtime
from streams.decoding import catalogue_change
from streams.roles import RankerStep
from streams.settings import DEMO_BUNDLE, load
from streams.step import Record
from topics.errors import InvalidEvent
from topics.events import Impression, Item, RankedAds, decode_ranked_ads, encode

T0 = 1_700_000_000_000
FEATURES = {"category": "t9", "sub_category": "s99", "price": 1e4}


def item(n: int | str) -> bytes:
    return encode(Item(n, T0, dict(FEATURES)))


def answer(step: RankerStep) -> RankedAds:
    event = Impression("i", "u", T0, [f"N{k}" for k in range(8)], features={"history": ["N1", "N2"]})
    (output,) = step.run([Record("impressions", 0, 0, b"u", encode(event), T0)]).outputs
    return decode_ranked_ads(output.value)


def test_rankers_agree_whether_they_saw_a_deleted_item_or_not(tmp_path: Path) -> None:
    def step(name: str) -> RankerStep:
        settings = load(sets=[f"store.dir={tmp_path / name}"], environment={})
        made = RankerStep(open_runtime(DEMO_BUNDLE), settings, clock=lambda: T0 / 1000)
        made.open(0, None, {"embeddings": (0, 0)})
        return made

    up_long, restarted = step("a"), step("b")
    try:
        up_long.items([b"N1", b"N2", b"N3"], [item("N1"), item("N2"), item("N3")])
        with_all = answer(up_long)
        up_long.items([b"N2", b"N4", b"N3", b"N3"], [None, None, None, item("N3")])
        restarted.items([b"N1", b"N2", b"N3"], [item("N1"), None, item("N3")])  # as compaction leaves them
        assert answer(up_long) == answer(restarted) != with_all
        assert (up_long.totals()["items"], up_long.totals()["items_deleted"]) == (4, 3)
    finally:
        up_long.close(0)
        restarted.close(0)


def test_a_record_under_another_key_is_rejected_and_changes_nothing(tmp_path: Path) -> None:
    step = RankerStep(open_runtime(DEMO_BUNDLE), load(sets=[f"store.dir={tmp_path}"], environment={}))
    step.items(
        [b"N1", b"N2", None, b"", b"N3", None, b"7"], [item("N1"), item("N1"), item("N4"), None, b"", None, item(7)]
    )
    assert step.totals() == {"items": 2, "items_rejected": 5}
    assert len(step.catalogue) == 2


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (b"N2", item("N1"), "key_mismatch"),
        (None, item("N1"), "missing_key"),
        (b"", item("N1"), "missing_key"),
        (None, None, "missing_key"),
        (b"N1", b"", "empty"),
        (b"N1", b"{", "not_json"),
    ],
)
def test_why(key: bytes | None, value: bytes | None, reason: str) -> None:
    with pytest.raises(InvalidEvent) as e:
        catalogue_change(key, value)
    assert e.value.reason == reason
