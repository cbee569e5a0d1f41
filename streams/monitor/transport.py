"""Faust's Kafka transport and table, as far as they must differ here.

Faust takes some 2,000 messages a second through its streams, whatever is done with them; the topics carry more. So
what one fetch brought of a partition goes through as a few messages, each a *bundle* of records: a msgpack array of
[offset, append time in ms, value]. To Faust the offsets in between look like those of a compacted
topic, which it knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import faust
import msgspec
from faust.transport.drivers import aiokafka as driver

BUNDLE_RECORDS = 500
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[tuple[int, int, bytes | None]])


@dataclass(slots=True)
class Bundle:
    """Looks like aiokafka's record; the offset is that of its last."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    value: bytes
    serialized_value_size: int
    key: None = None
    headers: tuple[()] = ()
    checksum: None = None
    serialized_key_size: int = -1


def bundles(records: Sequence[Any]) -> Iterator[Bundle]:
    """Records of one partition, in order, as bundles."""
    for at in range(0, len(records), BUNDLE_RECORDS):
        part = records[at : at + BUNDLE_RECORDS]
        last = part[-1]
        value = _encode([(r.offset, r.timestamp, r.value) for r in part])
        yield Bundle(last.topic, last.partition, last.offset, last.timestamp, last.timestamp_type, value, len(value))


class Unbundler:
    """Takes bundles apart. After a rebalance Faust delivers again what was on its way: each record passes once."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], int] = {}

    def records(self, topic: str, partition: int, value: bytes) -> list[tuple[int, bytes | None]]:
        """[(append time in ms, value)] of a bundle, without the records that have passed before."""
        records, key = _decoder.decode(value), (topic, partition)
        start = self._next.get(key, 0)
        self._next[key] = max(start, records[-1][0] + 1)
        return [(ts_ms, v) for offset, ts_ms, v in records if offset >= start]


class _Committed(driver.AIOKafkaConsumerThread):
    """Faust reads committed records only where it uses transactions itself; the roles' aborted ones are not results."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        reader = super()._create_worker_consumer(transport)
        reader._isolation_level = "read_committed"
        return reader


class _Consumer(driver.Consumer):
    def _new_consumer_thread(self) -> _Committed:
        return _Committed(self, loop=self.loop, beacon=self.beacon)

    async def _getmany(self, active_partitions: Any, timeout: float) -> Mapping[Any, Any]:
        bundled: Collection[str] = self.transport.bundled
        found = await super()._getmany(active_partitions, timeout)
        return {tp: list(bundles(r)) if tp.topic in bundled and r else r for tp, r in found.items()}


class Transport(driver.Transport):
    Consumer = _Consumer
    bundled: Collection[str] = ()
    """topics whose records come bundled; not the changelogs of the tables"""


class OnePartition(faust.Table):
    """Rows are few and there is one monitor: one changelog partition, whatever the topics have."""

    def partition_for_key(self, key: Any) -> int:
        return 0
