"""A bundle replaced while a role runs: the new one is loaded and checked aside, and taken between two batches.

The folder is looked at every `model.reload_s`. What changes is tried once it has stood still for one look, so that a
copy in progress is not taken for a bundle; a bad bundle is refused loudly (once) and the old one goes on serving.
What says nothing about the bundle (a file that cannot be read now, a GPU without room for two models) is no verdict: it
is counted and tried again, ever less often.

A bundle with the same feature spec is swapped in between two batches of a step. One with another spec changes what the
catalogue and the packed requests mean, and one that sees rolling counts where the old one did not (or the other way
round) what the ranker follows: the role then restarts its loops in place, from what is committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from models.api import FeatureSpec, ModelInfo, Runtime
from models.bundle import read_bundle
from topics.errors import BundleError, SettingsError

log = logging.getLogger(__name__)

RETRY_S, RETRY_MAX_S = 5.0, 300.0
"""wait after the first attempt that came to no verdict, doubled after each further one"""

Signature = tuple[tuple[str, int, int, int], ...]


def signature(folder: Path) -> Signature:
    """What tells one state of a folder from another: its files' names, sizes, times and inodes."""
    try:
        return tuple(
            sorted((f.name, s.st_size, s.st_mtime_ns, s.st_ino) for f in folder.iterdir() for s in (f.stat(),))
        )
    except OSError:
        return ()


def wants_counter(folder: Path) -> bool:
    """Whether the bundle's VM sees rolling counts, which the role `counter` feeds. Raises `BundleError`."""
    return read_bundle(folder).info.rolling


class BundleWatch:
    """`load` opens the bundle on the role's device, as often as there are steps. `take(k)` is for step k's worker."""

    def __init__(
        self,
        folder: Path,
        runtimes: list[Runtime],
        load: Callable[[], Runtime],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._load, self._every_s, self._clock = folder, load, every_s, clock
        self.info = runtimes[0].info
        self._next: list[SimpleQueue[Runtime]] = [SimpleQueue() for _ in runtimes]
        self._judged = self._seen = signature(folder)
        """what there is a verdict on; what was there at the last look"""
        self._retry_s = RETRY_S
        self._due_s = float("-inf")
        self._current = _identity(folder)
        self.restart_wanted = threading.Event()
        """set when the new bundle has another feature spec, or follows other topics"""
        self.accepted = 0
        self.refused = 0
        self.failed = 0
        """attempts that came to no verdict"""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bundle-watch", daemon=True)

    def start(self) -> None:
        if self._every_s > 0:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def take(self, step: int) -> Runtime | None:
        """The runtime that step k is to go on with, once."""
        newest = None
        while True:
            try:
                newest = self._next[step].get_nowait()
            except Empty:
                return newest

    def look(self) -> None:
        """One look at the folder."""
        now = signature(self._folder)
        if now != self._seen:
            self._seen = now  # still moving, perhaps: wait for the next look
            self._retry_s, self._due_s = RETRY_S, float("-inf")
            return
        if now == self._judged or self._clock() < self._due_s:
            return
        fresh: list[Runtime] = []
        try:
            identity = _identity(self._folder)
            if identity != self._current:
                for _ in self._next:
                    fresh.append(self._load())
        except Exception as e:
            for runtime in fresh:  # those of the first steps, when there was no room for the next one's
                runtime.close()
            self._not_taken(e, now)
            return
        self._judged = now
        if not fresh:
            return
        self._current = identity
        self.accepted += 1
        old, self.info = self.info, fresh[0].info
        log.warning("bundle %s: %s, %s take over from %s, %s", self._folder, self.info.vm, self.info.fm, old.vm, old.fm)
        if _followed(self.info) != _followed(old):
            for runtime in fresh:
                runtime.close()
            self.restart_wanted.set()
            return
        for queue, runtime in zip(self._next, fresh, strict=True):
            queue.put(runtime)

    def _not_taken(self, e: Exception, now: Signature) -> None:
        who = self._folder, self.info.vm, self.info.fm
        if isinstance(e, BundleError | SettingsError) and not isinstance(e.__cause__, OSError):
            self._judged = now
            self.refused += 1
            log.error("bundle %s is refused, %s and %s go on serving: %s", *who, e)
            return
        self.failed += 1
        log.error(
            "bundle %s cannot be loaded now, %s and %s go on serving; trying again in %g s: %s: %s",
            *who, self._retry_s, type(e).__name__, e,
        )  # fmt: skip
        self._due_s = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.look()
            except Exception:  # a watch that dies would leave an old model serving for ever, unnoticed
                self.failed += 1
                log.exception("looking at bundle %s failed; trying again", self._folder)


def _followed(info: ModelInfo) -> tuple[FeatureSpec, bool, int | None]:
    """What the loops are set up for."""
    return info.spec, info.rolling, info.count_lag_ms


def _identity(folder: Path) -> str:
    """All that the pipeline reads of a manifest, the graphs' hashes among it."""
    return repr(msgspec.structs.replace(read_bundle(folder).manifest, training={}))
