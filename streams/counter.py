"""The counter's core: impressions and feedback in, records of the rolling counts out. No Kafka, no wall clock, no
threads, and no state: what it writes of a batch depends on the batch alone.

Each event gives a chunk of its user's (`topics.packed_counts`, kind ``C``), and each batch, for every partition and
5-minute bucket of event time that it has, the sum of what its items were shown or clicked (kind ``I``). The sums of all
batches add up to the counts, so each must be written exactly once: in the transaction that commits the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from topics.events import Feedback, Impression
from topics.ids import hash_id, hash_ids
from topics.packed_counts import BUCKET_MS, MAX_ITEMS_PER_DELTA, CountChunk, ItemDeltas


@dataclass(frozen=True, slots=True)
class PartitionDeltas:
    partition: int
    source: int
    """index of the first event that is counted in them"""
    deltas: ItemDeltas


@dataclass(slots=True)
class EventCounter:
    counters: Counter[str] = field(default_factory=Counter)

    def chunks(self, events: Sequence[Impression | Feedback]) -> list[CountChunk | None]:
        """A chunk for each event, aligned; None for one without ads, of which there is nothing to count."""
        out: list[CountChunk | None] = []
        for event in events:
            clicked = isinstance(event, Feedback)
            ids = event.clicked if isinstance(event, Feedback) else event.ads
            if not ids:
                self.counters["events_empty"] += 1
                out.append(None)
                continue
            self.counters["clicks_counted" if clicked else "ads_counted"] += len(ids)
            out.append(CountChunk(hash_id(event.user), event.ts, clicked, hash_ids(ids)))
        self.counters["events_counted"] += len(events)
        return out

    def deltas(self, chunks: Sequence[CountChunk | None], partitions: Sequence[int]) -> list[PartitionDeltas]:
        """Sums over the chunks of each partition and bucket, partitions and buckets ascending."""
        groups: dict[tuple[int, int], list[int]] = {}
        for i, (chunk, partition) in enumerate(zip(chunks, partitions, strict=True)):
            if chunk is not None:
                groups.setdefault((partition, chunk.ts_ms - chunk.ts_ms % BUCKET_MS), []).append(i)
        out = []
        for (partition, bucket), members in sorted(groups.items()):
            of_group = [c for i in members if (c := chunks[i]) is not None]
            flags = np.repeat([c.clicked for c in of_group], [len(c.items) for c in of_group])
            items, row = np.unique(np.concatenate([c.items for c in of_group]), return_inverse=True)
            shown, clicked = (np.bincount(row[flags == k], minlength=len(items)).astype(np.uint32) for k in (0, 1))
            for at in range(0, len(items), MAX_ITEMS_PER_DELTA):
                cut = slice(at, at + MAX_ITEMS_PER_DELTA)
                out.append(
                    PartitionDeltas(partition, members[0], ItemDeltas(bucket, items[cut], shown[cut], clicked[cut]))
                )
        return out
