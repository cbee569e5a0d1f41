"""The error of int8 on vectors of a real FM: the demo bundle over a simulated log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.catalogue import Catalogue
from models.features import Encoder
from models.runtime import open_runtime
from state.api import ChangelogRecord, Lookup, StoreDims, StoreSettings
from state.quantise import from_int8, relative_error, to_half, to_int8
from state.store import open_store
from topics.events import Candidates, Item
from topics.packed import EmbeddingChunk, encode_embedding
from topics.readers import open_log
from topics.simulator import preset, write

DEMO = Path(__file__).parents[2] / "models" / "demo_bundle"
T0 = 1_573_700_000_000


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """float32 [n, dim], the FM's logit last."""
    path = tmp_path_factory.mktemp("log") / "tiny.jsonl"
    write(preset("tiny"), path)
    events = list(open_log(path))
    runtime = open_runtime(DEMO)
    catalogue = Catalogue(runtime.info.spec)
    catalogue.update(e for e in events if isinstance(e, Item))
    offered = [e for e in events if isinstance(e, Candidates)][:400]
    return runtime.embed(Encoder(runtime.info.spec, catalogue).candidates(offered))


def test_int8_keeps_fm_vectors_within_a_percent(vectors: np.ndarray) -> None:
    assert len(vectors) > 5000
    restored = from_int8(*to_int8(vectors))
    errors = {
        "float16": relative_error(vectors, to_half(vectors)),
        "int8": relative_error(vectors, restored),
        "int8 of the logit": relative_error(vectors[:, -1:], restored[:, -1:]),
    }
    print(", ".join(f"{name} {100 * e:.3f} %" for name, e in errors.items()))
    print("largest error of a logit", float(np.abs(vectors[:, -1] - restored[:, -1]).max()))
    assert errors["float16"] < 3e-4
    assert errors["int8"] < 0.01
    assert errors["int8 of the logit"] < 0.02
    cosines = (vectors * restored).sum(1) / (np.linalg.norm(vectors, axis=1) * np.linalg.norm(restored, axis=1))
    assert cosines.min() > 0.999


def test_a_store_gives_int8_vectors_and_means_within_that_error(vectors: np.ndarray, tmp_path: Path) -> None:
    n, dim = 40, vectors.shape[1]
    dims, items = StoreDims(dim, 0, 0), np.arange(1, n + 1).astype(np.uint64)
    v, none = vectors[:n], np.zeros(0, np.float16)
    q, scales = to_int8(v)
    found: list[Lookup] = []
    for name, columns, scale in (("float16", to_half(v), None), ("int8", q, scales)):
        store = open_store(tmp_path / name, StoreSettings(cache_bytes=1 << 20))
        chunk = EmbeddingChunk(7, T0, 1, 9, items, np.zeros(n, np.uint32), columns, scale, none, none, "e")
        store.apply([ChangelogRecord(0, encode_embedding(chunk))])
        users, splits, topics = np.array([7], np.uint64), np.array([0, n]), np.zeros(n, np.uint32)
        found.append(store.lookup(users, splits, items, topics, np.array([T0]), 1, dims))
        store.close()
    half, int8 = found
    np.testing.assert_array_equal(int8.vectors, from_int8(q, scales))
    assert relative_error(half.vectors, int8.vectors) < 0.01
    assert relative_error(half.aggregate, int8.aggregate) < 0.01
