"""The networks, in torch: item features shared by history and items, the pair FM, the state FM, the VM.

Every module takes the sources of `models.inputs` by name, so that the exported graph's inputs are the manifest's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, one_hot, relu, softplus

from models.api import FeatureSpec
from models.kernels import COUNTERS
from models.rolling import ROLLING

KINDS = 16
"""history kinds told apart (kind % 16)"""
RECENT = 8
"""columns of `EventBasis`"""


@dataclass(frozen=True, slots=True)
class FmSize:
    """Sizes of the foundation model."""

    width: int
    hidden: int
    layers: int
    kernels: int
    category_buckets: int
    item_buckets: int
    """of learned item embeddings; 0 for none: where items are many and rows few they overfit, and the fixed codes of
    the ids tell items apart"""
    code_buckets: int = 1024
    """category values told apart by the state"""
    embedding: int = 16
    heads: int = 6
    towers: int = 4
    tower_dim: int = 32
    conversion: bool = False
    """a second head: the logit of a conversion given a click"""

    @property
    def outputs(self) -> int:
        """D: numbers of the pair embedding, the conversion logit where there is one, and the click logit last."""
        return self.embedding + self.conversion + 1


@dataclass(frozen=True, slots=True)
class VmSize:
    hidden: tuple[int, ...]
    category_buckets: int
    item_buckets: int
    strong: bool
    """sees the hand counters (matches of the ad with the request's own history)"""
    profile: int = 16
    rolling: bool = False
    """sees rolling counts (`models.rolling`)"""


class Standardise(nn.Module):
    """Numbers as sign(x) * log1p(|x|), then to mean 0 and deviation 1 of the training data, within +-5."""

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))

    def fit(self, values: Tensor) -> None:
        squashed = torch.sign(values) * torch.log1p(values.abs())
        if len(squashed):
            self.mean.copy_(squashed.mean(0))
            self.scale.copy_(1 / squashed.std(0, unbiased=False).clamp_min(1e-3))

    def forward(self, values: Tensor) -> Tensor:
        squashed = torch.sign(values) * torch.log1p(values.abs())
        return ((squashed - self.mean) * self.scale).clamp(-5, 5)


class Columns(nn.Module):
    """[*, c] feature columns of one spec side -> [*, out]: categories through small tables, numbers standardised."""

    def __init__(self, spec: FeatureSpec, side: str, buckets: int, dim: int) -> None:
        super().__init__()
        features = spec.item if side == "item" else spec.request
        self.categories = [j for j, f in enumerate(features) if f.kind == "category"]
        self.numbers = [j for j, f in enumerate(features) if f.kind == "number"]
        self.buckets = buckets
        self.tables = nn.ModuleList([nn.Embedding(buckets + 1, dim) for _ in self.categories])
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)
        self.standard = Standardise(len(self.numbers))
        self.width = len(self.categories) * dim + len(self.numbers)

    def fit(self, values: Tensor) -> None:
        if self.numbers:
            self.standard.fit(values[:, self.numbers])

    def ids(self, values: Tensor, column: int) -> Tensor:
        """0 stays "missing", the others go to 1..buckets."""
        ids = values[..., column].long()
        return torch.where(ids > 0, torch.remainder(ids, self.buckets) + 1, torch.zeros_like(ids))

    def forward(self, values: Tensor) -> Tensor:
        parts = [table(self.ids(values, j)) for table, j in zip(self.tables, self.categories, strict=True)]
        if self.numbers:
            parts.append(self.standard(values[..., self.numbers]))
        if not parts:
            return values[..., :0]
        return torch.cat(parts, dim=-1)


class Counted(nn.Module):
    """[N, len(ROLLING)] rolling counts to mean 0 and deviation 1 of the known rows of the training data; the others
    stay 0."""

    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(len(ROLLING) - 1))
        self.register_buffer("scale", torch.ones(len(ROLLING) - 1))

    def fit(self, values: Tensor) -> None:
        known = values[values[:, 0] > 0, 1:]
        if len(known):
            self.mean.copy_(known.mean(0))
            self.scale.copy_(1 / known.std(0, unbiased=False).clamp_min(1e-2))

    def forward(self, rolling: Tensor) -> Tensor:
        known = rolling[:, :1]
        return torch.cat([((rolling[:, 1:] - self.mean) * self.scale).clamp(-5, 5) * known, known], -1)


