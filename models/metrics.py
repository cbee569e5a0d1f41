"""Losses and rankings of a set of scored pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def losses(logit: F32, label: F32) -> F64:
    """[N] log loss of each pair, in nats: log(1 + exp(logit)) - label * logit."""
    x, y = logit.astype(np.float64), label.astype(np.float64)
    out: F64 = np.logaddexp(0.0, x) - y * x
    return out


def log_loss(logit: F32, label: F32) -> float:
    return float(losses(logit, label).mean())


def entropy(label: F32) -> float:
    """Log loss of the best constant: what relative log loss is measured by."""
    p = float(np.clip(label.mean(dtype=np.float64), 1e-12, 1 - 1e-12))
    return float(-p * np.log(p) - (1 - p) * np.log1p(-p))


def auc(score: F32, label: F32) -> float:
    """Area under the ROC curve, ties counted half; NaN with one class only."""
    positive = label > 0
    p, n = int(positive.sum()), int((~positive).sum())
    if not p or not n:
        return float("nan")
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[inverse]
    return float((ranks[positive].sum() - p * (p + 1) / 2) / (p * n))


def request_values(score: F32, label: F32, splits: I64) -> tuple[F64, F64]:
    """AUC and reciprocal rank of the best clicked pair of each request, [R] each; NaN where it has one class only."""
    aucs = np.full(len(splits) - 1, np.nan)
    ranks = np.full(len(splits) - 1, np.nan)
    for r, (a, z) in enumerate(zip(splits[:-1].tolist(), splits[1:].tolist(), strict=True)):
        mine, theirs = label[a:z] > 0, score[a:z]
        p, n = int(mine.sum()), int((~mine).sum())
        if not p or not n:
            continue
        good, bad = np.sort(theirs[mine]), np.sort(theirs[~mine])
        below, ties = np.searchsorted(bad, good), np.searchsorted(bad, good, side="right")
        aucs[r] = float((below + ties).sum() / 2 / (p * n))
        ranks[r] = 1.0 / (1 + int((theirs > good[-1]).sum()))
    return aucs, ranks


def per_request(score: F32, label: F32, splits: I64) -> dict[str, float]:
    """Mean AUC and reciprocal rank of the best clicked pair, over requests with both classes."""
    aucs, ranks = request_values(score, label, splits)
    both = ~np.isnan(aucs)
    if not both.any():
        return {"auc": float("nan"), "mrr": float("nan"), "requests": 0}
    return {"auc": float(aucs[both].mean()), "mrr": float(ranks[both].mean()), "requests": int(both.sum())}


def summary(logit: F32, label: F32, splits: I64) -> dict[str, Any]:
    """Everything reported of one model on one set of requests; calibration = mean pCTR / CTR."""
    within = per_request(logit, label, splits)
    loss = log_loss(logit, label)
    predicted = float((1 / (1 + np.exp(-logit.astype(np.float64)))).mean())
    return {
        "log_loss": round(loss, 6),
        "relative_log_loss": round(loss / max(entropy(label), 1e-12), 6),
        "auc": round(auc(logit, label), 5),
        "request_auc": round(within["auc"], 5),
        "request_mrr": round(within["mrr"], 5),
        "calibration": round(predicted / max(float(label.mean()), 1e-12), 4),
    }
