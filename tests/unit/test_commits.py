"""Commits beside the worker: in order, one at a time, and an error reaches the worker."""

from __future__ import annotations

import threading

import pytest

from streams.commits import Commits
from streams.step import Output, Record, StepResult, Work


def work(n: int) -> Work:
    return Work(counts={0: n})


def test_in_order_one_at_a_time_and_beside_the_caller() -> None:
    gate, begun, done, seen = threading.Event(), threading.Event(), [], []

    def commit(w: Work) -> None:
        begun.set()
        assert gate.wait(10)
        seen.append(w.records)

    commits = Commits("t", commit, lambda: done.append(len(seen)))
    commits.start()
    commits.put(work(1))
    assert begun.wait(10), "the caller is back while the commit is in flight"
    assert commits.busy
    assert seen == []
    later = threading.Thread(target=lambda: [commits.put(work(n)) for n in (2, 3)])
    later.start()
    assert later.is_alive(), "the second waits for the first"
    gate.set()
    later.join(10)
    commits.drain()
    assert seen == [1, 2, 3]
    assert not commits.busy
    commits.stop()
    assert done == [1, 2, 3]


def test_what_a_commit_raises_comes_out_of_the_next_call_and_nothing_is_committed_after_it() -> None:
    seen: list[int] = []

    def commit(w: Work) -> None:
        seen.append(w.records)
        raise ValueError("no")

    woken = threading.Event()
    commits = Commits("t", commit, woken.set)
    commits.start()
    commits.put(work(1))
    assert woken.wait(10), "the worker is told"
    for call in (commits.check, commits.drain, lambda: commits.put(work(2))):
        with pytest.raises(ValueError, match="no"):
            call()
    commits.stop()
    assert seen == [1]


def test_work_has_the_ends_and_what_is_committed_beside_them() -> None:
    records = [Record("t", p, offset, b"k", b"v", 0) for p, offset in ((0, 4), (1, 9), (0, 5))]
    result = StepResult([Output("out", 0, b"k", b"x", 2)], [])
    made = Work.of(records, result, {0: 7, 1: 8, 2: 9}, lambda p: f"m{p}")
    assert made.ends == {0: 6, 1: 10}
    assert made.metadata == {0: "m0", 1: "m1"}
    assert made.generations == {0: 7, 1: 8}
    assert made.records == 3
    assert made.outputs == [(records[2], result.outputs[0])]
