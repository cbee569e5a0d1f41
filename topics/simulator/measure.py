"""What a simulated log is like: figures of docs/simulator.md, from the log and its truth alone (numpy only).

The losses are of the last quarter of the impressions; the logistic models are fitted on the rest. They are quick checks
of how far apart an oracle, a model that sees the history and one that does not can be, not the project's models.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from topics.events import Candidates, Event, Feedback, Impression, Item
from topics.simulator.config import HOUR_MS

F64 = npt.NDArray[np.float64]
BASE = ("item_ctr", "advertiser_ctr", "user_ctr", "log_price", "position", "desktop")
MATCH = (
    "sub", "topic", "advertiser", "newest_sub", "second_sub", "fresh_sub", "touched", "touched_lately", "price_gap",
    "newest_x_item", "shown_before",
)  # fmt: skip


@dataclass(slots=True)
class Rolling:
    """Clicks and impressions so far of one thing."""

    clicks: float = 0.0
    shown: float = 0.0

    def logit(self, prior: float, weight: float) -> float:
        p = (self.clicks + prior * weight) / (self.shown + weight)
        return float(np.log(p / (1.0 - p)))


@dataclass(slots=True)
class _Pass:
    """One reading of a log."""

    items: dict[str, tuple[str, str, str, float]] = field(default_factory=dict)
    base: list[list[float]] = field(default_factory=list)
    match: dict[float, list[list[float]]] = field(default_factory=dict)
    """by the delay of the history, seconds"""
    clicked: list[bool] = field(default_factory=list)
    pending: dict[str, tuple[int, Impression]] = field(default_factory=dict)
    lists: dict[str, deque[tuple[int, frozenset[Any]]]] = field(default_factory=lambda: defaultdict(deque))
    item_ctr: dict[Any, Rolling] = field(default_factory=lambda: defaultdict(Rolling))
    advertiser_ctr: dict[str, Rolling] = field(default_factory=lambda: defaultdict(Rolling))
    user_ctr: dict[str, Rolling] = field(default_factory=lambda: defaultdict(Rolling))
    pair_shown: Counter[tuple[str, Any]] = field(default_factory=Counter)
    ages: list[float] = field(default_factory=list)
    """hours since the newest candidates event with the pair; inf where there is none"""
    begin: int = -1
    gaps: list[int] = field(default_factory=list)
    last_seen: dict[str, int] = field(default_factory=dict)
    life: dict[Any, tuple[int, int]] = field(default_factory=dict)


def measure(events: Iterable[Event], truth: F64 | None = None, delays_s: Iterable[float] = (0.0,)) -> dict[str, float]:
    """Figures by name. `truth`: float[N] click probabilities, impression after impression in the order of the log.

    For each of `delays_s` there is a loss of the model whose history lacks what is younger than so many seconds."""
    s = _Pass(match={delay: [] for delay in delays_s})
    for event in events:
        _read(s, event)
    y = np.array(s.clicked, np.float64)
    ages = np.array(s.ages)
    if not len(y):
        return {"pairs": 0.0}
    gaps = np.array(s.gaps) / HOUR_MS
    lives = np.array([b - a for a, b in s.life.values()]) / HOUR_MS
    figures = {
        "pairs": float(len(y)),
        "ctr": float(y.mean()),
        "seen_6h": float((ages <= 6).mean()),
        "seen_1h": float((ages <= 1).mean()),
        "seen_1_6h": float(((ages > 1) & (ages <= 6)).mean()),
        "seen_60s": float((ages <= 1 / 60).mean()),
        "gap_under_30min": float((gaps < 0.5).mean()) if len(gaps) else 0.0,
        "gap_1_6h": float(((gaps > 1) & (gaps <= 6)).mean()) if len(gaps) else 0.0,
        "item_days_p90": float(np.quantile(lives, 0.9)) / 24.0,
    }
    return figures | _losses(s, y, truth)


def history_match(events: Iterable[Event]) -> dict[str, float]:
    """How interests move: the share of pairs of events (one user, searches and views of the newest history) about the
    same sub-topic, by the time between them, and for two users at the same hour within and across demographics."""
    sub: dict[Any, Any] = {}
    seen: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    by_hour: dict[tuple[int, Any], Counter[Any]] = defaultdict(Counter)
    for e in events:
        if isinstance(e, Item):
            sub[e.id] = e.features["sub_category"]
        elif isinstance(e, Candidates):
            kinds, items = e.features["history_kind"], e.features["history"]
            if isinstance(kinds, list) and isinstance(items, list) and kinds and kinds[-1] != 3:
                seen[e.user].append((e.ts, sub[items[-1]]))
                by_hour[e.ts // HOUR_MS, e.features["demographic"]][sub[items[-1]]] += 1
    bands = ((0.0, 0.02), (0.02, 0.1), (0.1, 1.0), (1.0, 3.0), (3.0, 6.0), (6.0, 12.0), (12.0, 24.0))
    same, count = np.zeros(len(bands)), np.zeros(len(bands))
    for rows in seen.values():
        for i, (ts, what) in enumerate(rows):
            for ts2, what2 in rows[i + 1 : i + 60]:
                h = (ts2 - ts) / HOUR_MS
                for b, (lo, hi) in enumerate(bands):
                    if lo < h <= hi:
                        same[b] += what == what2
                        count[b] += 1
    figures = {f"same_{lo:g}_{hi:g}h": float(same[b] / max(count[b], 1)) for b, (lo, hi) in enumerate(bands)}
    within, across = [0.0, 0.0], [0.0, 0.0]
    hours: dict[int, list[Counter[Any]]] = defaultdict(list)
    for (hour, _), counter in by_hour.items():
        hours[hour].append(counter)
    for counters in hours.values():
        total: Counter[Any] = Counter()
        for counter in counters:
            n = counter.total()
            within[0] += sum(v * (v - 1) for v in counter.values())
            within[1] += n * (n - 1)
            total.update(counter)
        n = total.total()
        across[0] += sum(v * v for v in total.values()) - sum(v * v for c in counters for v in c.values())
        across[1] += n * n - sum(c.total() ** 2 for c in counters)
    figures["same_hour_within_demographic"] = within[0] / max(within[1], 1.0)
    figures["same_hour_across_demographics"] = across[0] / max(across[1], 1.0)
    return figures


def _read(s: _Pass, e: Event) -> None:
    if isinstance(e, Item):
        f = e.features
        price = f["price"]
        assert isinstance(price, float | int)
        s.items[str(e.id)] = (str(f["category"]), str(f["sub_category"]), str(f["advertiser"]), float(np.log(price)))
        return
    if s.begin < 0:
        s.begin = e.ts
    if isinstance(e, Candidates):
        lists = s.lists[e.user]
        lists.append((e.ts, frozenset(e.items)))
        while lists and lists[0][0] < e.ts - 24 * HOUR_MS:
            lists.popleft()
    elif isinstance(e, Impression):
        _impression(s, e)
    elif isinstance(e, Feedback):
        row, shown = s.pending.pop(e.id)
        clicked = set(e.clicked)
        for i, ad in enumerate(shown.ads):
            hit = ad in clicked
            s.clicked[row + i] = hit
            for rolling in (s.item_ctr[ad], s.advertiser_ctr[s.items[str(ad)][2]], s.user_ctr[e.user]):
                rolling.clicks += hit
                rolling.shown += 1


def _impression(s: _Pass, e: Impression) -> None:
    last = s.last_seen.get(e.user)
    if last is not None:
        s.gaps.append(e.ts - last)
    s.last_seen[e.user] = e.ts
    f = e.features
    history, times = f["history"], f["history_ts"]
    assert isinstance(history, list)
    assert isinstance(times, list)
    known = [(s.items[str(h)], e.ts - int(t or 0), h) for h, t in zip(history, times, strict=True)][::-1]
    lists = list(s.lists[e.user])[::-1]
    user = s.user_ctr[e.user].logit(0.03, 100.0)
    s.pending[e.id] = (len(s.clicked), e)
    s.clicked.extend([False] * len(e.ads))
    ctrs = []
    for position, ad in enumerate(e.ads):
        age = next((e.ts - ts for ts, items in lists if ad in items), None)
        s.ages.append(np.inf if age is None else age / HOUR_MS)
        born, _ = s.life.get(ad, (e.ts, e.ts))
        s.life[ad] = (born, e.ts)
        _, _, advertiser, price = s.items[str(ad)]
        ctrs.append(s.item_ctr[ad].logit(0.03, 100.0))
        s.base.append([
            ctrs[-1], s.advertiser_ctr[advertiser].logit(0.03, 300.0), user, price, np.log1p(position),
            float(f["device"] == "desktop"),
        ])  # fmt: skip
    for delay, rows in s.match.items():
        rows.extend(_match(s, e, [k for k in known if k[1] >= delay * 1000.0], ctrs))
    for ad in e.ads:
        s.pair_shown[e.user, ad] += 1


def _match(s: _Pass, e: Impression, known: list[Any], ctrs: list[float]) -> list[list[float]]:
    """Rows of `MATCH`. `known`: (features of the item, age in ms, item) of the history, newest first."""
    levels = [k[0][3] for k in known[:4]]
    level = sum(levels) / len(levels) if levels else None
    weight: dict[str, float] = defaultdict(float)
    fresh: dict[str, float] = defaultdict(float)
    touched: dict[Any, int] = {}
    for i, ((topic, sub, advertiser, _), age, item) in enumerate(known):
        for key in (topic, sub, advertiser):
            weight[key] += 0.85**i
        fresh[sub] += float(np.exp(-age / (3 * HOUR_MS)))
        touched.setdefault(item, age)
    newest = known[0][0][1] if known else None
    second = known[1][0][1] if len(known) > 1 else None
    rows = []
    for ad, ctr in zip(e.ads, ctrs, strict=True):
        topic, sub, advertiser, price = s.items[str(ad)]
        rows.append([
            weight.get(sub, 0.0), weight.get(topic, 0.0), weight.get(advertiser, 0.0), float(newest == sub),
            float(second == sub), fresh.get(sub, 0.0), float(ad in touched),
            float(touched.get(ad, 1 << 60) < 1_800_000), 0.0 if level is None else abs(price - level),
            (newest == sub) * (ctr + 3.5), float(np.log1p(s.pair_shown[e.user, ad])),
        ])  # fmt: skip
    return rows


def _losses(s: _Pass, y: F64, truth: F64 | None) -> dict[str, float]:
    cut = int(len(y) * 0.75)
    base = np.array(s.base)
    test = y[cut:]
    mean = np.full(len(test), y[:cut].mean())
    figures = {
        "loss_mean": log_loss(mean, test),
        "loss_item_ctr": log_loss(_fit_predict(base[:, :1], y, cut), test),
        "loss_without_history": log_loss(_fit_predict(base, y, cut), test),
    }
    for delay, rows in s.match.items():
        name = "loss_with_history" if delay == 0.0 else f"loss_history_{delay:g}s_late"
        figures[name] = log_loss(_fit_predict(np.hstack([base, np.array(rows)]), y, cut), test)
    if truth is not None:
        figures["loss_oracle"] = log_loss(np.asarray(truth, np.float64)[cut:], test)
    return figures


def log_loss(p: F64, y: F64) -> float:
    p = np.clip(p, 1e-7, 1.0 - 1e-7)
    return float(-(y * np.log(p) + (1.0 - y) * np.log1p(-p)).mean())


def _fit_predict(x: F64, y: F64, cut: int, ridge: float = 3.0) -> F64:
    """Logistic regression by Newton's method on the rows before `cut`; probabilities of the others."""
    mean, sd = x[:cut].mean(0), x[:cut].std(0) + 1e-9
    x = np.hstack([np.ones((len(x), 1)), (x - mean) / sd])
    a, b = x[:cut], y[:cut]
    w = np.zeros(x.shape[1])
    w[0] = np.log(b.mean() / (1.0 - b.mean()))
    penalty = np.full(len(w), ridge)
    penalty[0] = 0.0
    for _ in range(12):
        p = 1.0 / (1.0 + np.exp(-a @ w))
        gradient = a.T @ (p - b) + penalty * w
        hessian = (a * (p * (1.0 - p))[:, None]).T @ a + np.diag(penalty + 1e-9)
        step = np.linalg.solve(hessian, gradient)
        w -= step
        if np.abs(step).max() < 1e-6:
            break
    out: F64 = 1.0 / (1.0 + np.exp(-x[cut:] @ w))
    return out
