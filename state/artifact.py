"""Data files with a manifest: written aside, fsynced, and made visible by one rename.

The manifest (JSON) names each data file with its size and xxh3 checksum; `read` checks both. Data files carry a fresh
name each time, so that the manifest in place always names whole files; those of the manifest before are then deleted.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128

from topics.errors import StoreFormatError


def publish(
    directory: Path, manifest_name: str, files: Mapping[str, Callable[[Path], None]], manifest: Mapping[str, Any]
) -> None:
    """Writes each file by its function, then the manifest that names them all."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = manifest_name.removesuffix(".json")
    generation = secrets.token_hex(6)
    named: dict[str, dict[str, Any]] = {}
    for role, write in files.items():
        path = directory / f"{stem}-{generation}.{role}"
        write(path)
        _fsync(path)
        named[role] = {"file": path.name, "bytes": path.stat().st_size, "xxh3": _checksum(path)}
    tmp = directory / f"{manifest_name}.tmp"
    tmp.write_text(json.dumps({**manifest, "files": named}, indent=1))
    _fsync(tmp)
    os.replace(tmp, directory / manifest_name)
    _fsync(directory)
    keep = {f["file"] for f in named.values()}
    for path in directory.glob(f"{stem}-*"):
        if path.name not in keep:
            path.unlink(missing_ok=True)


def read(directory: Path, manifest_name: str, kind: str, newest_format: int) -> tuple[dict[str, Any], dict[str, Path]]:
    """The manifest and its files by role, checked. Raises `StoreFormatError`."""
    path = directory / manifest_name
    try:
        manifest = json.loads(path.read_text())
        if manifest["kind"] != kind:
            raise StoreFormatError(f"{path} is of kind {manifest['kind']!r}, expected {kind!r}")
        if int(manifest["format"]) > newest_format:
            raise StoreFormatError(f"{path} has format {manifest['format']}; this program reads up to {newest_format}")
        files = {}
        for role, f in manifest["files"].items():
            files[role] = directory / f["file"]
            if files[role].stat().st_size != f["bytes"] or _checksum(files[role]) != f["xxh3"]:
                raise StoreFormatError(f"{files[role]} does not match its checksum in {path}")
    except FileNotFoundError as e:
        raise StoreFormatError(f"{e.filename} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as e:
        raise StoreFormatError(f"{path} is no manifest: {e}") from None
    return manifest, files


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with open(path, "wb") as f:
        np.savez(f, **arrays)  # type: ignore[arg-type]


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as z:
        return {name: z[name] for name in z.files}


def _checksum(path: Path) -> str:
    h = xxh3_128()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
