"""`kernel`: numba's `njit` with a compiled-code cache that works wherever the package lies.

Numba keeps compiled code beside the module, or in the user's cache folder when that is read-only. With neither
writable (a read-only image and no home) it refuses to import; then the code goes to a folder under the temporary
directory, so that the other processes of the same container still start fast.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding  # type: ignore[import-untyped]
import numba

F = TypeVar("F", bound=Callable[..., Any])


def _has_half() -> bool:
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return False  # code for another processor than this one
    machine = platform.machine().lower()
    return machine in ("arm64", "aarch64") or bool(llvmlite.binding.get_host_cpu_features().get("f16c"))


HAS_HALF = _has_half()
"""whether kernels may convert float16 by the processor's instruction"""


def kernel(f: F) -> F:
    """Compiled on first call, without the GIL, kept on disk. Arguments must be arrays and scalars."""
    jitted: F = numba.njit(cache=True, nogil=True, error_model="numpy")(f)
    return jitted


def _place_cache() -> None:
    if os.environ.get("NUMBA_CACHE_DIR") or numba.config.CACHE_DIR:
        return
    beside = Path(__file__).parent / "__pycache__"
    if os.access(beside if beside.exists() else beside.parent, os.W_OK):
        return
    home = Path(os.path.expanduser("~"))
    if home.is_dir() and os.access(home, os.W_OK):
        return
    numba.config.CACHE_DIR = str(Path(tempfile.gettempdir()) / f"solaris-numba-{os.getuid()}")


_place_cache()
