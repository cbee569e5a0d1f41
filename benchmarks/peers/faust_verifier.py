"""The verifier's core in a Faust agent: the same model, columns, gate and record; only the stream engine differs.

    python benchmarks/peers/faust_verifier.py BOOTSTRAP PREFIX BUNDLE PARTITIONS OUTPUT per_event|take DATADIR TOP_K

`per_event`: `async for event in stream`, one event at a time, as most agents are written. `take`: `stream.take`,
Faust's own way to batches, so that 500 events share one call of the model. At-least-once, as Faust does it by default;
its exactly-once is left out, since it lost and doubled records when it was tried. As its docs advise: raw serializers
(no schema work in Faust), a deep stream buffer, compressed producer with a linger, offsets committed every few seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import faust  # noqa: E402

from models.catalogue import Catalogue  # noqa: E402
from models.features import Encoder  # noqa: E402
from models.runtime import open_runtime  # noqa: E402
from streams.decoding import hashed_candidates  # noqa: E402
from streams.gate import GateSettings  # noqa: E402
from streams.verifier import Verifier  # noqa: E402
from topics.events import decode_item  # noqa: E402
from topics.kafka import KafkaSettings  # noqa: E402
from topics.packed import encode_precompute  # noqa: E402
from topics.tail import records  # noqa: E402

BATCH, WITHIN_S = 500, 0.05


def make() -> faust.App:
    bootstrap, prefix, bundle, partitions, output, how, folder, top_k = sys.argv[1:9]
    kafka = KafkaSettings(bootstrap=bootstrap, prefix=prefix, partitions=int(partitions))
    runtime = open_runtime(bundle)
    catalogue = Catalogue(runtime.info.spec)
    catalogue.update(
        decode_item(r.value or b"") for r in records(kafka, "items", start="beginning", follow=False) if r is not None
    )
    core = Verifier(runtime, Encoder(runtime.info.spec, catalogue), GateSettings(top_k=int(top_k)))
    app = faust.App(
        f"{prefix}faust-{how}",
        broker=f"kafka://{bootstrap}",
        store="memory://",
        datadir=folder,
        topic_partitions=int(partitions),
        topic_disable_leader=True,
        consumer_auto_offset_reset="earliest",
        broker_commit_interval=2.8,
        stream_buffer_maxsize=16_384,
        stream_wait_empty=False,
        producer_linger=0.005,
        producer_compression_type="lz4",
        producer_max_batch_size=1 << 20,
        web_enabled=False,
    )
    source = app.topic(kafka.topic("candidates"), key_serializer="raw", value_serializer="raw")
    sink = app.topic(output, key_serializer="raw", value_serializer="raw")

    async def send(events: list[Any], keys: list[Any], parts: list[int]) -> None:
        for request, key, p in zip(core.process(events, parts), keys, parts, strict=True):
            await sink.send(key=key, value=encode_precompute(request), partition=p)

    if how == "take":

        @app.agent(source)
        async def take(stream: Any) -> None:
            async for batch in stream.take_events(BATCH, within=WITHIN_S):
                messages = [e.message for e in batch]
                await send(
                    [hashed_candidates(m.value) for m in messages],
                    [m.key for m in messages],
                    [m.partition for m in messages],
                )

    else:

        @app.agent(source)
        async def each(stream: Any) -> None:
            async for event in stream.events():
                m = event.message
                await send([hashed_candidates(m.value)], [m.key], [m.partition])

    return app


if __name__ == "__main__":
    app = make()
    sys.argv[1:] = ["worker", "--loglevel", "warn"]
    app.main()
