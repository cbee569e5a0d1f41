from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from state.api import ChangelogRecord, StoreSettings
from state.cli import state_app
from state.count_store import parse_counts
from state.store import open_store
from topics.ids import hash_id
from topics.packed import EmbeddingChunk, encode_embedding
from topics.packed_counts import CountChunk, encode_count

T0 = 1_573_700_000_000
HOUR = 3_600_000


def fill(path: Path) -> None:
    store = open_store(path, StoreSettings(cache_bytes=1 << 20))

    def chunk(offset: int, user: str, ts: int, items: list[int], value: float) -> ChangelogRecord:
        n = len(items)
        return ChangelogRecord(
            offset,
            encode_embedding(
                EmbeddingChunk(
                    hash_id(user), ts, 0xABC, 1, np.array(items, np.uint64), np.zeros(n, np.uint32),
                    np.full((n, 4), value, np.float16), None, np.ones(2, np.float16), np.ones(2, np.float16), "e",
                )
            ),
        )  # fmt: skip

    store.apply(
        [chunk(0, "u1", T0, [1, 2], 1.0), chunk(1, "u1", T0 + 7 * HOUR, [2], 3.0), chunk(2, "u2", T0, [5], 1.0)]
    )
    store.expire(T0 + 7 * HOUR)
    store.close()


def test_a_store_in_numbers(tmp_path: Path) -> None:
    fill(tmp_path / "p2")
    fill(tmp_path / "p10")
    result = CliRunner().invoke(state_app, ["inspect", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.output)["partitions"]
    assert (Path(first["path"]).name, Path(second["path"]).name) == ("p2", "p10")
    assert (first["position"], first["clock_ms"]) == (3, T0 + 7 * HOUR)
    assert (first["users"], first["chunks"], first["live_pairs"], first["expired_pairs"]) == (2, 3, 1, 3)
    assert first["models"] == {"0000000000000abc": 3}
    assert sum(g["chunks"] for g in first["segments"]) == 3
    text = CliRunner().invoke(state_app, ["inspect", str(tmp_path / "p2")]).output
    assert "2 users, 3 chunks, 1 live and 3 expired pairs" in text


def test_a_user_pair_by_pair(tmp_path: Path) -> None:
    fill(tmp_path)
    result = CliRunner().invoke(state_app, ["inspect", str(tmp_path), "--user", "u1", "--json"])
    (found,) = json.loads(result.output)["partitions"]
    assert [(p["item"][-1], p["age_ms"] // HOUR, p["live"], p["newest"]) for p in found["pairs"]] == [
        ("2", 0, True, True), ("1", 7, False, True), ("2", 7, False, False),
    ]  # fmt: skip
    # Mean of item 1 (ones) and item 2's newest (threes): twos.
    assert (found["aggregate_pairs"], found["aggregate_norm"]) == (2, 4.0)
    text = CliRunner().invoke(state_app, ["inspect", str(tmp_path), "--user", "u1"]).output
    assert "aggregate of 2 pairs with norm 4.0000" in text
    assert "replaced" in text
    assert "0 chunks" in CliRunner().invoke(state_app, ["inspect", str(tmp_path), "--user", "nobody"]).output


def test_not_a_store(tmp_path: Path) -> None:
    result = CliRunner().invoke(state_app, ["inspect", str(tmp_path)])
    assert result.exit_code != 0
    assert "holds none" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_store_of_counts(tmp_path: Path) -> None:
    fill(tmp_path / "ranker" / "0")
    store = open_store(tmp_path / "ranker-counts" / "0", StoreSettings(cache_bytes=1 << 20), parse_counts)
    items = np.array([5, 5, 6], np.uint64)
    store.apply([ChangelogRecord(4, encode_count(CountChunk(hash_id("u1"), T0 + HOUR, False, items)))])
    store.expire(T0 + 20 * HOUR)
    store.close()
    result = CliRunner().invoke(state_app, ["inspect", str(tmp_path), "--json"])
    (counts,) = (p for p in json.loads(result.output)["partitions"] if "ranker-counts" in p["path"])
    assert (counts["users"], counts["chunks"], counts["live_pairs"]) == (1, 1, 3)
    assert counts["models"] == {"none (counts)": 1}
    result = CliRunner().invoke(state_app, ["inspect", str(tmp_path), "--user", "u1", "--json"])
    (found,) = json.loads(result.output)["partitions"]
    assert found["path"].endswith("ranker/0"), "only the store that has vectors of the user"
