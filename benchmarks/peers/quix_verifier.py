"""The verifier's core in a Quix Streams application: the same model, columns, gate and record.

    python benchmarks/peers/quix_verifier.py BOOTSTRAP PREFIX BUNDLE PARTITIONS OUTPUT GUARANTEE DIR TOP_K

Event by event, as a `StreamingDataFrame` works: it has no batches without windows. Bytes in and out, so that Quix does
no serialisation of its own; a commit a second; compressed producer with a linger, as its docs advise.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from quixstreams import Application, message_context  # noqa: E402

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


def main() -> None:
    bootstrap, prefix, bundle, partitions, output, how, folder, top_k = sys.argv[1:9]
    kafka = KafkaSettings(bootstrap=bootstrap, prefix=prefix, partitions=int(partitions))
    runtime = open_runtime(bundle)
    catalogue = Catalogue(runtime.info.spec)
    catalogue.update(
        decode_item(r.value or b"") for r in records(kafka, "items", start="beginning", follow=False) if r is not None
    )
    core = Verifier(runtime, Encoder(runtime.info.spec, catalogue), GateSettings(top_k=int(top_k)))
    app = Application(
        broker_address=bootstrap,
        consumer_group=f"{prefix}quix-{how}",
        auto_offset_reset="earliest",
        processing_guarantee=how.replace("_", "-"),
        commit_interval=1.0,
        state_dir=folder,
        auto_create_topics=False,
        loglevel="WARNING",
        producer_extra_config={"linger.ms": 5, "compression.type": "lz4"},
        consumer_extra_config={"fetch.message.max.bytes": 8 << 20},
    )
    source = app.topic(kafka.topic("candidates"), key_deserializer="bytes", value_deserializer="bytes")
    sink = app.topic(output, key_serializer="bytes", value_serializer="bytes")

    def verify(value: bytes) -> bytes:
        request = core.process([hashed_candidates(value)], [message_context().partition])[0]
        return encode_precompute(request)

    app.dataframe(source).apply(verify).to_topic(sink)
    app.run()


if __name__ == "__main__":
    main()
