"""Vectors as they are stored: float16, or int8 with one scale per vector.

int8: ``scale = max|v| / 127``, ``q = round(v / scale)``; so each number is off by at most half a scale, that is by
1/254 of the vector's largest number. A vector of zeros has scale 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
I8 = npt.NDArray[np.int8]

HALF_MAX = 65_504.0


def to_half(vectors: F32) -> F16:
    """float16 [n, d]. Numbers beyond float16's range become its largest, so that finite stays finite."""
    return np.clip(vectors, -HALF_MAX, HALF_MAX).astype(np.float16)


def to_int8(vectors: F32) -> tuple[I8, F32]:
    """int8 [n, d] and float32 scales [n]. Raises ValueError where a number is not finite."""
    if not np.isfinite(vectors).all():
        raise ValueError("vectors have a number that is not finite")
    v = np.asarray(vectors, np.float32)
    scales = (np.abs(v).max(axis=1, initial=0.0) / np.float32(127)).astype(np.float32)
    # A subnormal scale could round to zero under the division; such vectors are zero for every purpose.
    safe = np.where(scales < np.finfo(np.float32).tiny, np.float32(1), scales)
    q = np.clip(np.rint(v / safe[:, None]), -127, 127).astype(np.int8)
    return q, np.where(safe == scales, scales, np.float32(0)).astype(np.float32)


def from_int8(q: I8, scales: F32) -> F32:
    return q.astype(np.float32) * scales[:, None]


def relative_error(vectors: F32, restored: npt.NDArray[np.floating]) -> float:
    """Root mean square of the error over that of the vectors."""
    norm = float(np.sqrt(np.mean(np.square(vectors, dtype=np.float64))))
    error = float(np.sqrt(np.mean(np.square(vectors - restored.astype(np.float32), dtype=np.float64))))
    return error / norm if norm > 0 else 0.0
