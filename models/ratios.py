"""Transfer ratios with intervals from resampling users.

ratio of x = (LL_anchor - LL_x) / (LL_anchor - LL_fm): 0 is the anchor's loss, 1 the foundation model's. None is given
where the FM gains under 1 % over the anchor or the interval of that gain spans zero: it would be noise over nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from models.api import U64

F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
RESAMPLES = 400
MIN_GAIN = 0.01


class Ratios:
    """Losses [N] of the anchor (a VM) and of the FM on the same pairs, whose users [N] are resampled."""

    def __init__(self, users: U64, anchor: F64, fm: F64) -> None:
        self.users, self.anchor, self.fm = users, anchor, fm
        everyone = np.ones(len(users), bool)
        a, f, _ = self._resampled(fm, everyone)
        self.gain = 1 - float(fm.sum() / anchor.sum())
        self.gain_interval = _interval((a - f) / a)

    @property
    def share(self) -> dict[str, Any]:
        """``{"gain", "interval"}``: by what share of the anchor's loss the FM's is lower."""
        return {"gain": round(self.gain, 5), "interval": [round(x, 5) for x in self.gain_interval]}

    @property
    def mean_something(self) -> bool:
        return self.gain >= MIN_GAIN and self.gain_interval[0] > 0

    def of(self, losses: F64, rows: Mask | None = None) -> dict[str, Any] | None:
        """``{"ratio", "interval"}`` of a model with these losses [N] on the pairs `rows`, or None (see the module)."""
        if not self.mean_something:
            return None
        keep = np.ones(len(losses), bool) if rows is None else rows
        anchor, fm, mine = self.anchor[keep].sum(), self.fm[keep].sum(), losses[keep].sum()
        if anchor - fm <= MIN_GAIN * anchor:
            return None
        a, f, x = self._resampled(losses, keep)
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = (a - x) / (a - f)
        low, high = _interval(drawn[np.isfinite(drawn)])
        return {
            "ratio": round(float((anchor - mine) / (anchor - fm)), 4),
            "interval": [round(low, 4), round(high, 4)],
        }

    def _resampled(self, losses: F64, rows: Mask) -> F64:
        """[3, RESAMPLES] summed losses of anchor, FM and x over draws of users with replacement."""
        _, user = np.unique(self.users[rows], return_inverse=True)
        n = int(user.max()) + 1
        sums = np.stack([np.bincount(user, x[rows], n) for x in (self.anchor, self.fm, losses)])
        weights = np.random.default_rng(7).multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(np.float64)
        out: F64 = (weights @ sums.T).T
        return out


def _interval(values: F64) -> tuple[float, float]:
    return float(np.quantile(values, 0.025)), float(np.quantile(values, 0.975))
