"""Good examples and near misses for each target: where the fuzzer begins."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import islice

import numpy as np

from models.bundle import MANIFEST
from models.catalogue import Catalogue
from models.features import Encoder
from models.runtime import open_runtime
from streams.embedder import Embedder
from streams.gate import Gate, GateSettings
from streams.settings import DEMO_BUNDLE
from streams.verifier import Verifier
from topics.events import Candidates, Event, encode
from topics.packed import EmbeddingChunk, encode_embedding, encode_precompute
from topics.packed_counts import CountChunk, ItemDeltas, encode_count, encode_items
from topics.simulator import preset, simulate

RANKED = (
    b'{"type":"ranked_ads","id":"i1","user":"u1","ts":1767225600000,"ads":["a",7],"positions":[1,0],"scores":[0.5,1e-3],'
    b'"sources":["direct","none"],"ages_ms":[5,null],"vm":"v@1","fm":"f@1","state":"live","received_ms":1,"ranked_ms":2,'
    b'"slots":{"direct":[5,null]}}'
)
FEATURES = (
    b'{"type":"impression","id":"i1","user":"\\u00fcser","ts":1767225600000,"ads":["a",18446744073709551615,-1],'
    b'"bids":[1,0.5,2e3],"features":{"history":["a",1],"history_ts":[-1,null],"history_kind":[1,"view"],"hour":3,'
    b'"device":"tv","x":true,"y":null},"ad_features":{"price":[1,null,"9"],"category":["c",1,false]}}'
)
STATS = (
    b'{"type":"stats","ts":1,"role":"ranker","instance":"h","pid":7,"live":true,"partitions":{"ranker":[0]},'
    b'"counters":{"ads":5}}'
)
SETTINGS = (
    b'[verifier]\ntop_k = 20\nbudget_share = 0.5\n[kafka]\nbootstrap = "a:1"\n'
    b'[kafka.properties]\n"security.protocol" = "ssl"\n'
)
FLAGS = b"verifier.top_k=20\nkafka.sasl.password=x\nstore.ttl_ms=1\nKAFKA_PROPERTIES__LINGER_MS=5\nmodel.device=cuda"
MIND = b"1\tU1\t11/14/2019 9:05:12 AM\tN1 N2\tN3-0 N4-1\n2\tU2\t11/14/2019 12:00:00 PM\t\tN3\n"
NEWS = b"N3\tsport\tsoccer\ttitle\t\t\t\t\n"
MOVIES = b"userId,movieId,rating,timestamp\n1,2,4.0,964982703\n1,3,2.5,964982704\n"


def examples() -> list[Event]:
    return list(islice(simulate(preset("tiny")), 40, 300, 13))


def found(target: str) -> list[bytes]:
    """What broke something once."""
    if target == "embedding":
        return [chunk[:6] + b"\x23\x01" + chunk[8:] for chunk in _chunks()]
    whole = gzip.compress(FEATURES * 20, mtime=0)
    return {
        "headers": [b"u1\x00{}" + b"\x00wrong_type" * 5 + b"\x007" + b"\x00x" * 9 + b"\x003"],
        "committed": [b"\xf5", b'{"kind":"solaris-store","format":1e999}', b"[" * 5_000],
        "settings": [b"x = " + b"[" * 5_000, b"x = " + b"9" * 5_000],
        "log_lines": [
            b"1\tU1\t11/14/99999999999999999999 9:05:12 AM\tN1\tN3-0\n",
            b'movieId,title,genres\n1,\xa0,x\n2,"\n',
            b"userId,movieId,rating,timestamp\n1,2,4.0,99999999999999999999\n",
        ],
        "compressed": [whole[:40] + b"\xff\xff\xff" + whole[43:]],
        "rows": [b'{"type":"item","id":"i","ts":5,"features":"' + b"[" * 5_000 + b'"}'],
    }.get(target, [])


def seeds(target: str) -> list[bytes]:
    lines = [encode(e) for e in examples()]
    if target in ("events", "scanned", "log_lines", "compressed", "rows"):
        out = [*lines, FEATURES, RANKED, b"\n".join(lines[:3]), b'{"type":"item","id":5,"ts":0}']
        if target == "log_lines":
            out += [MIND, NEWS, MOVIES]
        if target == "compressed":
            out = [
                gzip.compress(b"\n".join(lines[:2]), mtime=0),
                gzip.compress(lines[0], mtime=0)[:-9],
                b"\x28\xb5\x2f\xfd",
            ]
        if target == "rows":
            out = [
                b'{"type":"impression","id":"i","user":"u","ts":5,"items":["a"],"scores":[1],"features":"{\\"hour\\":1}",'
                b'"item_features":"{\\"price\\":[1]}"}',
                b'{"type":"feedback","id":"i","user":"u","ts":5,"items":["a"]}',
                b'{"type":"item","id":"i","ts":5,"features":"{}"}',
            ]
        return out
    if target == "keyed":
        return [b"\x02u1" + FEATURES, b"\x05user1" + lines[0], b"\x00" + lines[1], b"\x03\xff\xfe\x00{}"]
    if target == "precompute":
        return list(_requests())
    if target == "embedding":
        return list(_chunks())
    if target == "counts":
        return list(_counts())
    if target == "headers":
        return [
            b"u1\x00{}\x00wrong_type\x00what was wrong\x00solaris.candidates\x003\x0017\x001\x00\x00",
            b"u1\x00"
            + lines[0]
            + b"\x00too_large\x00\xff\x00x\x00-1\x0099999999999999999999\x002\x005\x00parked\x00\x00o",
        ]
    if target == "shown":
        packed = [*islice(_requests(), 2), *islice(_chunks(), 2), *_counts()]
        return [*lines[:4], RANKED, *packed, b"-15m", b"2019-11-14T03:00:00Z", b"1.5h", b"carry+touched:5+popular:50"]
    if target == "monitored":
        return [
            STATS,
            RANKED + b"\n" + b'{"type":"feedback","id":"i1","user":"u1","ts":5,"clicked":["a"]}',
            STATS + b"\n" + RANKED,
        ]
    if target == "committed":
        return [
            Gate(GateSettings()).dump().encode(),
            b'{"kind":"solaris-store","format":1}',
            b"SLST\x01\x00\x00\x00" + bytes(24),
            b"s1767225600000_5400000",
            b'{"kind":"solaris-neighbours","format":1,"files":{"a.npy":"00"}}',
        ]
    if target == "manifest":
        return [
            json.dumps(json.loads((DEMO_BUNDLE / MANIFEST).read_bytes())).encode()[:8000],
            b'{"dims":{"embedding":0}}',
            b'{"slots":["direct","direct"]}',
            b'{"graphs":{"vm":{"file":"../vm.onnx"}}}',
            b'{"spec":{"history_length":-1}}',
            b'{"vm":{"name":""}}',
        ]
    if target == "graph":
        return [
            (DEMO_BUNDLE / "vm_plus.onnx").read_bytes()[:3000],
            b"\x08\x08:\x00",
            b"\x08\x08\x3a\x04\x2a\x02\x70\x01",
        ]
    if target == "settings":
        return [SETTINGS, FLAGS, b"verifier = 5\n", b'[store]\nttl_ms = "x"\n']
    raise KeyError(target)


def _requests() -> Iterator[bytes]:
    runtime = open_runtime(DEMO_BUNDLE)
    verifier = Verifier(runtime, Encoder(runtime.info.spec, Catalogue(runtime.info.spec)), GateSettings(top_k=3))
    events = [e for e in simulate(preset("tiny")) if isinstance(e, Candidates)][:3]
    for q in verifier.process(events, [0] * len(events)):
        yield encode_precompute(q)


def _counts() -> Iterator[bytes]:
    items, twos = np.array([3, 9], np.uint64), np.array([1, 2], np.uint32)
    for clicked in (False, True):
        yield encode_count(CountChunk(5, 1_767_225_600_000, clicked, items[::-1].copy()))
    yield encode_items(ItemDeltas(1_767_225_600_000, items, twos, twos))


def _chunks() -> Iterator[bytes]:
    runtime = open_runtime(DEMO_BUNDLE)
    encoder = Encoder(runtime.info.spec, Catalogue(runtime.info.spec))
    verifier, embedder = Verifier(runtime, encoder, GateSettings(top_k=2)), Embedder(runtime, encoder)
    events = [e for e in simulate(preset("tiny")) if isinstance(e, Candidates)][:2]
    for chunk in embedder.states(verifier.process(events, [0] * len(events))):
        if chunk is not None:
            yield encode_embedding(chunk)
    items = np.array([3, 9], np.uint64)
    for int8 in (False, True):
        vectors = np.array([[1, -2], [3, 4]], np.int8 if int8 else np.float16)
        scales = np.array([0.5, 2.0], np.float32) if int8 else None
        half = np.zeros(2, np.float16)
        yield encode_embedding(
            EmbeddingChunk(
                5, 1_767_225_600_000, 7, 1, items, items.astype(np.uint32), vectors, scales, half, half[:1], "c1"
            )
        )
