"""The short form of `overload.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from overload import grown_mb, overload

from topics.kafka import KafkaSettings

SECONDS = 15.0


@pytest.mark.broker
@pytest.mark.java
def test_candidates_at_ten_times_what_the_embedder_can_do(kafka: KafkaSettings, tmp_path: Path) -> None:
    report = overload(kafka, tmp_path, SECONDS)
    print({k: v for k, v in report.items() if k != "memory_samples"})
    # Memory of so short a burst is of caches that fill: the long form looks at it.
    assert [w for w in report["wrong"] if "memory grew" not in w] == []
    assert all(last - middle < 300 for middle, last in grown_mb(report["memory_samples"]).values())


def test_growth_is_seen() -> None:
    flat = [{"ranker": 100.0 + k % 2} for k in range(30)]
    assert grown_mb(flat)["ranker"] == (100.5, 100.5)
    middle, last = grown_mb([{"ranker": 100.0 + 3 * k} for k in range(30)])["ranker"]
    assert last - middle == 30
