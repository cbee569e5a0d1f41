"""Random histories, told to RocksDB and to the reference at once: the answers must be equal after every step.

A kill is a copy of the directory taken while the store is open, opened in its place: after kill -9 exactly the bytes
that were handed to the operating system are there. (`tests/chaos` kills real processes too, in the middle of writes.)
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_cases import DIMS, HOUR, MODEL, T0, ask, assert_same, chunk

from state.api import ChangelogRecord, StoreDims, StoreSettings
from state.reference import ReferenceStore
from state.store import open_store

STORE = StoreSettings(
    ttl_ms=2 * HOUR, window_ms=5 * HOUR, grace_ms=HOUR // 2, segments_per_ttl=2, cache_bytes=24 << 10, lock_timeout_s=0
)
OTHER_DIMS = StoreDims(2, 2, 2)
PART_DIMS = (StoreDims(0, 2, 2), StoreDims(3, 0, 0), StoreDims(3, 2, 0), StoreDims(3, 0, 2))


@dataclass(frozen=True)
class Step:
    kind: str
    records: tuple[tuple[int, bytes], ...] = ()
    at: int = 0
    questions: tuple[tuple[int, tuple[int, ...], int], ...] = ()


# Times fall on a coarse grid and one beside it, so that every limit is met from both sides.
times = st.builds(lambda h, d: T0 + h * HOUR // 2 + d, st.integers(0, 30), st.sampled_from([-1, 0, 1]))
users = st.integers(1, 3)
items = st.lists(st.integers(1, 12), max_size=8)
dims = st.sampled_from([DIMS, DIMS, DIMS, *PART_DIMS, OTHER_DIMS])
values = st.one_of(
    st.builds(
        lambda u, t, i, m, d, q: chunk(u, t, i, model=m, dims=d, int8=q),
        users, times, items, st.sampled_from([MODEL, MODEL, MODEL, 6]), dims,
        st.booleans(),
    ),
    st.just(b"not a chunk"),
)  # fmt: skip


@st.composite
def histories(draw: st.DrawFn) -> list[Step]:
    log = list(enumerate(draw(st.lists(values, min_size=1, max_size=30))))
    steps: list[Step] = []
    at = 0
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(
            st.sampled_from(["write", "write", "write", "again", "shuffled", "expire", "restart", "kill", "ask"])
        )
        if kind == "write":
            n = draw(st.integers(0, 6))
            steps.append(Step("write", tuple(log[at : at + n])))
            at = min(len(log), at + n)
        elif kind == "again":
            back = draw(st.integers(0, at))
            steps.append(Step("write", tuple(log[back:at])))
        elif kind == "shuffled":
            steps.append(Step("write", tuple(draw(st.permutations(log[max(0, at - 6) : at])))))
        elif kind == "ask":
            n = draw(st.integers(1, 4))
            steps.append(Step("ask", questions=tuple((draw(users), tuple(draw(items)), draw(times)) for _ in range(n))))
        else:
            steps.append(Step(kind, at=draw(times)))
    return steps


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=histories(), questions=st.lists(st.tuples(users, items, times), min_size=1, max_size=8))
def test_rocksdb_and_the_reference_give_equal_answers(
    history: list[Step], questions: list[tuple[int, list[int], int]]
) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        directory = Path(tmp) / "0"
        store, reference = open_store(directory, STORE), ReferenceStore(STORE)
        try:
            for i, step in enumerate(history):
                if step.kind == "write":
                    records = [ChangelogRecord(*r) for r in step.records]
                    assert store.apply(records) == reference.apply(records)
                elif step.kind == "expire":
                    store.expire(step.at)
                    reference.expire(step.at)
                elif step.kind == "restart":
                    store.close()
                    store = open_store(directory, STORE)
                elif step.kind == "kill":
                    directory = Path(tmp) / str(i + 1)
                    shutil.copytree(store.path, directory)
                    store.close()
                    store = open_store(directory, STORE)
                    assert not store.rebuilt
                assert (store.position, store.clock_ms) == (reference.position, reference.clock_ms)
                asked = [(u, list(ids), t) for u, ids, t in step.questions] or questions
                assert_same(ask(store, asked), ask(reference, asked))
        finally:
            store.close()
