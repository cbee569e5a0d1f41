"""Opening the RocksDB of a store directory, whatever is there; and telling its errors apart.

| found | outcome |
|---|---|
| nothing, or an empty directory | a new store |
| our mark, RocksDB opens | that store, at its stored position |
| our mark, RocksDB or its metadata is damaged or half there | wiped and begun anew, logged as an error |
| no mark, but files | `StoreFormatError`; nothing is touched |
| a newer format | `StoreFormatError`; nothing is touched |
| read-only, or no space | `StoreFull` |
| held by another process | `StoreLocked` after the deadline |
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    SliceTransform,
    WriteOptions,
)

from state import metadata, segments
from state.api import StoreSettings
from state.ownership import OWNER, Ownership
from topics.errors import StoreError, StoreFormatError, StoreFull

log = logging.getLogger(__name__)

REBUILD = "REBUILD"
"""left in a directory whose data proved damaged while in use: the next opening begins anew"""
_KEPT = {OWNER, "LOCK", metadata.MARK}
_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_USER_BYTES = 8
MIN_WRITE_BUFFER_BYTES = 4 << 20
_NOTES_BYTES = 512 << 10
"""of RocksDB's own log and of its list of files, before it begins a new one"""
_BLOOM_RATIO = 0.002
"""of a write buffer for the filter of its users: 10 bits each when a user writes 600 bytes"""
_ARENA_BLOCK_BYTES = 64 << 10
_DUMPED_BELOW = 10
_PLACEHOLDER = "placeholder"


@dataclass(slots=True)
class Database:
    db: Rdict
    owner: Ownership
    meta: metadata.Metadata
    names: list[str]
    """column families beside the default one"""
    rebuilt: bool
    options: Options
    """for column families of segments"""
    cache: Cache


def open_database(path: Path, settings: StoreSettings) -> Database:
    """Takes the directory and opens what is there, by the table above."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        known = metadata.check_mark(path)
        if not known:
            strangers = sorted(p.name for p in path.iterdir() if p.name not in (OWNER, metadata.MARK + ".tmp"))
            if strangers:
                raise StoreFormatError(
                    f"{path} is not a Solaris store and not empty (it has {', '.join(strangers[:3])}). "
                    "Give the store a directory of its own; nothing there was touched"
                )
        owner = Ownership(path, settings.lock_timeout_s)
    except OSError as e:
        raise _full(path, e) from None
    try:
        if not known:
            metadata.write_mark(path)
        return reopen(path, settings, owner)
    except OSError as e:
        owner.release()
        raise _full(path, e) from None
    except BaseException:
        owner.release()
        raise


def reopen(path: Path, settings: StoreSettings, owner: Ownership) -> Database:
    """Opens the RocksDB of a directory that this process owns already."""
    owner.wait_for_rocksdb()
    rebuilt = False
    if (path / REBUILD).exists():
        _wipe(path, "it was found damaged while in use")
        rebuilt = True
    cache = Cache(max(1 << 20, settings.cache_bytes // 8))
    options = segment_options(settings, cache)
    while True:
        reason: object
        try:
            db, names = _open_rocksdb(path, settings, options)
            try:
                value = db.get(metadata.KEY)
                if value is None and names:
                    raise metadata.BrokenMetadata("segments without metadata")
                meta = metadata.Metadata() if value is None else metadata.decode(value)
                return Database(db, owner, meta, names, rebuilt, options, cache)
            except BaseException:
                db.close()
                raise
        except (metadata.BrokenMetadata, StoreFormatError) as e:
            if isinstance(e, StoreFormatError):
                raise
            reason = e
        except Exception as e:  # rocksdict raises bare Exception
            error = classify(path, e)
            if not isinstance(error, Damaged):
                raise error from None
            reason = e
        if rebuilt:
            raise StoreError(f"{path} cannot be opened even after it was emptied: {reason}")
        _wipe(path, reason)
        rebuilt = True


def _open_rocksdb(path: Path, settings: StoreSettings, options: Options) -> tuple[Rdict, list[str]]:
    db_options = database_options(settings)
    names: list[str] = []
    if (path / "CURRENT").exists():
        names = [n for n in Rdict.list_cf(str(path), db_options) if n != "default"]
    elif any(p.name.startswith("MANIFEST-") or p.suffix in (".sst", ".log") for p in path.iterdir()):
        raise metadata.BrokenMetadata("CURRENT is missing beside data files")
    db = Rdict(str(path), db_options, {n: options for n in names} or None)
    try:
        write = WriteOptions()
        write.sync = settings.sync
        db.set_write_options(write)
        for name in placeholders(settings):
            if name not in names:
                db.create_column_family(name, Options(raw_mode=True))
    except BaseException:
        db.close()
        raise
    return db, [n for n in names if not n.startswith(_PLACEHOLDER)]


def placeholders(settings: StoreSettings) -> list[str]:
    """Empty column families that a store of few segments has beside them. RocksDB writes all options of a new column
    family, ten kilobytes, to its log while there are fewer than ten of them, and keeps them in memory to begin the next
    file with: after some hundred segments the process has megabytes of them, and each new line begins a file."""
    times = segments.Times.of(settings)
    return [f"{_PLACEHOLDER}{k}" for k in range(_DUMPED_BELOW - 1 - times.horizon // times.segment)]


def user_cache_bytes(settings: StoreSettings) -> int:
    """Of `cache_bytes`, three quarters hold users ready to be looked up; RocksDB's block cache and its write buffers
    share the rest."""
    return settings.cache_bytes * 3 // 4


def write_buffer_bytes(settings: StoreSettings) -> int:
    return max(MIN_WRITE_BUFFER_BYTES, settings.cache_bytes // 8)


def database_options(settings: StoreSettings) -> Options:
    o = Options(raw_mode=True)
    o.create_if_missing(True)
    buffer = write_buffer_bytes(settings)
    o.set_db_write_buffer_size(buffer)
    # The log is kept until every column family in it is flushed; old segments are idle, so it must force them.
    o.set_max_total_wal_size(buffer)
    # RocksDB notes each column family that comes or goes in both, and segments come and go for ever.
    o.set_keep_log_file_num(2)
    o.set_max_log_file_size(_NOTES_BYTES)
    o.set_max_manifest_file_size(_NOTES_BYTES)
    o.set_max_open_files(512)
    # The default family holds the metadata only.
    o.set_arena_block_size(_ARENA_BLOCK_BYTES)
    return o


def segment_options(settings: StoreSettings, cache: Cache) -> Options:
    b = BlockBasedOptions()
    b.set_block_cache(cache)
    b.set_bloom_filter(10, False)
    b.set_cache_index_and_filter_blocks(True)
    b.set_pin_l0_filter_and_index_blocks_in_cache(True)
    o = Options(raw_mode=True)
    o.set_block_based_table_factory(b)
    o.set_prefix_extractor(SliceTransform.create_fixed_prefix(_USER_BYTES))
    # RocksDB takes both from the write buffers' total at once for each family, however little is in it; with its own
    # sizes a day of segments is over that limit when empty, and every few writes are flushed to a table.
    o.set_memtable_prefix_bloom_ratio(_BLOOM_RATIO)
    o.set_arena_block_size(_ARENA_BLOCK_BYTES)
    o.set_write_buffer_size(write_buffer_bytes(settings))
    o.set_compression_type(DBCompressionType.none())
    return o


def read_options() -> ReadOptions:
    o = ReadOptions()
    o.set_prefix_same_as_start(True)
    return o


def scan_options() -> ReadOptions:
    """For reading all of a segment once."""
    o = ReadOptions()
    o.set_total_order_seek(True)
    o.fill_cache(False)
    o.set_readahead_size(1 << 20)
    return o


def beside_options() -> ReadOptions:
    """For reading all segments beside the store's own work, whose blocks stay in the cache."""
    o = ReadOptions()
    o.set_total_order_seek(True)
    o.fill_cache(False)
    return o


