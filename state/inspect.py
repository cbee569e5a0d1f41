"""What is in a state directory: numbers for people and scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from state import metadata, segments
from state.api import StoreSettings
from state.store import RocksStore, open_store
from topics.errors import StoreError, StoreFormatError
from topics.packed import EmbeddingChunk, decode_embedding
from topics.packed_counts import KIND_COUNT


def partitions(directory: Path) -> list[Path]:
    """The directory itself when it is a store, else the stores below it, in the order of the numbers in their names."""
    if not directory.is_dir():
        raise StoreError(f"{directory} is not a directory. Give a state directory, or the folder that holds them")
    if metadata.check_mark(directory):
        return [directory]
    found = sorted({m.parent for m in directory.rglob(metadata.MARK)}, key=_natural)
    if not found:
        raise StoreFormatError(f"{directory} is no Solaris store and holds none")
    return found


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def inspect_store(path: Path, settings: StoreSettings) -> dict[str, Any]:
    """One partition. Opens it, so it must not be in use; changes nothing in it."""
    store = open_store(path, settings)
    try:
        now = max(store.clock_ms, 0)
        times = segments.Times.of(settings)
        by_segment: dict[str, dict[str, int]] = {}
        users: set[int] = set()
        models: dict[str, int] = {}
        total = {"chunks": 0, "pairs": 0, "live_pairs": 0, "expired_pairs": 0, "payload_bytes": 0}
        for name, user, ts, _, value in store.scan():
            counts = value[3] == KIND_COUNT
            n = int.from_bytes(value[24:28] if counts else value[40:44], "little")
            segment = by_segment.setdefault(name, {"chunks": 0, "pairs": 0, "bytes": 0})
            segment["chunks"] += 1
            segment["pairs"] += n
            segment["bytes"] += len(value)
            users.add(user)
            model = "none (counts)" if counts else f"{int.from_bytes(value[24:32], 'little'):016x}"
            models[model] = models.get(model, 0) + 1
            total["chunks"] += 1
            total["pairs"] += n
            total["live_pairs" if now < ts + (times.window if counts else times.ttl) else "expired_pairs"] += n
            total["payload_bytes"] += len(value)
        return {
            "path": str(path),
            "position": store.position,
            "clock_ms": store.clock_ms,
            "disk_bytes": store.stats()["disk_bytes"],
            "users": len(users),
            **total,
            "models": models,
            "segments": [{"name": name, **counts} for name, counts in by_segment.items()],
        }
    finally:
        store.close()


def inspect_user(path: Path, user: int, settings: StoreSettings) -> dict[str, Any]:
    """Every pair of one user with its age at the store's clock, newest chunk first, and the aggregate's norm. A store
    of count chunks has none."""
    store = open_store(path, settings)
    try:
        now = max(store.clock_ms, 0)
        chunks = sorted(_chunks_of(store, user), key=lambda c: (c[1].ts_ms, c[0]), reverse=True)
        pairs, seen, lasting = [], set(), []
        for offset, c in chunks:
            for i, item in enumerate(c.items.tolist()):
                key = (c.model, item)
                newest = key not in seen
                seen.add(key)
                age = now - c.ts_ms
                vector = c.vectors[i].astype(np.float32) * (1 if c.scales is None else c.scales[i])
                if newest and age < settings.window_ms and c.model == chunks[0][1].model:
                    lasting.append(vector)
                pairs.append(
                    {
                        "item": f"{item:016x}", "topic": int(c.topics[i]), "ts_ms": c.ts_ms, "age_ms": age,
                        "live": age < settings.ttl_ms, "newest": newest, "model": f"{c.model:016x}", "offset": offset,
                        "norm": float(np.linalg.norm(vector)),
                    }
                )  # fmt: skip
        states = [c.ts_ms for _, c in chunks if len(c.state)]
        return {
            "path": str(path),
            "user": f"{user:016x}",
            "clock_ms": store.clock_ms,
            "chunks": len(chunks),
            "state_age_ms": now - states[0] if states else None,
            "aggregate_pairs": len(lasting),
            "aggregate_norm": float(np.linalg.norm(np.mean(lasting, axis=0))) if lasting else 0.0,
            "pairs": pairs,
        }
    finally:
        store.close()


def _chunks_of(store: RocksStore, user: int) -> Iterator[tuple[int, EmbeddingChunk]]:
    for _, u, _, offset, value in store.scan():
        if u == user and value[3] != KIND_COUNT:
            yield offset, decode_embedding(value)
