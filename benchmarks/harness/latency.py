"""Latency as a client sees it: produced at a fixed rate, read back committed by a process of its own.

The rate does not wait for answers (open loop), so a stall counts against every event that should have come meanwhile:
an event's clock starts when it was *due*.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from confluent_kafka import OFFSET_END, Consumer, Producer, TopicPartition

from benchmarks.harness.cluster import LIMIT_S, BenchError
from benchmarks.harness.events import Kafka
from topics.events import decode_ranked_ads
from topics.kafka import KafkaSettings, consumer

WARM_UP_S = 1.5
QUEUE_MS = 250.0
"""a median above this is a queue, and says nothing of the ranker"""


@dataclass(frozen=True, slots=True)
class Latency:
    p50_ms: float
    p99_ms: float
    rate_per_s: float
    events: int
    growing: bool = False
    """later events waited longer than earlier ones: the rate is more than can be kept up"""

    @classmethod
    def of(cls, values_ms: Sequence[float], rate: float) -> Latency:
        """In the order of the events."""
        values = np.asarray(values_ms)
        p50, p99 = np.percentile(values, [50, 99]).tolist()
        third = max(1, len(values) // 3)
        first, last = float(np.median(values[:third])), float(np.median(values[-third:]))
        growing = last > 1.5 * first + 5.0 or p50 > QUEUE_MS
        return cls(round(p50, 2), round(p99, 2), round(rate, 1), len(values_ms), growing)


def client(bootstrap: str) -> Producer:
    return Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 0, "partitioner": "murmur2_random", "acks": 1, "log_level": 0}
    )


def tail_reader(kafka: KafkaSettings, topic: str) -> Consumer:
    """A committed reader at the end of every partition of a topic."""
    reader = consumer(kafka, "bench-reader", fetch_wait_max_ms=100)
    places = [TopicPartition(kafka.topic(topic), p, OFFSET_END) for p in range(kafka.partitions)]
    reader.assign(places)
    return reader


def _read(kafka: KafkaSettings, topic: str, answers: Connection) -> None:
    """In a process of its own: (arrival in seconds since the epoch, value) of all that comes until told to end."""
    reader = tail_reader(kafka, topic)
    reader.poll(1.0)
    answers.send("ready")
    got: list[tuple[float, bytes]] = []
    while not answers.poll():
        first = reader.poll(0.005)  # `consume` would wait for all that it is asked for
        if first is not None:
            messages = [first, *reader.consume(500, 0)]
            now = time.time()
            got += [(now, m.value()) for m in messages if m.error() is None]
    answers.recv()
    answers.send([(at, decode_ranked_ads(value).id) for at, value in got])
    reader.close()


def rank_latency(kafka: KafkaSettings, impressions: Sequence[Kafka], rate: float, seconds: float) -> Latency:
    """Impression due -> ranked ad readable. Raises `BenchError` when an answer is missing."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read, args=(kafka, "ranked-ads", theirs), daemon=True)
    reader.start()
    if not ours.poll(LIMIT_S):
        raise BenchError("the reader of ranked-ads did not start")
    ours.recv()
    made, topic = client(kafka.bootstrap), kafka.topic("impressions")
    n = int(rate * (WARM_UP_S + seconds))
    due: dict[str, float] = {}
    begin = time.time() + 0.05
    ids = [_id(r.value) for r in impressions[: min(n, len(impressions))]]
    if n > len(ids):
        raise BenchError(f"{n} impressions are needed for {rate:g}/s over {seconds:g} s, {len(ids)} were made")
    for k in range(n):
        at = begin + k / rate
        made.poll(0)
        while (left := at - time.time()) > 0:
            time.sleep(left)  # and not in `poll`, which would keep one of the cores busy
        made.produce(topic, impressions[k].value, impressions[k].key)
        due[ids[k]] = at
    made.flush(10)
    time.sleep(1.5)
    ours.send("end")
    arrived = {i: at for at, i in ours.recv()}
    reader.join(10)
    wanted = ids[int(rate * WARM_UP_S) :]
    missing = [i for i in wanted if i not in arrived]
    if len(missing) > len(wanted) // 100:
        raise BenchError(f"{len(missing)} of {len(wanted)} impressions were not answered at {rate:g}/s")
    return Latency.of([1000 * (arrived[i] - due[i]) for i in wanted if i in arrived], rate)


def _id(value: bytes) -> str:
    at = value.index(b'"id":"') + 6
    return value[at : value.index(b'"', at)].decode()
