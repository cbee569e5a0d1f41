"""The neighbour index and the clustering table."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import hnswlib
import numpy as np
import pytest
from typer.testing import CliRunner

from state import clusters
from state.api import ChangelogRecord, StoreDims, StoreSettings
from state.cli import neighbours_app
from state.neighbours import MANIFEST, NeighbourIndex, Neighbours, NeighbourSettings, load
from state.profiles import Profiles, collect, newest_model, unit
from state.store import RocksStore, open_store
from topics.errors import StoreFormatError
from topics.packed import EmbeddingChunk, encode_embedding

T0 = 1_573_700_000_000
HOUR = 3_600_000
WINDOW = 24 * HOUR
MODEL = 5
DIMS = StoreDims(3, 2, 8)
SETTINGS = StoreSettings(cache_bytes=1 << 20)


def profiles(n: int, seed: int = 0) -> Profiles:
    rng = np.random.default_rng(seed)
    p, _ = unit(rng.standard_normal((n, 8)).astype(np.float32))
    return Profiles(
        np.arange(1, n + 1, dtype=np.uint64), p, rng.standard_normal((n, 3)).astype(np.float32),
        (T0 - rng.integers(0, 30 * HOUR, n)).astype(np.int64), 0,
    )  # fmt: skip


def ask(index: NeighbourIndex | clusters.ClusterTable, queries: np.ndarray, now: int = T0):  # type: ignore[no-untyped-def]
    return index.similar(queries.astype(np.float32), np.full(len(queries), now, np.int64))


def test_the_weighted_mean_of_live_neighbours_is_that_of_an_exact_search() -> None:
    data = profiles(400)
    index = NeighbourIndex(data, MODEL, WINDOW, NeighbourSettings(k=5, min_similarity=0.3, ef=400))
    queries = np.random.default_rng(1).standard_normal((50, 8))
    got = ask(index, queries)
    live = data.ts_ms + WINDOW > T0
    assert 0 < live.sum() < len(data)
    for q, query in enumerate(queries / np.linalg.norm(queries, axis=1, keepdims=True)):
        cosine = data.profiles @ query
        # As the index does: the best 2k, of which up to k live ones above the floor.
        best = [i for i in np.argsort(-cosine)[:10] if live[i] and cosine[i] >= 0.3][:5]
        assert got.count[q] == len(best)
        if best:
            want = np.average(data.aggregates[best], axis=0, weights=cosine[best])
            np.testing.assert_allclose(got.aggregate[q], want, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(got.similarity[q], cosine[best].mean(), rtol=1e-4)
            assert got.ts_ms[q] == data.ts_ms[best].max()
        else:
            assert (got.ts_ms[q], got.similarity[q]) == (-1, 0)


def test_below_the_floor_there_is_no_neighbour() -> None:
    data = profiles(1)
    data.ts_ms[:] = T0
    for floor, count in ((0.79, 1), (0.81, 0)):
        index = NeighbourIndex(data, MODEL, WINDOW, NeighbourSettings(min_similarity=floor))
        across = np.linalg.svd(data.profiles)[2][1]
        got = ask(index, (0.8 * data.profiles[0] + 0.6 * across)[None])
        assert got.count.tolist() == [count]
        assert got.aggregate.any() == bool(count)


@pytest.mark.parametrize(("now", "count"), [(T0 - 1, 0), (T0, 1), (T0 + WINDOW - 1, 1), (T0 + WINDOW, 0)])
def test_neighbours_are_live_and_not_of_the_future(now: int, count: int) -> None:
    data = profiles(1)
    data.ts_ms[:] = T0
    for index in (NeighbourIndex(data, MODEL, WINDOW), clusters.cluster(data, 4, MODEL, WINDOW)):
        assert ask(index, data.profiles, now).count.tolist() == [count]


def test_queries_that_are_zero_or_not_finite_have_none() -> None:
    data = profiles(20)
    data.ts_ms[:] = T0
    queries = np.zeros((4, 8))
    queries[1] = np.nan
    queries[2, 3] = np.inf
    queries[3] = data.profiles[3]
    for index in (NeighbourIndex(data, MODEL, WINDOW), clusters.cluster(data, 20, MODEL, WINDOW)):
        got = ask(index, queries)
        assert (got.count > 0).tolist() == [False, False, False, True]
        assert np.isfinite(got.aggregate).all()
        assert got.ts_ms[:3].tolist() == [-1, -1, -1]


def test_fewer_than_k_and_an_empty_index() -> None:
    data = profiles(3)
    data.ts_ms[:] = T0
    got = ask(NeighbourIndex(data, MODEL, WINDOW, NeighbourSettings(k=10, min_similarity=-1)), data.profiles)
    assert got.count.tolist() == [3, 3, 3]
    empty = Profiles.empty(DIMS)
    for index in (NeighbourIndex(empty, MODEL, WINDOW), clusters.cluster(empty, 4, MODEL, WINDOW)):
        assert ask(index, data.profiles).count.tolist() == [0, 0, 0]
        assert ask(index, data.profiles[:0]).aggregate.shape == (0, 3)


def test_a_user_is_not_its_own_neighbour() -> None:
    data = profiles(2)
    data.ts_ms[:] = T0
    data.profiles[1] = data.profiles[0]
    index = NeighbourIndex(data, MODEL, WINDOW)
    got = index.similar(data.profiles[:1], np.array([T0]), np.array([1], np.uint64))
    np.testing.assert_allclose(got.aggregate[0], data.aggregates[1], rtol=1e-5)


def test_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="7 numbers, the index has 8"):
        ask(NeighbourIndex(profiles(3), MODEL, WINDOW), np.ones((1, 7)))


def test_hnswlib_giving_up_does_not_matter() -> None:
    data = profiles(200)
    data.ts_ms[:] = T0
    index = NeighbourIndex(data, MODEL, WINDOW, NeighbourSettings(k=3, min_similarity=-1))
    for i in range(195):  # what makes hnswlib raise: too few elements to return
        index._index.mark_deleted(i)  # type: ignore[union-attr]
    got = ask(index, data.profiles[:4])
    assert got.count.tolist() == [3] * 4


# --- on disk


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    NeighbourIndex(profiles(50), MODEL, WINDOW).save(tmp_path)
    return tmp_path


def test_a_saved_index_answers_as_before(saved: Path) -> None:
    before, after = NeighbourIndex(profiles(50), MODEL, WINDOW), load(saved, MODEL, DIMS)
    queries = np.random.default_rng(1).standard_normal((9, 8))
    a, b = ask(before, queries), ask(after, queries)
    np.testing.assert_array_equal(a.aggregate, b.aggregate)
    np.testing.assert_array_equal(a.ts_ms, b.ts_ms)
    NeighbourIndex(profiles(20), MODEL, WINDOW).save(saved)
    assert len(load(saved, MODEL, DIMS)) == 20
    assert len(list(saved.iterdir())) == 3, "files of the index before are gone"


def test_an_empty_index_can_be_saved(tmp_path: Path) -> None:
    NeighbourIndex(Profiles.empty(DIMS), MODEL, WINDOW).save(tmp_path)
    assert len(load(tmp_path, MODEL, DIMS)) == 0


@pytest.mark.parametrize(
    ("model", "dims", "error"),
    [
        (MODEL + 1, DIMS, "model is"),
        (MODEL, StoreDims(3, 2, 7), "dim is 8, expected 7"),
        (MODEL, StoreDims(4, 2, 8), "aggregate_dim is 3, expected 4"),
    ],
)
def test_an_index_of_another_model_is_refused(saved: Path, model: int, dims: StoreDims, error: str) -> None:
    with pytest.raises(StoreFormatError, match=error):
        load(saved, model, dims)


def test_damage_is_found_by_the_checksum(saved: Path) -> None:
    for role in ("index", "table"):
        (path,) = saved.glob(f"*.{role}")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
        with pytest.raises(StoreFormatError, match=f"{role} does not match its checksum"):
            load(saved, MODEL, DIMS)
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    path.unlink()
    with pytest.raises(StoreFormatError, match="is missing"):
        load(saved, MODEL, DIMS)


@pytest.mark.parametrize(
    ("text", "error"),
    [("", "no manifest"), ("[1]", "no manifest"), ('{"kind": "x"}', "kind 'x'"),
     ('{"kind": "solaris-neighbours", "format": 2}', "format 2")],
)  # fmt: skip
def test_a_strange_manifest(saved: Path, text: str, error: str) -> None:
    (saved / MANIFEST).write_text(text)
    with pytest.raises(StoreFormatError, match=error):
        load(saved, MODEL, DIMS)


def test_a_file_of_another_dim_under_a_right_checksum_is_found(saved: Path) -> None:
    """hnswlib itself loads such a file without an error."""
    from xxhash import xxh3_128

    wrong = hnswlib.Index(space="ip", dim=16)
    wrong.init_index(max_elements=50)
    wrong.add_items(np.ones((50, 16), np.float32))
    (path,) = saved.glob("*.index")
    wrong.save_index(str(path))
    manifest = json.loads((saved / MANIFEST).read_text())
    manifest["files"]["index"] |= {"bytes": path.stat().st_size, "xxh3": xxh3_128(path.read_bytes()).hexdigest()}
    (saved / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(StoreFormatError, match=r"another dim|cannot be read"):
        load(saved, MODEL, DIMS)


# --- from a store


def chunk(
    offset: int, user: int, ts: int, items: list[int], profile: np.ndarray | None, value: float
) -> ChangelogRecord:
    n = len(items)
    p = np.zeros(0, np.float16) if profile is None else profile.astype(np.float16)
    return ChangelogRecord(
        offset,
        encode_embedding(
            EmbeddingChunk(
                user, ts, MODEL, 1, np.array(items, np.uint64), np.zeros(n, np.uint32),
                np.full((n, 3), value, np.float16), None, np.ones(2, np.float16), p, "e",
            )
        ),
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path):  # type: ignore[no-untyped-def]
    s = open_store(tmp_path / "store", SETTINGS)
    rng = np.random.default_rng(3)
    records = [chunk(i, 1 + i, T0, [1, 2], rng.standard_normal(8), float(i % 7)) for i in range(600)]
    records += [
        chunk(600, 1, T0 + 9 * HOUR, [2], None, 100.0),  # aggregate newer than the profile, which is past its TTL
        chunk(601, 9001, T0, [1], np.zeros(8), 1.0),  # zero profile
        chunk(602, 9002, T0, [1], None, 1.0),  # no profile
        chunk(603, 9003, T0, [], rng.standard_normal(8), 1.0),  # no pairs, so no aggregate
        chunk(604, 9004, T0 - 20 * HOUR, [1], rng.standard_normal(8), 1.0),  # dead by now
    ]
    s.apply(records)
    yield s
    s.close()


def test_users_with_a_live_aggregate_and_a_profile(store: RocksStore) -> None:
    assert newest_model(store) == (MODEL, DIMS)
    data = collect(store, T0 + 10 * HOUR, MODEL, DIMS)
    assert data.users.tolist() == list(range(1, 601))
    assert data.left_out == 2
    np.testing.assert_allclose(np.linalg.norm(data.profiles, axis=1), 1, rtol=1e-5)
    assert data.aggregates[0].tolist() == [50.0] * 3
    assert data.ts_ms[:2].tolist() == [T0 + 9 * HOUR, T0]
    assert len(collect(store, T0 + 10 * HOUR, MODEL + 1, DIMS)) == 0


def test_building_in_the_background_swaps_whole_and_is_found_after_a_restart(store: RocksStore, tmp_path: Path) -> None:
    n = Neighbours(store, MODEL, DIMS, directory=tmp_path / "n")
    queries = np.random.default_rng(5).standard_normal((20, 8)).astype(np.float32)
    now = np.full(20, T0 + HOUR, np.int64)
    assert n.similar(queries, now).count.sum() == 0
    assert n.rebuild(T0 + HOUR)
    for _ in range(50):  # searches go on while it is built
        n.similar(queries, now)
    assert n.wait(300)
    assert (n.built, n.failed, len(n.index)) == (1, 0, 601)
    first = n.similar(queries, now)
    assert first.count.sum() > 0
    n.close()
    again = Neighbours(store, MODEL, DIMS, directory=tmp_path / "n")
    np.testing.assert_array_equal(again.similar(queries, now).aggregate, first.aggregate)
    other = Neighbours(store, MODEL + 1, DIMS, directory=tmp_path / "n")
    assert len(other.index) == 0


def test_a_failed_build_keeps_the_index_in_use(
    store: RocksStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    n = Neighbours(store, MODEL, DIMS, directory=tmp_path / "n")
    n.rebuild(T0 + HOUR)
    assert n.wait(300)
    (tmp_path / "n" / MANIFEST).unlink()
    (tmp_path / "n" / MANIFEST).mkdir()  # so that the next manifest cannot be put in place
    n.rebuild(T0 + HOUR)
    assert n.wait(300)
    assert (n.built, n.failed, len(n.index)) == (1, 1, 601)
    assert any(r.levelno == logging.ERROR and "former index" in r.message for r in caplog.records)


# --- clusters


def test_clusters_find_the_groups_that_are_there(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    centres, _ = unit(rng.standard_normal((5, 8)).astype(np.float32))
    group = rng.integers(0, 5, 500)
    p, _ = unit((centres[group] + 0.05 * rng.standard_normal((500, 8))).astype(np.float32))
    data = Profiles(
        np.arange(500, dtype=np.uint64), p, np.eye(5, 3, dtype=np.float32)[group] + group[:, None],
        np.full(500, T0, np.int64), 0,
    )  # fmt: skip
    table = clusters.cluster(data, 5, MODEL, WINDOW)
    got = ask(table, centres)
    np.testing.assert_allclose(got.aggregate, np.eye(5, 3) + np.arange(5)[:, None], atol=1e-5)
    assert got.count.tolist() == np.bincount(group).tolist()
    table.save(tmp_path)
    np.testing.assert_array_equal(ask(clusters.load(tmp_path), centres).aggregate, got.aggregate)


def test_more_clusters_than_users_or_than_different_ones() -> None:
    data = profiles(6)
    data.profiles[:] = data.profiles[0]
    table = clusters.cluster(data, 4, MODEL, WINDOW)
    assert table.counts.tolist() == [6]
    with pytest.raises(ValueError, match="at least 1"):
        clusters.cluster(data, 0, MODEL, WINDOW)


def test_the_command_builds_a_table(store: RocksStore, tmp_path: Path) -> None:
    store.expire(T0 + HOUR)
    store.close()
    result = CliRunner().invoke(
        neighbours_app, ["build", str(tmp_path / "store"), "--clusters", "8", "--out", str(tmp_path / "c"), "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert (report["users"], report["clusters"], report["model"]) == (601, 8, f"{MODEL:016x}")
    table = clusters.load(tmp_path / "c")
    assert table.counts.sum() == 601
