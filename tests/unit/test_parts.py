"""The embedder's steps: one FM call of the size that was set, nothing lost and nothing reordered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.runtime import open_runtime
from streams.roles import PairLane
from streams.settings import DEMO_BUNDLE, Embedder, Settings, Store
from streams.step import Record
from topics.packed import PrecomputeRequest, encode_precompute, request_pairs


def request(n: int) -> bytes:
    none = np.zeros(0, np.float32)
    return encode_precompute(
        PrecomputeRequest(
            1, 1_700_000_000_000, 2, np.arange(1, n + 1, dtype=np.uint64), np.zeros(n, np.float32),
            np.zeros((0, n), np.float32), np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.uint8),
            none, none, "e",
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> PairLane:
    settings = replace(
        Settings(), store=Store(dir=tmp_path_factory.mktemp("state")), embedder=Embedder(batch_pairs=100)
    )
    return PairLane(open_runtime(Path(DEMO_BUNDLE)), settings)


def record(k: int, value: bytes | None) -> Record:
    return Record("precompute", 0, k, b"u", value, 0)


def test_pairs_are_read_from_the_header() -> None:
    assert request_pairs(request(37)) == 37
    for other in (None, b"", b"SLRP", b"SLRE" + bytes(60), b"{" * 100):
        assert request_pairs(other) == 0


def test_parts_hold_one_call_each(lane: PairLane) -> None:
    sizes = [30, 40, 30, 1, 99, 250, 10, 0, 90, 5]
    records = [record(k, request(n)) for k, n in enumerate(sizes)]
    parts = lane.parts(records)
    assert [r.offset for part in parts for r in part] == list(range(len(sizes)))
    counted = [[sizes[r.offset] for r in part] for part in parts]
    assert counted == [[30, 40, 30], [1, 99], [250], [10, 0, 90], [5]]


def test_what_is_no_request_rides_along(lane: PairLane) -> None:
    records = [record(0, b"junk"), record(1, request(100)), record(2, None), record(3, request(100))]
    assert [[r.offset for r in part] for part in lane.parts(records)] == [[0, 1, 2], [3]]
