"""How fast is replay against a bare producer with the same bytes?

    python benchmarks/replay.py [--quick] [--json] [--bootstrap HOST:PORT] [--log FILE]

A bare confluent-kafka producer (idempotent, no transactions; it checks nothing and remembers nothing) and
`solaris replay --speed max` write the same records to the same broker, in turns. `ratio` is replay / bare: the median
over the rounds, since a machine that does other work too gives single rounds that say nothing; `ratio_best` compares
the best run of each. `bare_transactional` is the bare loop inside transactions of the same size, to show what those
cost. Connecting is outside of the clock for all of them, and so is what a process does once: numba's import, and
compiling the check of lines where that has not been done before (`once_s`). `client_cpu_us` is processor time of this
process by record, all threads, and `ratio_cpu` the median of its quotients: on a machine that others use it is the
steadier figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path

from confluent_kafka.admin import AdminClient

from topics import admin
from topics import kafka as clients
from topics.events import Candidates, Feedback, Impression, decode_event, encode
from topics.kafka import KafkaSettings
from topics.readers import EventLog
from topics.replay import BATCH_BYTES, Replay
from topics.replay_records import TOPICS, Scanner, records


class Timed(Replay):
    began = 0.0

    def _send(self) -> None:
        self.began = time.perf_counter()
        super()._send()


def synthetic(path: Path, events: int) -> None:
    """Requests of 50 candidates and 20 ads: about 0.5 KB a record."""
    import random

    rng = random.Random(0)
    with open(path, "wb") as file:
        for i in range(events // 3):
            user, ts = f"u{rng.randrange(20_000)}", 1_700_000_000_000 + i * 10
            items: list[str | int] = [f"n{rng.randrange(10_000)}" for _ in range(50)]
            history = {"history": [f"n{rng.randrange(10_000)}" for _ in range(20)]}
            for event in (
                Candidates(f"c{i}", user, ts, items, features=history),  # type: ignore[arg-type]
                Impression(f"i{i}", user, ts + 5, items[:20], features=history),  # type: ignore[arg-type]
                Feedback(f"i{i}", user, ts + 9, items[:1]),
            ):
                file.write(encode(event) + b"\n")


def bare(kafka: KafkaSettings, rows: list[tuple[str, bytes, bytes]], transactional: bool) -> float:
    """Seconds to have every record acknowledged."""
    name = f"{kafka.prefix}bare-{uuid.uuid4().hex}" if transactional else None
    producer = clients.producer(kafka, name, linger_ms=20, batch_size=1 << 20, queue_buffering_max_messages=500_000)
    if transactional:
        producer.init_transactions(30)
    producer.list_topics(timeout=30)  # connected before the clock runs
    started = time.perf_counter()
    if transactional:
        producer.begin_transaction()
    size = 0
    for n, (topic, key, value) in enumerate(rows):
        while True:
            try:
                producer.produce(topic, value, key)
                break
            except BufferError:
                producer.poll(0.05)
        if n % 2_000 == 0:
            producer.poll(0)
        size += len(value)
        if transactional and size >= BATCH_BYTES:
            producer.commit_transaction(60)
            producer.begin_transaction()
            size = 0
    if transactional:
        producer.commit_transaction(60)
    else:
        left = producer.flush(120)
        assert left == 0, f"{left} records without an answer"
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a third of the records, five rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--bootstrap", default=KafkaSettings().bootstrap)
    parser.add_argument("--log", type=Path, help="JSON Lines log; default: a synthetic one")
    parser.add_argument("--rounds", type=int, default=0)
    args = parser.parse_args()
    rounds = args.rounds or (5 if args.quick else 7)

    with tempfile.TemporaryDirectory(prefix="solaris-bench-") as folder:
        path = args.log
        if path is None:
            path = Path(folder) / "log.jsonl"
            synthetic(path, 100_000 if args.quick else 300_000)
        base = KafkaSettings(bootstrap=args.bootstrap)
        all_runs: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        once = time.perf_counter()
        Scanner().wait()
        once = time.perf_counter() - once
        events = size = 0
        kinds = ["bare", "replay", "bare_transactional"]
        for _ in range(rounds):
            kinds.append(kinds.pop(0))  # none always goes first
            for kind in kinds:
                kafka = replace(base, prefix=f"bench-{uuid.uuid4().hex[:8]}.")
                admin.create(kafka, TOPICS)
                try:
                    if kind == "replay":
                        run = Timed(EventLog(path, None), kafka)
                        cpu_started = time.process_time()
                        state = run.run()
                        took = time.perf_counter() - run.began
                        assert state.complete
                        assert not events or state.acknowledged == events
                    else:
                        rows = [(kafka.topic(r.topic), r.key, r.value) for r in records(EventLog(path, None), TOPICS)]
                        events, size = len(rows), sum(len(v) for _, _, v in rows)
                        cpu_started = time.process_time()
                        took = bare(kafka, rows, kind != "bare")
                        del rows
                    used = time.process_time() - cpu_started
                finally:
                    _drop(kafka)
                all_runs.setdefault(kind, []).append(took)
                cpu.setdefault(kind, []).append(used)

        started = time.perf_counter()
        for line in path.read_bytes().splitlines():
            decode_event(line)
        decode_s = time.perf_counter() - started

    best = {kind: min(runs) for kind, runs in all_runs.items()}

    def ratio(figures: dict[str, list[float]]) -> float:
        return round(statistics.median(b / r for b, r in zip(figures["bare"], figures["replay"], strict=True)), 3)

    report = {
        "events": events,
        "bytes": size,
        "rounds": rounds,
        **{f"{kind}_events_per_s": round(events / took) for kind, took in best.items()},
        **{f"{kind}_mb_per_s": round(size / took / 1e6, 1) for kind, took in best.items()},
        "decode_only_events_per_s": round(events / decode_s),
        **{f"{kind}_client_cpu_us": round(min(used) / events * 1e6, 2) for kind, used in cpu.items()},
        "once_s": round(once, 2),
        "ratio_best": round(best["bare"] / best["replay"], 3),
        "ratio_cpu": ratio(cpu),
        "ratio": ratio(all_runs),
        "load_average": os.getloadavg()[0],
    }
    if args.json:
        print(json.dumps(report))
        return
    for key, value in report.items():
        print(f"{key:<34}{value:>16,}")


def _drop(kafka: KafkaSettings) -> None:
    client: AdminClient = clients.admin(kafka)
    for future in client.delete_topics([kafka.topic(t) for t in TOPICS]).values():
        future.result()


if __name__ == "__main__":
    main()
