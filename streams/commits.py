"""Commits beside the worker: while a transaction is on its way the core works on the next full batch. Order is kept:
one thread commits, first in first out, and one batch at most waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from streams.step import Work


class Commits:
    """`commit` is called on a thread of its own, once for each `put`, and `done` after it. What a commit raises comes
    out of the worker's next call."""

    def __init__(self, name: str, commit: Callable[[Work], None], done: Callable[[], None]) -> None:
        self._commit, self._done = commit, done
        self._changed = threading.Condition()
        self._work: Work | None = None
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name}-commits", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._work is not None

    def check(self) -> None:
        """Raises what a commit raised."""
        if self._error is not None:
            raise self._error

    def put(self, work: Work) -> None:
        """Hands over, when the commit before it has ended."""
        self.drain()
        with self._changed:
            self._work = work
            self._changed.notify_all()

    def drain(self) -> None:
        """Returns when all that was put is committed."""
        with self._changed:
            while self._work is not None and self._error is None:
                self._changed.wait()
            self.check()

    def stop(self) -> None:
        """Ends the thread after the commit in flight."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while self._error is None:
            with self._changed:
                while self._work is None:
                    if self._ended:
                        return
                    self._changed.wait()
                work = self._work
            try:
                self._commit(work)
            except BaseException as e:
                self._error = e
            with self._changed:
                self._work = None
                self._changed.notify_all()
            self._done()
