"""How well several models score the same pairs, with 95 % intervals from a bootstrap over users. Pure.

Users are drawn, not pairs: a user's requests are alike, and intervals over pairs would be too narrow. All models see
the same draws, so differences between them are paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models import metrics
from models.api import SOURCES
from streams.measures import plain

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
BOOTSTRAPS = 200
MIN_FM_GAIN = 0.01
NO_FEEDBACK: dict[str, Any] = {
    "log_loss": {"vm": None, "solaris": None, "fm": None},
    "auc": {"vm": None, "solaris": None, "fm": None},
    "transfer_ratio": None,
    "transfer_note": "no feedback in the log: no losses",
}


@dataclass(frozen=True, slots=True)
class Judged:
    """Pairs of requests whose feedback is known."""

    label: F32
    """[N] clicked"""
    logits: Mapping[str, F32]
    """[N] by model: "vm" and "solaris", and "fm" where it was run"""
    splits: I64
    """[R+1]"""
    users: npt.NDArray[np.integer[Any]]
    """[R]"""
    source: npt.NDArray[np.integer[Any]]
    """[N] index into `SOURCES`"""


def compare(pairs: Judged, draws: int = BOOTSTRAPS) -> dict[str, Any]:
    """`log_loss` and `auc` by model, `metrics` with intervals, `gain` over the VM, transfer ratio, `by_source`.

    Deterministic. `NO_FEEDBACK` where there are no pairs.
    """
    n = len(pairs.label)
    if not n:
        return dict(NO_FEEDBACK)
    by = {m: metrics.summary(x, pairs.label, pairs.splits) for m, x in pairs.logits.items()}
    users, inverse = np.unique(pairs.users, return_inverse=True)
    of_pair = np.repeat(inverse, np.diff(pairs.splits))
    losses = {m: metrics.losses(x, pairs.label) for m, x in pairs.logits.items()}
    drawn = _draw(pairs, losses, inverse, of_pair, len(users), draws)
    for m, figures in by.items():
        figures["intervals"] = {name: _interval(values) for name, values in drawn[m].items()}
    gain = {}
    for m in by:
        if m != "vm":
            mean = float(1 - losses[m].mean() / losses["vm"].mean())
            gain[m] = {
                "gain": round(mean, 5),
                "interval": _interval(1 - drawn[m]["log_loss"] / drawn["vm"]["log_loss"]),
            }
    out: dict[str, Any] = {
        "log_loss": {m: by[m]["log_loss"] if m in by else None for m in ("vm", "solaris", "fm")},
        "auc": {m: by[m]["auc"] if m in by else None for m in ("vm", "solaris", "fm")},
        "metrics": by,
        "gain_over_vm": gain,
        "pairs_with_feedback": n,
        "requests_with_feedback": len(pairs.splits) - 1,
        "users_with_feedback": len(users),
        "ctr": round(float(pairs.label.mean()), 6),
        "by_source": by_source(losses, pairs.label, pairs.source),
    }
    if "fm" in by:
        out |= _transfer(losses, {m: drawn[m]["log_loss"] for m in by})
    else:
        out |= {"transfer_ratio": None, "transfer_ratio_interval": None, "transfer_note": "the FM was not run"}
    cleaned: dict[str, Any] = plain(out)
    return cleaned


def transfer(vm: F32, solaris: F32, fm: F32, label: F32, users: npt.NDArray[np.integer[Any]]) -> dict[str, Any]:
    """Transfer ratio (LL_vm - LL_solaris) / (LL_vm - LL_fm) with a 95 % interval from a bootstrap over users [N].

    None where it would say nothing: the FM's own gain is under 1 % or its interval spans zero.
    """
    losses = {m: metrics.losses(x, label) for m, x in (("vm", vm), ("solaris", solaris), ("fm", fm))}
    unique, inverse = np.unique(users, return_inverse=True)
    n = len(unique)
    sums = np.stack([np.bincount(inverse, weights=x, minlength=n) for x in losses.values()])
    drawn = np.stack([sums @ w for w in _weights(n, BOOTSTRAPS)])
    return _transfer(losses, dict(zip(losses, drawn.T, strict=True)))


def by_source(losses: Mapping[str, F64], label: F32, source: npt.NDArray[np.integer[Any]]) -> dict[str, dict[str, Any]]:
    """Per source that occurs: its ads with feedback, their click rate, and each model's log loss on them."""
    out: dict[str, dict[str, Any]] = {}
    for k, name in enumerate(SOURCES):
        mine = source == k
        n = int(mine.sum())
        if n:
            loss = {m: round(float(x[mine].mean()), 6) for m, x in losses.items()}
            out[name] = {"ads": n, "ctr": round(float(label[mine].mean()), 6), "log_loss": loss}
    return out


