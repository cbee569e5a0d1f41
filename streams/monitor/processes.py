"""What the processes of the roles say about themselves on `stats`, by process and ten-second window. Pure.

Counters are running totals of one process, so a window's row is set to its first and last record, never added to:
reading records again changes nothing. What was done in a span is the difference of two totals, start by start: counters
begin at zero with each, and a pid does not tell them apart (in a container it is always the same, and a process may
start its loops again in place).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from streams.monitor.blocks import BLOCK_MS

STALE_MS = 15_000
"""a process not heard of for so long is shown as gone"""


class Said(msgspec.Struct):
    """A record of `stats`, as far as the monitor uses it."""

    ts: int
    role: str
    instance: str
    pid: int
    started_ms: int = 0
    """when these counters began; 0 from processes that do not say so"""
    live: bool = False
    ready: bool = False
    stopping: bool = False
    """it was told to stop"""
    device: str = ""
    vm: str = ""
    fm: str = ""
    partitions: dict[str, list[int]] = {}
    counters: dict[str, int] = {}

    @property
    def process(self) -> str:
        started = f"/{self.started_ms}" if self.started_ms else ""
        return f"{self.role}/{self.instance}/{self.pid}{started}"


class Row(msgspec.Struct):
    first: Said
    last: Said


@dataclass(slots=True)
class Processes:
    keep_ms: int
    _said: dict[str, dict[int, Row]] = field(default_factory=dict)
    """process -> start of the window -> its row"""
    _dirty: set[tuple[str, int]] = field(default_factory=set)
    _decoder: msgspec.json.Decoder[Said] = field(default_factory=lambda: msgspec.json.Decoder(Said))
    undecodable: int = 0

    def stats(self, ts_ms: int, value: bytes | None) -> None:
        """One record of `stats`; `ts_ms` is when the broker took it, and counts from here on."""
        try:
            said = self._decoder.decode(value or b"")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            self.undecodable += 1
            return
        said.ts = ts_ms
        self._merge(Row(said, said))
        self._dirty.add((said.process, _start(ts_ms)))

    def load(self, value: Mapping[str, Any]) -> None:
        """A row as it was stored."""
        self._merge(msgspec.convert(value, Row))

    def changed(self) -> list[tuple[str, int, dict[str, Any]]]:
        """(process, start of its window, row) to store, whole, since the last call."""
        out = [(p, w, msgspec.to_builtins(self._said[p][w])) for p, w in sorted(self._dirty)]
        self._dirty.clear()
        return out

    def expire(self, now_ms: int) -> list[tuple[str, int]]:
        """Forgets windows older than `keep_ms` and returns them."""
        limit = now_ms - self.keep_ms - BLOCK_MS
        gone = [(p, w) for p, windows in self._said.items() for w in windows if w < limit]
        for p, w in gone:
            del self._said[p][w]
            self._dirty.discard((p, w))
            if not self._said[p]:
                del self._said[p]
        return gone

    def latest(self) -> list[Said]:
        """The last record of every process that is kept, by role, instance and pid: of its newest start alone."""
        newest: dict[tuple[str, str, int], Said] = {}
        for _, windows in sorted(self._said.items()):
            said = windows[max(windows)].last
            who = said.role, said.instance, said.pid
            if who not in newest or (said.ts, said.started_ms) > (newest[who].ts, newest[who].started_ms):
                newest[who] = said
        return list(newest.values())

    def done(self, role: str, from_ms: int, to_ms: int) -> Counter[str]:
        """Sum over the role's processes of what their counters grew by in the windows that begin in [from_ms, to_ms).

        A process first heard of inside the span counts from its first record: what it did before that is not counted.
        """
        out: Counter[str] = Counter()
        for said in self._said.values():
            starts = sorted(said)
            end = bisect.bisect_left(starts, to_ms) - 1
            begin = bisect.bisect_left(starts, from_ms) - 1
            if said[starts[0]].last.role != role or end < 0:
                continue
            before = said[starts[begin]].last if begin >= 0 else said[starts[0]].first
            after = said[starts[end]].last
            out.update({k: n - before.counters.get(k, 0) for k, n in after.counters.items()})
        return out

    def _merge(self, row: Row) -> None:
        windows = self._said.setdefault(row.last.process, {})
        have = windows.get(_start(row.last.ts))
        if have is not None:
            row = Row(
                min(have.first, row.first, key=lambda s: s.ts),
                max(row.last, have.last, key=lambda s: s.ts),
            )
        windows[_start(row.last.ts)] = row


def _start(ts_ms: int) -> int:
    return ts_ms - ts_ms % BLOCK_MS
