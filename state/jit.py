"""`kernel`: numba's `njit` with a compiled-code cache that works wherever the package lies.

Numba keeps compiled code beside the module, or in the user's cache folder when that is read-only. With neither
writable (a read-only image and no home) it refuses to import; then the code goes to a folder under the temporary
directory, so that the other processes of the same container still start fast.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


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