class EventBasis(nn.Module):
    """[B, L, RECENT + KINDS] what is known of each history event beside its item: age, rank, kind."""

    def __init__(self, length: int) -> None:
        super().__init__()
        rank = torch.arange(length, dtype=torch.float32)
        self.register_buffer("rank", torch.stack([1 / (1 + rank), torch.log1p(rank) / 3, (rank == 0).float()], -1))

    def forward(self, age: Tensor, kind: Tensor, mask: Tensor) -> Tensor:
        b = age.shape[0]
        rank = self.rank.unsqueeze(0).expand(b, -1, -1)
        known = (age > 0).float()
        ages = torch.stack(
            [age / 5, torch.exp(-age), torch.exp(-(age - 2).clamp_min(0)), (age - 5).clamp_min(0) / 3, known], -1
        )
        kinds = one_hot(torch.remainder(kind, KINDS), KINDS).float()
        return torch.cat([rank, ages, kinds], -1) * mask.unsqueeze(-1)


class PairFm(nn.Module):
    """Target attention and learned decay kernels over the history; embedding with the logit last.

    `project` is the PCA of the last hidden layer, fitted after training (`fit_projection`), so that the embedding is
    `embedding` uncorrelated numbers of deviation 1.
    """

    def __init__(self, spec: FeatureSpec, size: FmSize) -> None:
        super().__init__()
        d = size.width
        self.size = size
        self.item = Columns(spec, "item", size.category_buckets, 8)
        self.request = Columns(spec, "request", size.category_buckets, 4)
        if size.item_buckets:
            self.identity = nn.Embedding(size.item_buckets + 1, 8)
            nn.init.zeros_(self.identity.weight)
        self.tower = nn.Sequential(nn.Linear(self.item.width + 64, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))
        self.basis = EventBasis(spec.history_length)
        events = RECENT + KINDS
        self.event = nn.Linear(events, d)
        self.weigh = nn.Linear(events, 1 + size.kernels)
        self.queries = nn.Linear(d, d)
        self.keys_values = nn.Linear(d, 2 * d)
        self.matches = 1 + len(self.item.categories)
        cross = size.kernels * self.matches
        width = 3 * d + cross + len(COUNTERS) + self.request.width + (8 if size.item_buckets else 0)
        layers: list[nn.Module] = []
        for _ in range(size.layers):
            layers += [nn.Linear(width, size.hidden), nn.ReLU()]
            width = size.hidden
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1)
        self.register_buffer("project", torch.eye(width)[: size.embedding])
        self.register_buffer("centre", torch.zeros(width))
        if size.conversion:
            self.convert = nn.Linear(width, 1)

    def hidden(
        self, row: Tensor, item_bucket: Tensor, item_id: Tensor, item_code: Tensor, item_features: Tensor,
        counters: Tensor, request_features: Tensor, history_id: Tensor, history_code: Tensor,
        history_features: Tensor, history_age: Tensor, history_kind: Tensor, history_mask: Tensor,
    ) -> Tensor:  # fmt: skip
        """float32 [N, size.hidden], the last hidden layer. B requests, N pairs, L history entries, c item and r request
        features; float32 unless said otherwise.

        row int64 [N] (request of the pair), item_bucket and item_id int64 [N], item_code [N, 64], item_features [N, c],
        counters [N, len(COUNTERS)], request_features [B, r]; history_id int64 [B, L], history_code [B, L, 64],
        history_features [B, L, c], history_age [B, L] (log1p of minutes, 0 unknown), history_kind int64 [B, L],
        history_mask [B, L] (1 where there is an event). `models.inputs` makes them."""
        d = self.size.width
        query = self.tower(torch.cat([self.item(item_features), item_code], -1))
        past = self.tower(torch.cat([self.item(history_features), history_code], -1))
        events = self.basis(history_age, history_kind, history_mask)
        past = past + self.event(events)
        mask = history_mask.unsqueeze(-1)
        weighed = self.weigh(events)
        bias, decay = weighed[..., :1] - 30.0 * (1 - mask), softplus(weighed[..., 1:]) * mask
        # What belongs to the request is computed once and spread over its pairs in one gather.
        spread = torch.cat([self.keys_values(past), bias, decay, mask], -1).index_select(0, row)
        keys, values, bias = spread[..., :d], spread[..., d : 2 * d], spread[..., 2 * d]
        decay, present = spread[..., 2 * d + 1 : -1], spread[..., -1]
        asked = self.queries(query) * (d**-0.5)
        scores = (keys * asked.unsqueeze(1)).sum(-1) + bias
        attention = torch.softmax(scores, -1) * present
        pooled = (values * attention.unsqueeze(-1)).sum(1)
        same = [history_id.index_select(0, row) == item_id.unsqueeze(-1)]
        for j in self.item.categories:
            mine = item_features[:, j].unsqueeze(-1)
            same.append((history_features[..., j].index_select(0, row) == mine) & (mine > 0))
        cross = torch.log1p(torch.cat([(decay * m.unsqueeze(-1)).sum(1) for m in same], -1))
        wide = [query, pooled, query * pooled, cross, counters]
        if self.size.item_buckets:
            wide.append(self.identity(item_bucket))
        wide.append(self.request(request_features).index_select(0, row))
        return self.body(torch.cat(wide, -1))

    def logit(self, hidden: Tensor) -> Tensor:
        """hidden [N, size.hidden] -> [N] logits of a click."""
        return self.head(hidden).squeeze(-1)

    def converted_loss(self, hidden: Tensor, converted: Tensor) -> Tensor:
        """hidden [N, size.hidden], converted [N] of 0 and 1 -> the mean loss.

        Over all impressions, p(conversion) = p(click) x p(conversion given a click), so that the head is right on
        ads that were not clicked too (ESMM, arXiv 1804.07931). The hidden layer stays as clicks made it."""
        shown = hidden.detach()
        given_click = torch.sigmoid(self.convert(shown).squeeze(-1))
        return binary_cross_entropy(torch.sigmoid(self.logit(shown)).detach() * given_click, converted)

    def fit_projection(self, hidden: Tensor) -> None:
        """Sets `project` and `centre` from hidden [n, size.hidden] of training pairs, n >= size.embedding."""
        centre = hidden.mean(0)
        k = self.size.embedding
        if hidden.shape[1] <= 256:
            _, deviation, axes = torch.linalg.svd(hidden - centre, full_matrices=False)
        else:  # a full decomposition of a wide layer takes minutes; the leading axes are all that is used
            _, deviation, axes = torch.svd_lowrank(hidden - centre, q=k + 8, niter=4)
            axes = axes.T
        scale = (len(hidden) ** 0.5) / deviation[:k].clamp_min(1e-3 * float(deviation[0]))
        self.project.copy_(axes[:k] * scale.unsqueeze(-1))
        self.centre.copy_(centre)

    def forward(self, *sources: Tensor) -> Tensor:
        """The arguments of `hidden` -> float32 [N, size.embedding + 1], the logit of a click last; with
        `size.conversion` one more, the logit of a conversion given a click, next to last."""
        hidden = self.hidden(*sources)
        vector = ((hidden - self.centre) @ self.project.T).clamp(-20, 20)
        parts = [vector, self.convert(hidden)] if self.size.conversion else [vector]
        return torch.cat([*parts, self.head(hidden)], -1)


