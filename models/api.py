"""What the pipeline and a model say to each other: arrays in, arrays out.

Shapes: B requests (one user each), N pairs over all requests (`splits[b]:splits[b+1]` are request b's), H history
entries likewise, D embedding numbers of a pair (the last one is the FM's logit), S user-state numbers, V item-vector
numbers, K dots. Ids are uint64 hashes (`topics.ids`), times int64 ms, everything else float32 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from state.counts import Counts
from topics.ids import hash_id

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]

SLOTS = ("direct", "topic", "state", "aggregate", "similar")
"""Slots in order of worth: the first one filled names an ad's source."""
SOURCES = (*SLOTS, "none")
NO_SCORE = np.float32(-50)
"""Stands for a logit that is not a number (features are other people's): a pCTR of 0, last of its list."""

CATEGORY_BUCKETS = 1 << 20


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One input column. Numbers pass as they are (missing: 0). Categories become 1 + xxh3 % 2**20 (missing: 0), which a
    float32 holds exactly."""

    name: str
    kind: Literal["number", "category"] = "number"


class FeatureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which features of the events and the catalogue a bundle reads, in column order.

    An item feature is looked up in the event's own columns first (`item_features`, `ad_features`), then in the
    catalogue (`item` records), else it is missing. Kept in the bundle's manifest.
    """

    request: tuple[Feature, ...] = ()
    item: tuple[Feature, ...] = ()
    history_length: int = 20
    """newest history entries used"""
    topic: str | None = None
    """item feature (a category) that is the item's topic; None: `fm_item` yields topics from item vectors"""

    def hash(self) -> int:
        return hash_id(msgspec.json.encode(self).decode())


@dataclass(slots=True)
class PairBatch:
    """Requests with their pairs, in columns. Whoever fills it (decoder, backtest, training) uses
    `models.features`, so that a feature means the same everywhere."""

    users: U64
    """[B]"""
    ts_ms: I64
    """[B] event time"""
    splits: I64
    """[B+1]"""
    items: U64
    """[N]"""
    item_features: F32
    """[c, N], columns of `FeatureSpec.item`"""
    request_features: F32
    """[B, r], columns of `FeatureSpec.request`"""
    history: U64
    """[H], oldest first in each request"""
    history_ts: I64
    """[H], -1 unknown"""
    history_kind: U8
    """[H]"""
    history_splits: I64
    """[B+1]"""
    history_features: F32 = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """[c, H] catalogue features of the history's items, columns of `FeatureSpec.item`"""

    @property
    def requests(self) -> int:
        return len(self.users)

    @property
    def pairs(self) -> int:
        return len(self.items)


@dataclass(slots=True)
class Slots:
    """What is known of each pair beside the VM's own features. An age of -1 says that the slot is empty; its
    numbers are then zero."""

    direct: F32
    """[N, D] the pair's embedding"""
    direct_age_ms: I64
    """[N]"""
    topic: F32
    """[N, D] mean over the user's live pairs of the ad's topic"""
    topic_age_ms: I64
    topic_count: F32
    """[N]"""
    state: F32
    """[N, K] dots of the newest user state with the ad's item vector"""
    state_age_ms: I64
    aggregate: F32
    """[N, D] mean over all the user's live pairs of the window"""
    aggregate_age_ms: I64
    aggregate_count: F32
    similar: F32
    """[N, D] weighted mean of similar users' aggregates"""
    similar_age_ms: I64
    similar_score: F32
    """[N] similarity of the neighbours used, 0 where empty"""

    @classmethod
    def empty(cls, n: int, dim: int, dots: int) -> Slots:
        def ages() -> I64:
            return np.full(n, -1, np.int64)

        def wide(k: int) -> F32:
            return np.zeros((n, k), np.float32)

        def column() -> F32:
            return np.zeros(n, np.float32)

        return cls(
            wide(dim), ages(), wide(dim), ages(), column(), wide(dots), ages(), wide(dim), ages(), column(),
            wide(dim), ages(), column(),
        )  # fmt: skip

    def ages(self) -> I64:
        """[5, N] in the order of `SLOTS`."""
        return np.stack(
            [self.direct_age_ms, self.topic_age_ms, self.state_age_ms, self.aggregate_age_ms, self.similar_age_ms]
        )


@dataclass(slots=True)
class FilledSlots:
    """`Slots` in the form that the ranker wants: what `vm_plus` is fed with, and what names each pair's source."""

    columns: F32
    """[N, W] `models.inputs.slot_columns`"""
    ages_ms: I64
    """[5, N] in the order of `SLOTS`, -1 empty"""
    source: npt.NDArray[np.int8]
    """[N] first slot filled, as an index into `SOURCES`"""
    age_ms: I64
    """[N] age of that slot, -1 for none"""


@dataclass(slots=True)
class VmScores:
    logit: F32
    """[N] base score; pCTR = sigmoid(logit)"""
    profile: F32
    """[B, p] user vector for neighbours, p may be 0"""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    vm: str
    """VM name and version, for outputs"""
    fm: str
    fm_hash: int
    """uint64; vectors of different values never meet"""
    spec: FeatureSpec
    dim: int
    """D"""
    state_dim: int
    """S, 0 when the bundle has no `fm_user`"""
    item_dim: int
    """V"""
    dots: int
    """K"""
    profile_dim: int
    """p"""
    slots: tuple[str, ...] = SLOTS
    """slots that `vm_plus` was trained with; the others stay empty"""
    rolling: bool = False
    """whether the VM was trained with rolling counts and `score` should be given them"""
    count_lag_ms: int | None = None
    """the lag they were trained with, where the bundle says so"""
    extra: dict[str, Any] = field(default_factory=dict)


class Runtime(Protocol):
    """A loaded bundle on one device. Methods may be called from one thread at a time; all are deterministic for the
    same inputs, batch composition and device."""

    info: ModelInfo
    device: str
    """what the session really runs on: "cpu" or "cuda:0" """
    non_finite: int
    """numbers of the graphs that were not finite and were replaced, since the start"""

    def score(self, batch: PairBatch, counts: Counts | None = None) -> VmScores:
        """Base VM over all pairs. `counts` of these pairs as of `batch.ts_ms` are heeded where `info.rolling`; None:
        unknown."""
        ...

    def user_state(self, batch: PairBatch) -> F32:
        """[B, S] one cheap FM user-tower pass per request; [B, 0] without `fm_user`."""
        ...

    def embed(self, batch: PairBatch) -> F32:
        """[N, D] FM pair embeddings, the logit last. The heavy call."""
        ...

    def item_vectors(self, items: U64, item_features: F32) -> tuple[F32, U32]:
        """items [M], item_features [c, M] -> vectors [M, V], topic ids [M]."""
        ...

    def dots(self, state: F32, item_vectors: F32, splits: I64, rows: I32 | None = None) -> F32:
        """state [B, S] against the item vector of each request's pairs -> [N, K]. item_vectors [N, V], or [M, V] with
        the row of each pair in `rows` [N]."""
        ...

    def score_plus(self, batch: PairBatch, slots: Slots | FilledSlots, counts: Counts | None = None) -> F32:
        """[N] logits with the slots; a pair whose slots are all empty gets exactly `score`'s logit (gating)."""
        ...

    def score_both(self, batch: PairBatch, slots: Slots | FilledSlots, counts: Counts | None = None) -> tuple[F32, F32]:
        """[N] `score`'s logits and `score_plus`'s."""
        ...

    def warm_up(self) -> None: ...

    def close(self) -> None: ...