def _transfer(losses: Mapping[str, F64], drawn: Mapping[str, F64]) -> dict[str, Any]:
    """`drawn`: each draw's summed (or mean) log loss by model."""
    ll = {m: float(x.mean()) for m, x in losses.items()}
    gain = (ll["vm"] - ll["fm"]) / ll["vm"]
    gains = drawn["vm"] - drawn["fm"]
    low, high = _interval(gains / drawn["vm"])
    out: dict[str, Any] = {"fm_gain": round(gain, 5), "fm_gain_interval": [low, high]}
    if gain < MIN_FM_GAIN or low <= 0:
        return {"transfer_ratio": None, "transfer_ratio_interval": None, **out,
                "transfer_note": "the FM's own gain over the VM is under 1 % or not certain: no ratio"}  # fmt: skip
    ratio = (ll["vm"] - ll["solaris"]) / (ll["vm"] - ll["fm"])
    interval = _interval((drawn["vm"] - drawn["solaris"]) / gains)
    return {"transfer_ratio": round(ratio, 4), "transfer_ratio_interval": [round(x, 4) for x in interval], **out}


def _draw(
    pairs: Judged, losses: Mapping[str, F64], of_request: I64, of_pair: I64, users: int, draws: int
) -> dict[str, dict[str, F64]]:
    """model -> figure -> [draws]."""

    def by_user(values: F64, index: I64) -> F64:
        return np.bincount(index, weights=values, minlength=users).astype(np.float64)

    size = by_user(np.ones(len(of_pair)), of_pair)
    sums, curves = {}, {}
    both = np.zeros(len(pairs.splits) - 1, bool)
    for m, logit in pairs.logits.items():
        aucs, ranks = metrics.request_values(logit, pairs.label, pairs.splits)
        both = ~np.isnan(aucs)
        sums[m] = np.stack(
            [by_user(losses[m], of_pair), by_user(np.where(both, aucs, 0), of_request),
             by_user(np.where(both, ranks, 0), of_request)]
        )  # fmt: skip
        curves[m] = _Auc(logit, pairs.label, of_pair)
    requests = by_user(both.astype(np.float64), of_request)
    out: dict[str, dict[str, list[float]]] = {
        m: {"log_loss": [], "auc": [], "request_auc": [], "request_mrr": []} for m in pairs.logits
    }
    for w in _weights(users, draws):
        n, r = float(size @ w), float(requests @ w)
        for m, figures in out.items():
            loss, auc, mrr = (sums[m] @ w).tolist()
            figures["log_loss"].append(loss / n if n else np.nan)
            figures["auc"].append(curves[m].weighted(w))
            figures["request_auc"].append(auc / r if r else np.nan)
            figures["request_mrr"].append(mrr / r if r else np.nan)
    return {m: {name: np.array(v) for name, v in figures.items()} for m, figures in out.items()}


class _Auc:
    """AUC of the same scores under many weights of users: sorted once."""

    def __init__(self, score: F32, label: F32, user: I64) -> None:
        order = np.argsort(score, kind="stable")
        ranked = score[order]
        self._user = user[order]
        self._positive = label[order] > 0
        self._starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))

    def weighted(self, weights: F64) -> float:
        """weights [users]; NaN where one class has none."""
        w = weights[self._user]
        positive = np.where(self._positive, w, 0.0)
        p = np.add.reduceat(positive, self._starts)
        n = np.add.reduceat(w - positive, self._starts)
        total = float(p.sum()) * float(n.sum())
        below = np.cumsum(n) - n
        return float(p @ (below + n / 2)) / total if total else float("nan")


def _weights(users: int, draws: int) -> Iterator[F64]:
    """How often each user was drawn, [users], draw by draw."""
    rng = np.random.default_rng(0)
    for _ in range(draws):
        yield np.bincount(rng.integers(0, users, users), minlength=users).astype(np.float64)


def _interval(values: F64) -> list[float]:
    """The middle 95 %; NaN where no draw gave a number."""
    usable = values[np.isfinite(values)]
    if not len(usable):
        return [float("nan"), float("nan")]
    low, high = np.quantile(usable, [0.025, 0.975])
    return [round(float(low), 6), round(float(high), 6)]