class StateFm(nn.Module):
    """Late split: `state` needs the history only, `vector` the item only, and their dots are the VM's state slot.

    Heads: sum over the history of a learned weight (age, rank, kind) x the fixed code of the event's item. Towers: the
    same over fixed codes of each item category (the first towers) plus a learned part.
    """

    def __init__(self, spec: FeatureSpec, size: FmSize) -> None:
        super().__init__()
        self.size = size
        self.columns = Columns(spec, "item", size.code_buckets, size.tower_dim)
        for table in self.columns.tables:
            with torch.no_grad():
                sign = torch.randint(0, 2, table.weight.shape).float() * 2 - 1
                table.weight.copy_(sign / size.tower_dim**0.5)
                table.weight[0] = 0
            table.weight.requires_grad_(False)
        self.basis = EventBasis(spec.history_length)
        events = RECENT + KINDS
        self.head_weight = nn.Linear(events, size.heads)
        self.tower_weight = nn.Linear(events, size.towers)
        wide = size.towers * size.tower_dim
        self.user_side = nn.Linear(self.columns.width, wide, bias=False)
        self.item_side = nn.Linear(self.columns.width, wide, bias=False)
        with torch.no_grad():
            for side in (self.user_side, self.item_side):
                side.weight.mul_(0.1)
                for g in range(min(size.towers, len(self.columns.categories))):
                    block = slice(g * size.tower_dim, (g + 1) * size.tower_dim)
                    side.weight[block, block] += torch.eye(size.tower_dim)
        self.readout = nn.Sequential(nn.Linear(size.heads + size.towers, 32), nn.ReLU(), nn.Linear(32, 1))

    def state(
        self, history_code: Tensor, history_features: Tensor, history_age: Tensor, history_kind: Tensor,
        history_mask: Tensor,
    ) -> Tensor:  # fmt: skip
        """history_code [B, L, 64], history_features [B, L, c], history_age [B, L], history_kind int64 [B, L],
        history_mask [B, L] -> float32 [B, heads * 64 + towers * tower_dim], heads first."""
        events = self.basis(history_age, history_kind, history_mask)
        mask = history_mask.unsqueeze(-1)
        heads = torch.bmm((softplus(self.head_weight(events)) * mask).transpose(1, 2), history_code)
        towers = self.user_side(self.columns(history_features))
        towers = towers.unflatten(-1, (self.size.towers, self.size.tower_dim))
        weights = (softplus(self.tower_weight(events)) * mask).unsqueeze(-1)
        return torch.cat([heads.flatten(1), (towers * weights).sum(1).flatten(1)], -1)

    def vector(self, item_code: Tensor, item_features: Tensor) -> Tensor:
        """item_code [M, 64], item_features [M, c] -> float32 [M, 64 + towers * tower_dim]."""
        return torch.cat([item_code, self.item_side(self.columns(item_features))], -1)

    def dots(self, state: Tensor, vector: Tensor, row: Tensor) -> Tensor:
        """state [B, S], vector [N, V] of each pair's item, row int64 [N] -> [N, heads + towers]: what `Runtime.dots`
        computes."""
        heads, wide = self.size.heads, self.size.heads * 64
        mine = state.index_select(0, row)
        repeats = (mine[:, :wide].unflatten(-1, (heads, 64)) * vector[:, :64].unsqueeze(1)).sum(-1)
        towers = (mine[:, wide:] * vector[:, 64:]).unflatten(-1, (self.size.towers, self.size.tower_dim)).sum(-1)
        return torch.cat([torch.sign(repeats) * torch.log1p(repeats.abs()), towers], -1)

    def forward(self, *sources: Tensor) -> Tensor:
        """As `state`."""
        return self.state(*sources)