class Damaged(StoreError):
    """RocksDB says that the files are not what it wrote."""


def classify(path: Path, e: BaseException) -> StoreError:
    """The error of ours that a RocksDB error is. RocksDB's status begins with its code; causes from the operating
    system are asked from the file system, not read from the text, where they can be."""
    text = str(e)
    if isinstance(e, StoreError):
        return e
    if not path.is_dir():
        return StoreError(f"{path} was removed under its store. The next start rebuilds it from the changelog")
    if text.startswith(("Corruption", "Not found", "NotFound", "Invalid argument")) or "No such file" in text:
        return Damaged(f"{path}: {text}")
    if free_bytes(path) < MIN_WRITE_BUFFER_BYTES or not writable(path) or "No space" in text or "too large" in text:
        return StoreFull(f"{path} cannot be written ({text}); free space and start again, nothing is lost")
    return StoreError(f"{path}: {text}")


def mark_for_rebuild(path: Path) -> None:
    try:
        (path / REBUILD).touch()
    except OSError as e:
        log.error("state: %s is damaged and cannot even be marked so (%s); delete it by hand", path, e)


def writable(path: Path) -> bool:
    return os.access(path, os.W_OK) and not os.statvfs(path).f_flag & os.ST_RDONLY


def free_bytes(path: Path) -> int:
    s = os.statvfs(path)
    return s.f_bavail * s.f_frsize


def disk_bytes(path: Path) -> int:
    total = 0
    for entry in os.scandir(path):
        # RocksDB deletes files while we look.
        with suppress(FileNotFoundError):
            total += entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else 0
    return total


def _full(path: Path, e: OSError) -> StoreError:
    if e.errno in _FULL_ERRNOS:
        return StoreFull(f"{path} cannot be written: {e.strerror}. Free space or make it writable, then start again")
    return StoreError(f"{path}: {e}")


def _wipe(path: Path, reason: Any) -> None:
    log.error("state: %s is wiped and rebuilt from the changelog: %s", path, reason)
    for p in path.iterdir():
        if p.name in _KEPT:
            continue
        if p.is_dir() and not p.is_symlink():
            shutil.rmtree(p)
        else:
            p.unlink()
