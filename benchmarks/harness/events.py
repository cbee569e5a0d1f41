"""The workload as records: a catalogue, candidates of 100 items, impressions of 50 ads, warm state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from benchmarks.harness.bundle import EMBEDDING, HEAD_DIM, HEADS, HISTORY, PROFILE, SPEC, TOWER_DIM, TOWERS
from topics.ids import hash_id
from topics.packed import EmbeddingChunk, PrecomputeRequest, encode_embedding, encode_precompute

CATALOGUE = 20_000
CANDIDATES = 100
ADS = 50
LIVE_PER_USER = 100
"""live pairs a user has in the warm state, in two chunks"""
CATEGORIES = 40
_TEXT = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Kafka:
    """A record to be produced."""

    key: bytes
    value: bytes


class Workload:
    """Deterministic for a seed but for the clock: event times lie in the hour before `now_ms`."""

    def __init__(self, seed: int = 0, now_ms: int | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.now_ms = now_ms if now_ms is not None else int(time.time() * 1000)
        self.item_ids = [f"N{k}" for k in range(CATALOGUE)]
        self.hashes = np.array([hash_id(i) for i in self.item_ids], np.uint64)

    def catalogue(self) -> Iterator[Kafka]:
        for k, item in enumerate(self.item_ids):
            x = k % 97 / 97
            features = {
                "category": f"c{k % CATEGORIES}", "price": round(10 * x, 3), "ctr": x / 10, "size": k % 3,
                "rank": k % 11, "quality": round(1 - x, 3),
            }  # fmt: skip
            yield Kafka(item.encode(), _TEXT({"type": "item", "id": item, "ts": 0, "features": features}))

    def candidates(self, n: int, users: int, name: str = "c") -> list[Kafka]:
        out = []
        for k in range(n):
            user = f"u{int(self.rng.integers(users))}"
            items = self.rng.choice(CATALOGUE, CANDIDATES, replace=False)
            ts = self.now_ms - 1_800_000 + k
            event = {
                "type": "candidates", "id": f"{name}{k}", "user": user, "ts": ts, "features": self._features(ts),
                "items": [self.item_ids[i] for i in items.tolist()],
            }  # fmt: skip
            out.append(Kafka(user.encode(), _TEXT(event)))
        return out

    def own_items(self, user: int) -> np.ndarray:
        """Catalogue indices of the pairs that user has embeddings of in the warm state."""
        return (user * 7919 + np.arange(LIVE_PER_USER) * 151) % CATALOGUE

    def impressions(self, n: int, users: int, name: str = "i") -> list[Kafka]:
        """Half of the ads are direct hits in the warm state of as many users."""
        out = []
        for k in range(n):
            user = int(self.rng.integers(users))
            own = self.own_items(user)[self.rng.choice(LIVE_PER_USER, ADS // 2, replace=False)]
            others = self.rng.integers(0, CATALOGUE, ADS - ADS // 2)
            ads = self.rng.permutation(np.concatenate([own, others])).tolist()
            ts = self.now_ms - 60_000 + k % 50_000
            event = {
                "type": "impression", "id": f"{name}{k}", "user": f"u{user}", "ts": ts,
                "ads": [self.item_ids[i] for i in ads], "bids": np.round(self.rng.random(ADS) + 0.5, 2).tolist(),
                "features": self._features(ts),
            }  # fmt: skip
            out.append(Kafka(f"u{user}".encode(), _TEXT(event)))
        return out

    def state(self, users: int, model: int) -> Iterator[Kafka]:
        """Two chunks of 50 pairs and one of the user's state, for each user; event times 1 to 2 hours ago."""
        pool = self.rng.standard_normal((512, LIVE_PER_USER, EMBEDDING)).astype(np.float16)
        states = self.rng.standard_normal((256, HEADS * HEAD_DIM + TOWERS * TOWER_DIM)).astype(np.float16)
        profiles = self.rng.standard_normal((256, PROFILE)).astype(np.float16)
        none = np.zeros(0, np.float16)
        begin = self.now_ms - 2 * 3_600_000
        half = LIVE_PER_USER // 2
        for user in range(users):
            index = self.own_items(user)
            key, h = f"u{user}".encode(), hash_id(f"u{user}")
            ts = begin + user * 3_600_000 // max(users, 1)
            for part in (slice(0, half), slice(half, None)):
                items = self.hashes[index[part]]
                order = np.argsort(items)
                topics = self.topics(index[part])[order]
                chunk = EmbeddingChunk(
                    h, ts, model, 1, items[order], topics, pool[user % 512, part], None, none, none, f"s{user}"
                )
                yield Kafka(key, encode_embedding(chunk))
            empty = EmbeddingChunk(
                h, ts, model, 1, np.zeros(0, np.uint64), np.zeros(0, np.uint32),
                np.zeros((0, EMBEDDING), np.float16), None, states[user % 256], profiles[user % 256], f"s{user}",
            )  # fmt: skip
            yield Kafka(key, encode_embedding(empty))

    def requests(self, n: int, pairs: int, users: int) -> list[Kafka]:
        """Packed precompute requests, each with a history of its own, so that no pair is saved."""
        out = []
        for k in range(n):
            user = f"u{k % users}"
            items = self.hashes[self.rng.choice(CATALOGUE, pairs, replace=False)]
            history = self.hashes[self.rng.integers(0, CATALOGUE, HISTORY)]
            ts = self.now_ms - 600_000 + k
            request = PrecomputeRequest(
                hash_id(user), ts, SPEC.hash(), items, self.rng.random(pairs, np.float32),
                self.rng.random((len(SPEC.item), pairs), np.float32), history,
                ts - np.arange(HISTORY, 0, -1) * 60_000, np.zeros(HISTORY, np.uint8),
                self.rng.random(len(SPEC.request), np.float32), self.rng.random(PROFILE, np.float32), f"r{k}",
            )  # fmt: skip
            out.append(Kafka(user.encode(), encode_precompute(request)))
        return out

    def _features(self, ts: int) -> dict[str, object]:
        past = self.rng.integers(0, CATALOGUE, HISTORY).tolist()
        return {
            "hour": ts // 3_600_000 % 24, "age": 3.5, "visits": int(past[0]) % 9, "depth": 0.5,
            "history": [self.item_ids[i] for i in past],
            "history_ts": [ts - (HISTORY - j) * 60_000 for j in range(HISTORY)],
        }  # fmt: skip

    def topics(self, index: np.ndarray) -> np.ndarray:
        """uint32 topic ids of items, by catalogue index."""
        if not hasattr(self, "_topic_of"):
            one = [1 + hash_id(f"c{k}") % (1 << 20) for k in range(CATEGORIES)]
            self._topic_of = np.array(one, np.uint32)
        return self._topic_of[index % CATEGORIES]
