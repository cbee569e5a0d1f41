"""The counter as steps of the transactional loop. Two lanes, each with a consumer group and transactions of its own,
since a step commits one topic's offsets: impressions (what was shown) and feedback (what was clicked)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streams.counter import EventCounter
from streams.decoding import keyed_events
from streams.settings import Settings
from streams.step import Output, PlainStep, Record, StepResult
from topics.events import decode_feedback, decode_impression
from topics.packed_counts import encode_count, encode_items


class CounterLane(PlainStep):
    """Nothing of a batch is kept, so a crash repeats or finishes it and every event is counted once."""

    decode: Callable[[bytes], Any]
    reports_dead = True
    """whether what is rejected goes to the DLQ"""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.core = EventCounter()
        self.linger_s = settings.counter.batch_age_ms / 1000

    def enough(self, records: int, value_bytes: int) -> bool:
        return records >= self.settings.loop.batch_records

    def run(self, records: Sequence[Record]) -> StepResult:
        events, sources, dead = keyed_events(records, type(self).decode, self.settings.loop.max_ahead_ms)
        partitions = [records[i].partition for i in sources]
        chunks = self.core.chunks(events)
        outputs = [
            Output("counts", p, records[i].key, encode_count(chunk), i)
            for i, p, chunk in zip(sources, partitions, chunks, strict=True)
            if chunk is not None
        ]
        outputs += [
            Output("item-counts", d.partition, None, encode_items(d.deltas), sources[d.source])
            for d in self.core.deltas(chunks, partitions)
        ]
        self.tally_dead(dead)
        return StepResult(outputs, dead if self.reports_dead else [])

    def totals(self) -> Mapping[str, int]:
        return self.core.counters + self.counters


class ShownLane(CounterLane):
    role = "counter"
    input_topic = "impressions"
    decode = staticmethod(decode_impression)
    reports_dead = False  # the ranker reads the same records and reports them


class ClickedLane(CounterLane):
    role = "counter-clicks"
    input_topic = "feedback"
    decode = staticmethod(decode_feedback)
