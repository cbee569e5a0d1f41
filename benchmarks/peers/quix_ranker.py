"""The ranker's join in a Quix Streams application: our ranker's core for the models, Quix for streams and state.

    python benchmarks/peers/quix_ranker.py CONFIG.json

`embeddings` and `impressions` are concatenated, which is Quix's way to let two topics of one key share a state: a
stateful function keeps each user's chunks as one value of the RocksDB store (with its changelog topic) and ranks from
them, event by event, as a `StreamingDataFrame` works. Bytes in and out, so that Quix does no serialisation of its own;
a commit a second; compressed producer with a linger, as its docs advise.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from quixstreams import Application, State, message_context  # noqa: E402

from benchmarks.peers.chunk_list import OneUser, add  # noqa: E402
from models.catalogue import Catalogue  # noqa: E402
from models.features import Encoder  # noqa: E402
from models.runtime import open_runtime  # noqa: E402
from state.api import EmbeddingStore, StoreSettings  # noqa: E402
from streams.ranker import Ranker  # noqa: E402
from topics.events import Impression, decode_impression, decode_item, encode  # noqa: E402
from topics.kafka import KafkaSettings  # noqa: E402
from topics.tail import records  # noqa: E402

STATE = "chunks"


def main() -> None:
    config: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    kafka = KafkaSettings(
        bootstrap=config["bootstrap"], prefix=config["prefix"], partitions=int(config["partitions"])
    )  # fmt: skip
    settings = StoreSettings(ttl_ms=config["ttl_ms"], window_ms=config["window_ms"])
    runtime = open_runtime(config["bundle"])
    catalogue = Catalogue(runtime.info.spec)
    items = [
        decode_item(r.value or b"") for r in records(kafka, "items", start="beginning", follow=False) if r is not None
    ]
    catalogue.update(items)
    ranker = Ranker(runtime, Encoder(runtime.info.spec, catalogue))
    # The core makes an item's vector when it first ranks it, for a batch at a time. Event by event that is slow, so all
    # are made before the first one.
    for k in range(0, len(items), 1000):
        every = Impression("warm", "warm", 0, [item.id for item in items[k : k + 1000]])
        ranker.rank([every], [0], {0: cast(EmbeddingStore, OneUser(b"", settings))})
    exactly_once = config["guarantee"] != "at_least_once"
    app = Application(
        broker_address=config["bootstrap"],
        consumer_group=config["application_id"],
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once" if exactly_once else "at-least-once",
        commit_interval=1.0,
        state_dir=config["state_dir"],
        loglevel="WARNING",
        producer_extra_config={"linger.ms": 5, "compression.type": "lz4"},
        consumer_extra_config={"fetch.message.max.bytes": 8 << 20},
    )
    embeddings, impressions, sink = (
        app.topic(
            config[name], key_deserializer="bytes", value_deserializer="bytes",
            key_serializer="bytes", value_serializer="bytes",
        )
        for name in ("embeddings", "impressions", "ranked_ads")
    )  # fmt: skip

    def work(value: bytes, state: State) -> bytes | None:
        context = message_context()
        if context.topic == config["embeddings"]:
            state.set_bytes(STATE, add(state.get_bytes(STATE, b""), value, settings))
            return None
        received_ms = int(time.time() * 1000)
        event = decode_impression(value)
        store = cast(EmbeddingStore, OneUser(state.get_bytes(STATE, b""), settings))
        ranking = ranker.rank([event], [context.partition], {context.partition: store})
        answers = ranker.answers([event], ranking, [received_ms], int(time.time() * 1000), [False])
        return encode(answers[0])

    both = app.dataframe(embeddings).concat(app.dataframe(impressions))
    both.apply(work, stateful=True).filter(lambda value: value is not None).to_topic(sink)
    app.run()


if __name__ == "__main__":
    main()
