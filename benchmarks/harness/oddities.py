"""State and impressions off the beaten track, to compare answers on: what TTL, window and the codec are there for.

Users `x0`, `x1`, ... have overlapping chunks of many ages (past TTL, past the window, later than the impression), of
two models, in float16 and int8, with and without a user state; their impressions lack bids, histories or features, or
have histories longer than the models read, items that no catalogue knows, and users of whom nothing is known.
"""

from __future__ import annotations

import msgspec
import numpy as np

from benchmarks.harness.bundle import EMBEDDING, HEAD_DIM, HEADS, PROFILE, TOWER_DIM, TOWERS
from benchmarks.harness.events import Kafka, Workload
from topics.ids import hash_id
from topics.packed import EmbeddingChunk, encode_embedding

USERS, UNKNOWN = 24, 4
POOL = 80
CHUNKS, PAIRS, IMPRESSIONS = 8, 30, 240
AGES_MIN = (1, 10, 120, 354, 366, 1200, 1434, 1446, 1800, -5)
"""minutes before the impressions: TTL is 360, the window 1,440"""


def state(workload: Workload, model: int) -> list[Kafka]:
    rng = np.random.default_rng(11)
    out = []
    for user in range(USERS):
        name = f"x{user}"
        for _ in range(CHUNKS):
            index = np.sort(rng.choice(POOL, PAIRS, replace=False))
            items = workload.hashes[index]
            order = np.argsort(items)
            int8 = rng.random() < 0.25
            vectors = rng.integers(-127, 128, (PAIRS, EMBEDDING)).astype(np.int8)
            stated = rng.random() < 0.5
            ts = workload.now_ms - 60_000 - 60_000 * int(rng.choice(AGES_MIN))
            chunk = EmbeddingChunk(
                hash_id(name), ts, model if rng.random() < 0.8 else model ^ 1, 1 + user, items[order],
                workload.topics(index)[order], vectors if int8 else (vectors / 50).astype(np.float16),
                (rng.random(PAIRS) / 50).astype(np.float32) if int8 else None,
                rng.standard_normal(HEADS * HEAD_DIM + TOWERS * TOWER_DIM if stated else 0).astype(np.float16),
                rng.standard_normal(PROFILE if stated else 0).astype(np.float16), "x",
            )  # fmt: skip
            out.append(Kafka(name.encode(), encode_embedding(chunk)))
    return out


def impressions(workload: Workload) -> list[Kafka]:
    rng = np.random.default_rng(12)
    out = []
    for k in range(IMPRESSIONS):
        user = f"x{int(rng.integers(USERS + UNKNOWN))}"
        ads = [workload.item_ids[i] for i in rng.choice(POOL + 20, int(rng.integers(1, 60)), replace=False).tolist()]
        ads += [f"unknown{k}"] * int(rng.integers(0, 3))
        features: dict[str, object] = {"hour": k % 24, "age": 3.5} if rng.random() < 0.8 else {}
        past = int(rng.integers(0, 16))
        ts = workload.now_ms - 60_000
        if past:
            features["history"] = [workload.item_ids[i] for i in rng.integers(0, POOL, past).tolist()]
            if rng.random() < 0.7:
                features["history_ts"] = [ts - 60_000 * (past - j) if j % 5 else -1 for j in range(past)]
        event = {"type": "impression", "id": f"odd{k}", "user": user, "ts": ts, "ads": ads, "features": features}
        if rng.random() < 0.7:
            event["bids"] = np.round(rng.random(len(ads)) + 0.5, 2).tolist()
        out.append(Kafka(user.encode(), msgspec.json.encode(event)))
    return out
