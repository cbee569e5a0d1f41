"""Where a partition's store lies: ``<folder>/<partition>``, and beside it a stand-in while another process holds that.

A process that is frozen keeps its locks. Its successor on the same host must not wait for it: it opens the first free
of ``<partition>.1``, ``<partition>.2``, ... and rebuilds from the changelog there, which costs time, never answers.
Stand-ins are removed when their owner closes them, or when the partition's own store is opened next.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path

from state.api import StoreSettings
from state.chunk import parse_batch
from state.store import Parser, RocksStore, open_store
from topics.errors import StoreLocked

log = logging.getLogger(__name__)

MAX_STAND_INS = 8


def open_place(folder: Path, partition: int, settings: StoreSettings, parse: Parser = parse_batch) -> RocksStore:
    """Waits `settings.lock_timeout_s` for the partition's own store, then takes a stand-in. Raises `StoreLocked` when
    all are held."""
    own = folder / str(partition)
    try:
        store = open_store(own, settings, parse)
    except StoreLocked as e:
        log.warning("%s; a stand-in beside it is used and rebuilt from the changelog", e)
    else:
        _tidy(folder, partition)
        return store
    at_once = dataclasses.replace(settings, lock_timeout_s=0.0)
    for k in range(1, MAX_STAND_INS):
        try:
            return open_store(folder / f"{partition}.{k}", at_once, parse)
        except StoreLocked:
            continue
    return open_store(folder / f"{partition}.{MAX_STAND_INS}", at_once, parse)


def close_place(store: RocksStore, deadline_s: float) -> None:
    store.close(deadline_s)
    if _is_stand_in(store.path):
        shutil.rmtree(store.path, ignore_errors=True)


def _tidy(folder: Path, partition: int) -> None:
    """Removes stand-ins that a process left behind when it was killed. One that is in use stays."""
    for place in folder.glob(f"{partition}.*"):
        if not _is_stand_in(place):
            continue
        try:
            open_store(place, StoreSettings(lock_timeout_s=0.0)).close(5.0)
        except StoreLocked:
            continue
        except Exception as e:  # damaged: no reason to keep it
            log.warning("stand-in %s cannot be opened: %s", place, e)
        shutil.rmtree(place, ignore_errors=True)


def _is_stand_in(place: Path) -> bool:
    partition, dot, k = place.name.partition(".")
    return bool(dot) and partition.isdigit() and k.isdigit()