class ItemSide(nn.Module):
    """`fm_item` as a module of its own, for export."""

    def __init__(self, fm: StateFm) -> None:
        super().__init__()
        self.fm = fm

    def forward(self, item_code: Tensor, item_features: Tensor) -> Tensor:
        return self.fm.vector(item_code, item_features)


class ItemSideWithTopics(ItemSide):
    """`fm_item` that also says the topic of each item, from a table by hashed id (`models.topics`)."""

    topics: Tensor

    def __init__(self, fm: StateFm, topics: Tensor) -> None:
        super().__init__(fm)
        self.register_buffer("topics", topics)

    def forward(self, item_bucket: Tensor, item_code: Tensor, item_features: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.fm.vector(item_code, item_features), self.topics.index_select(0, item_bucket)


class Vm(nn.Module):
    """Base VM: hashed ids, request features, counts; (logit, user profile). The first layer is split between request
    and pair, so that what belongs to the request is computed once."""

    def __init__(self, spec: FeatureSpec, size: VmSize) -> None:
        super().__init__()
        self.size = size
        self.item = Columns(spec, "item", size.category_buckets, 8)
        self.request = Columns(spec, "request", size.category_buckets, 4)
        self.item_id = nn.Embedding(size.item_buckets + 1, 8)
        nn.init.zeros_(self.item_id.weight)
        counted = (len(COUNTERS) if size.strong else 0) + (len(ROLLING) if size.rolling else 0)
        self.counted = Counted() if size.rolling else None
        self.pair = nn.Linear(self.item.width + 8 + counted, size.hidden[0])
        self.user = nn.Linear(self.request.width + self.item.width, size.hidden[0], bias=False)
        layers: list[nn.Module] = []
        for a, z in zip(size.hidden[:-1], size.hidden[1:], strict=True):
            layers += [nn.Linear(a, z), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(size.hidden[-1], 1)
        self.soft = nn.Linear(size.hidden[-1], 1)
        """auxiliary head for the FM's soft labels: training only, not exported"""
        self.profile = nn.Linear(self.item.width, size.profile)

    def trunk(
        self, row: Tensor, item_bucket: Tensor, item_features: Tensor, counters: Tensor,
        request_features: Tensor, history_features: Tensor, history_mask: Tensor, rolling: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """row, item_bucket int64 [N], item_features [N, c], counters [N, len(COUNTERS)], request_features [B, r],
        history_features [B, L, c], history_mask [B, L], rolling [N, len(ROLLING)] where the VM sees counts ->
        ([N, size.hidden[-1]], [B, size.profile])."""
        mask = history_mask.unsqueeze(-1)
        taste = (self.item(history_features) * mask).sum(1) / mask.sum(1).clamp_min(1)
        user = self.user(torch.cat([self.request(request_features), taste.detach()], -1))
        parts = [self.item(item_features), self.item_id(item_bucket)]
        parts.append(counters if self.size.strong else counters[:, :0])
        if self.counted is not None and rolling is not None:
            parts.append(self.counted(rolling))
        hidden = relu(self.pair(torch.cat(parts, -1)) + user.index_select(0, row))
        return self.body(hidden), self.profile(taste)

    def forward(self, *sources: Tensor) -> tuple[Tensor, Tensor]:
        """The arguments of `trunk` -> float32 ([N] logits of a click, [B, size.profile] profiles)."""
        hidden, profile = self.trunk(*sources)
        return self.head(hidden).squeeze(-1), profile


class VmPlus(nn.Module):
    """The base logit plus a correction from the slots. Whether any slot is filled is decided outside (gating).

    A slot that is a minute old says much when the user has done nothing since, and little when there are newer events
    that it has not seen. The request's own history tells the two apart: `missed` is how long before the user's last
    event the slot was computed. Without it a VM is misled as soon as vectors come later than in training.

    ages: the age column of every slot among the slot columns (its flag is the column before).
    """

    def __init__(self, spec: FeatureSpec, width: int, size: VmSize, ages: Sequence[int]) -> None:
        super().__init__()
        self.size = size
        self.ages = list(ages)
        self.flags = [a - 1 for a in ages]
        self.item = Columns(spec, "item", size.category_buckets, 4)
        self.standard = Standardise(width)
        counted = (len(COUNTERS) if size.strong else 2) + (len(ROLLING) if size.rolling else 0)
        self.counted = Counted() if size.rolling else None
        self.body = nn.Sequential(
            nn.Linear(width + 1 + counted + self.item.width + 2 * len(self.ages), 64), nn.ReLU(),
            nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1),
        )  # fmt: skip
        with torch.no_grad():
            self.body[-1].weight.mul_(0.1)
            self.body[-1].bias.zero_()

    def forward(
        self, base_logit: Tensor, slots: Tensor, counters: Tensor, item_features: Tensor,
        rolling: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """base_logit [N] of `Vm`, slots [N, width] (`models.inputs.slot_columns`), counters [N, len(COUNTERS)],
        item_features [N, c], rolling [N, len(ROLLING)] where the VM sees counts -> float32 [N] logits."""
        # counters[:, -1] is log1p of the minutes, slot ages are log1p of the seconds
        last_event_s = 60 * (torch.exp(counters[:, -1:]) - 1)  # ONNX has no expm1
        missed_s = (torch.exp(slots[:, self.ages].clamp(0, 15)) - 1 - last_event_s).clamp_min(0)
        missed = torch.log1p(missed_s) * slots[:, self.flags]
        parts = [self.standard(slots), base_logit.clamp(-15, 15).unsqueeze(-1), self.item(item_features)]
        parts += [missed / 5, (missed > 0.7).float(), counters if self.size.strong else counters[:, -2:]]
        if self.counted is not None and rolling is not None:
            parts.append(self.counted(rolling))
        return base_logit + self.body(torch.cat(parts, -1)).squeeze(-1)
