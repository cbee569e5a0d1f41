"""When a process takes a lost identity again, and when it ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator

import pytest

from streams import process
from topics.errors import BrokerError, IdentityLost


@pytest.fixture
def restored_collector() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def ends(outcomes: Iterable[bool | BaseException]) -> Callable[[], bool]:
    """A role that ends so, each time it is served."""
    left = iter(outcomes)

    def serve() -> bool:
        outcome = next(left)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return serve


def test_a_lost_identity_is_taken_again_and_a_clean_end_is_the_end() -> None:
    process._serve_on(ends([IdentityLost("fenced"), True, False]), "ranker", lambda: False)


def test_twice_in_a_minute_ends_the_process() -> None:
    with pytest.raises(IdentityLost, match="second"):
        process._serve_on(ends([IdentityLost("first"), True, IdentityLost("second"), False]), "ranker", lambda: False)


def test_once_a_minute_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.0, 161.0, 161.0, 222.0, 222.0])
    monkeypatch.setattr(process.time, "monotonic", lambda: next(clock))
    process._serve_on(
        ends([IdentityLost("one"), IdentityLost("two"), IdentityLost("three"), False]), "r", lambda: False
    )


def test_nothing_is_taken_again_by_a_process_that_is_to_stop() -> None:
    with pytest.raises(IdentityLost):
        process._serve_on(ends([IdentityLost("fenced"), False]), "ranker", lambda: True)


def test_other_errors_end_the_process_at_once() -> None:
    with pytest.raises(BrokerError):
        process._serve_on(ends([BrokerError("gone"), False]), "ranker", lambda: False)


def test_what_a_restart_in_place_leaves_is_freed(restored_collector: None) -> None:
    """A loop and its committer know each other, and what was loaded is frozen for the collector."""

    class Loop:
        def __init__(self) -> None:
            self.committer = self

    loop = Loop()
    gone = weakref.ref(loop)
    process._calm_collector()
    del loop
    process._calm_collector()
    assert gone() is None
