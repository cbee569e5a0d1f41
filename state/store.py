"""`RocksStore`: one changelog partition's embedding chunks in RocksDB."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rocksdict import Checkpoint, Rdict, RdictIter, WriteBatch

from state import database, kernels, metadata, segments, warm
from state.answers import unfilled_lookup
from state.api import I64, U32, U64, ApplyResult, ChangelogRecord, Lookup, StoreDims, StoreSettings
from state.cache import Arena, Loaded, UserCache, arena_of
from state.chunk import KEY, USER, Batch, parse_batch
from topics.errors import SettingsError, StoreError, StoreFull

log = logging.getLogger(__name__)

Parser = Callable[[Sequence[ChangelogRecord]], Batch]
_SPARE_BYTES = 8 << 20
_PRELOAD_CHUNKS = 1000


class RocksStore:
    """An `EmbeddingStore`. Methods may be called from several threads; they take turns.

    `parse` checks what is written and says what its records are: embedding chunks, unless told otherwise."""

    def __init__(
        self, path: Path | str, settings: StoreSettings = StoreSettings(), parse: Parser = parse_batch
    ) -> None:
        for key in ("ttl_ms", "window_ms", "segments_per_ttl", "cache_bytes"):
            if getattr(settings, key) <= 0:
                raise SettingsError(f"store.{key}", getattr(settings, key), "must be above 0")
        if settings.grace_ms < 0:
            raise SettingsError("store.grace_ms", settings.grace_ms, "must not be below 0")
        self.path = Path(path)
        self.settings = settings
        self._parse = parse
        self._times = segments.Times.of(settings)
        self._turn = threading.RLock()
        self._counts = dict.fromkeys(("applied", "pairs", "expired", "rejected", "segments_dropped"), 0)
        self._cache = UserCache(database.user_cache_bytes(settings))
        self._failed = False
        """RocksDB refused a write and takes no more until it is opened again"""
        warm.warm_up()
        self._adopt(database.open_database(self.path, settings))
        try:
            self._preload()
        except BaseException:
            self._release()
            self._database.owner.release()
            raise
        log.info("state: %s opened at offset %s, clock %d ms, %d segments",
                 self.path, self.position, self.clock_ms, len(self._families))  # fmt: skip

    def _adopt(self, opened: database.Database) -> None:
        self._database = opened
        self._db: Rdict | None = opened.db
        self._meta = opened.meta
        self.rebuilt = opened.rebuilt
        self._families: dict[str, Rdict] = {n: opened.db.get_column_family(n) for n in opened.names}
        self._handles = {n: opened.db.get_column_family_handle(n) for n in opened.names}
        self._iterators: dict[str, RdictIter] = {}
        self._read = database.read_options()
        self._cache.clear(complete=not opened.names)
        self._cache.dead_ts = self._floor - self._times.horizon

    def _preload(self) -> None:
        """Reads into the cache what fits there, as if it had just been written: a store that was closed, or killed,
        answers as fast as before. Damage that shows is dealt with as at any opening: by beginning anew."""
        if not self._families or database.disk_bytes(self.path) > self._cache.capacity:
            return
        cache, read = self._cache, database.scan_options()
        cache.clear(complete=True)
        for family in self._families.values():
            it = family.iter(read)
            it.seek_to_first()
            while True:
                keys: list[int] = []
                loaded = Loaded()
                while it.valid() and len(keys) < _PRELOAD_CHUNKS:
                    key = KEY.unpack(it.key())
                    if key[1] > cache.dead_ts:
                        loaded.chunk(key[2], it.value())
                        keys.append(key[0])
                    it.next()
                if not keys:
                    break
                cache.append(np.array(keys, np.uint64), *loaded.columns(), known_below=0)
            try:
                it.status()
            except Exception as e:
                error = database.classify(self.path, e)
                if not isinstance(error, database.Damaged):
                    raise error from None
                self.wipe(str(error))
                return

    @property
    def position(self) -> int | None:
        return self._meta.position

    @property
    def clock_ms(self) -> int:
        return self._meta.clock_ms

    @property
    def _floor(self) -> int:
        return self._times.floor(self._meta.clock_ms)

    def apply(self, records: Sequence[ChangelogRecord], next_offset: int | None = None) -> ApplyResult:
        """One WriteBatch. In this order: space is checked, segments are made, the batch is written, the cache follows.

        1. Either all of the batch is stored with the position behind it, or nothing is.
        2. Writing a record again changes nothing.
        3. A record that is no chunk is reported and passed over; the position moves on.
        """
        with self._turn:
            db = self._opened()
            batch = self._parse(records)
            alive = ~(batch.ts_ms + self._times.horizon <= self._floor)
            expired = len(alive) - int(alive.sum())
            if expired:
                batch = batch.take(alive)
            self._check_space(batch.words.nbytes)
            if self._failed:
                db = self._recover()
            write = WriteBatch(raw_mode=True)
            far = self._meta.far_ts_ms
            keys = batch.keys
            touched = set()
            family = ""
            start, end, handle = 0, 0, None
            for i, (r, ts) in enumerate(zip(batch.records.tolist(), batch.ts_ms.tolist(), strict=True)):
                if not start <= ts < end:
                    family, start, end = self._family_for(ts)
                    handle = self._handles[family]
                    touched.add(family)
                if family == segments.FAR:
                    far = max(far, ts)
                write.put(keys[KEY.size * i : KEY.size * (i + 1)], records[r].value, handle)
            position = self._meta.position
            after = next_offset if next_offset is not None else (records[-1].offset + 1 if records else None)
            if after is not None and (position is None or after > position):
                position = after
            meta = metadata.Metadata(position, self._meta.clock_ms, far)
            if meta != self._meta or len(batch.records):
                write.put(metadata.KEY, meta.encode())
                self._write(db, write)
            known_below = self._meta.position or 0
            self._meta = meta
            for name in touched:
                self._iterators.pop(name, None)
            if len(batch.records):
                self._cache.append(batch.users, batch.offsets, batch.starts, batch.words, known_below)
            pairs = int(batch.pairs.sum())
            for key, count in (("applied", len(batch.records)), ("pairs", pairs), ("expired", expired),
                               ("rejected", len(batch.rejected))):  # fmt: skip
                self._counts[key] += count
            return ApplyResult(len(batch.records), pairs, expired, batch.rejected)

    def lookup(
        self, users: U64, splits: I64, items: U64, topics: U32, now_ms: I64, model: int, dims: StoreDims
    ) -> Lookup:
        with self._turn:
            self._opened()
            users, items = _input(users, np.uint64), _input(items, np.uint64)
            splits, now, topics = _input(splits, np.int64), _input(now_ms, np.int64), _input(topics, np.uint32)
            if len(splits) != len(users) + 1 or len(now) != len(users) or len(topics) != len(items):
                raise ValueError(
                    f"{len(users)} users, {len(splits)} splits, {len(now)} times; {len(items)} items, "
                    f"{len(topics)} topics: expected B, B + 1, B; N, N"
                )
            out = unfilled_lookup(len(users), len(items), dims)
            self.visit(
                users, lambda arena, first, last: self.answer(
                    arena, users, splits, items, topics, now, model, dims, out, first, last
                )
            )  # fmt: skip
            return out

    def visit(self, users: U64, look: Callable[[Arena, int, int], None]) -> None:
        """Calls look(arena, first, last) for runs of `users` that make up all of them, in order: the arena has all
        chunks of users[first:last] that are not dead."""
        with self._turn:
            self._opened()
            missing = np.empty(len(users), np.int64)
            start = 0
            while start < len(users):
                end = self._load(users, start, missing)
                arena: Arena = self._cache
                if end == start:  # this user alone is larger than the cache
                    loaded = Loaded()
                    self._read_user(int(users[start]), loaded)
                    arena = arena_of(loaded)
                    end = start + 1
                look(arena, start, end)
                start = end

    @property
    def floor_ms(self) -> int:
        """Chunks that died before this time are as if they were gone."""
        return self._floor

    def _load(self, users: U64, start: int, missing: I64) -> int:
        """Brings users[start:end] into the cache and returns end: the first one without room, or all."""
        n = self._cache.ensure(users, start, missing)
        end = len(users)
        if n:
            loaded = Loaded()
            for user in dict.fromkeys(users[missing[:n]].tolist()):
                self._read_user(user, loaded)
                if 2 * loaded.size > self._cache.capacity:
                    break
            self._cache.admit(loaded)
            self._cache.misses += len(loaded.users)
            if self._cache.ensure(users, start, missing):
                end = int(missing[0])
        self._cache.hits += max(0, end - start - n)
        return end

    def _read_user(self, user: int, into: Loaded) -> None:
        """The user's chunks that are not yet dead, oldest segment first."""
        prefix = USER.pack(user)
        dead = self._cache.dead_ts
        for name, family in self._families.items():
            it = self._iterators.get(name)
            if it is None:
                it = self._iterators[name] = family.iter(self._read)
            it.seek(prefix)
            while it.valid():
                _, ts, offset = KEY.unpack(it.key())
                if ts > dead:
                    into.chunk(offset, it.value())
                it.next()
            try:
                it.status()  # valid() is false after an error too
            except Exception as e:
                raise self._error(e) from None
        into.end_user(user)

    def answer(
        self, arena: Arena, users: U64, splits: I64, items: U64, topics: U32, now: I64, model: int, dims: StoreDims,
        out: Lookup, first: int = 0, last: int | None = None, ttl_ms: int | None = None,
    ) -> None:  # fmt: skip
        """Fills requests first..last-1 of `out` from an arena that has their users. Touches nothing of the store."""
        kernels.lookup(
            first, len(users) if last is None else last, users, splits, items, topics, now, np.uint64(model),
            dims.dim, dims.state, dims.profile, self._times.ttl if ttl_ms is None else ttl_ms, self._times.window,
            self._floor, arena.buf, arena.keys, arena.heads,
            out.vectors, out.ts_ms, out.pair_fingerprint, out.topic, out.topic_count, out.topic_ts_ms,
            out.aggregate, out.aggregate_count, out.aggregate_ts_ms, out.state, out.state_ts_ms, out.fingerprint,
            out.profile,
        )  # fmt: skip

    def expire(self, clock_ms: int) -> int:
        with self._turn:
            db = self._opened()
            if self._failed:
                self._check_space(0)
                db = self._recover()
            if clock_ms > self._meta.clock_ms:
                meta = metadata.Metadata(self._meta.position, clock_ms, self._meta.far_ts_ms)
                write = WriteBatch(raw_mode=True)
                write.put(metadata.KEY, meta.encode())
                self._write(db, write)
                self._meta = meta
                self._cache.dead_ts = self._floor - self._times.horizon
            # Iterators pin the files they see; without this, idle ones would keep compacted files on disk.
            self._iterators.clear()
            dead = []
            for name in self._families:
                segment = segments.parse(name)
                newest = self._meta.far_ts_ms if segment is None else segment.end_ms - 1
                if self._times.dead(newest, self._floor):
                    dead.append(name)
            self._drop(db, dead)
            if dead:
                self._cache.trim()
            self._counts["segments_dropped"] += len(dead)
            return len(dead)

    def wipe(self, reason: str) -> None:
        """Empties the store, which is then as new. Data goes before the position does: a crash in between leaves a
        position that leads here again."""
        with self._turn:
            db = self._opened()
            log.error("state: %s is wiped and rebuilt from the changelog: %s", self.path, reason)
            self._iterators.clear()
            self._cache.clear(complete=False)
            self._drop(db, list(self._families))
            meta = metadata.Metadata()
            write = WriteBatch(raw_mode=True)
            write.put(metadata.KEY, meta.encode())
            self._write(db, write)
            self._meta = meta
            self._cache.clear(complete=True)
            self._cache.dead_ts = self._floor - self._times.horizon
            self.rebuilt = True

    def _drop(self, db: Rdict, names: list[str]) -> None:
        for name in names:
            self._handles.pop(name)
            self._families.pop(name)
            db.drop_column_family(name)

    def stats(self) -> dict[str, int]:
        """Counters since opening, and what is held now. `chunks` is RocksDB's estimate."""
        with self._turn:
            self._opened()
            cache = self._cache
            return {
                **self._counts,
                "position": -1 if self.position is None else self.position,
                "clock_ms": self.clock_ms,
                "segments": len(self._families),
                "chunks": sum(f.property_int_value("rocksdb.estimate-num-keys") or 0 for f in self._families.values()),
                "disk_bytes": database.disk_bytes(self.path),
                "memtable_bytes": sum(
                    f.property_int_value("rocksdb.cur-size-all-mem-tables") or 0 for f in self._families.values()
                ),
                "block_cache_bytes": self._database.cache.get_usage(),
                "user_cache_bytes": cache.used_bytes,
                "user_cache_hits": cache.hits,
                "user_cache_misses": cache.misses,
                "rebuilt": int(self.rebuilt),
            }

    def flush(self) -> None:
        """Everything into tables; the write-ahead log is then empty. Never needed for correctness."""
        with self._turn:
            try:
                for family in (*self._families.values(), self._opened()):
                    family.flush()
            except Exception as e:
                raise self._error(e) from None

    def scan(self) -> Iterator[tuple[str, int, int, int, bytes]]:
        """Every stored chunk as (segment, user, event time ms, changelog offset, record), dead ones of segments not
        yet dropped too; by segment and user. It sees the store as it is now, whatever is written meanwhile."""
        with self._turn:
            self._opened()
            read = database.beside_options()
            iterators = [(name, family.iter(read)) for name, family in self._families.items()]
        for name, it in iterators:
            it.seek_to_first()
            while it.valid():
                yield (name, *KEY.unpack(it.key()), it.value())
                it.next()
            it.status()

    def scan_users(self) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        """Every user with all its chunks as (changelog offset, record), users in ascending order. As `scan`, it sees
        the store as it is now and may run beside reads and writes; the store must not be closed under it."""
        with self._turn:
            self._opened()
            read = database.beside_options()
            iterators = [family.iter(read) for family in self._families.values()]
        merged = heapq.merge(*map(_chunks, iterators), key=itemgetter(0))
        for user, chunks in itertools.groupby(merged, key=itemgetter(0)):
            yield user, [(offset, value) for _, offset, value in chunks]

    def checkpoint(self, path: Path) -> None:
        """A consistent copy of the store at `path` (which must not exist), by hard links where they are possible."""
        with self._turn:
            try:
                Checkpoint(self._opened()).create_checkpoint(str(path))
                metadata.write_mark(Path(path))
            except Exception as e:
                raise StoreError(f"no checkpoint of {self.path} at {path}: {e}") from None

    def close(self, deadline_s: float | None = None) -> None:
        """Lets go of the directory. All that was applied is in the log already; closing flushes it to tables so that
        the next opening is quick. Past the deadline that is left to end with the process, which loses nothing."""
        if deadline_s is not None:
            closing = threading.Thread(target=self.close, name="store-close", daemon=True)
            closing.start()
            closing.join(deadline_s)
            if closing.is_alive():
                log.error("state: %s did not close within %g s; left to the end of the process", self.path, deadline_s)
            return
        with self._turn:
            if self._db is None:
                return
            try:
                self._release()
            except Exception as e:
                log.error("state: %s could not be flushed while closing: %s", self.path, e)
            finally:
                self._database.owner.release()

    def _opened(self) -> Rdict:
        if self._db is None:
            raise StoreError(f"{self.path} is closed")
        return self._db

    def _family_for(self, ts: int) -> tuple[str, int, int]:
        """The column family of an event time, made where needed, and the range of times that it takes."""
        segment = self._times.segment_of(ts)
        name = segment.name
        if name in self._families:
            return name, segment.start_ms, segment.end_ms
        clock = self._meta.clock_ms
        ahead = clock >= 0 and segment.start_ms > clock + self._times.horizon
        if ahead or len(self._families) >= self._times.max_segments:
            name, segment = segments.FAR, segments.Segment(ts, 1)
        if name not in self._families:
            db = self._opened()
            self._families[name] = db.create_column_family(name, self._database.options)
            self._handles[name] = db.get_column_family_handle(name)
            self._families = dict(sorted(self._families.items(), key=lambda f: _order(f[0])))
        return name, segment.start_ms, segment.end_ms

    def _check_space(self, nbytes: int) -> None:
        need = 2 * nbytes + _SPARE_BYTES
        try:
            free = database.free_bytes(self.path)
        except OSError as e:
            raise self._error(e) from None
        if free < need:
            raise StoreFull(
                f"{self.path} has {free} bytes free, the next write needs {need}. Nothing was written; "
                "free space or use a larger disk, then start again"
            )

    def _write(self, db: Rdict, write: WriteBatch) -> None:
        try:
            db.write(write)
        except Exception as e:  # rocksdict raises bare Exception
            self._failed = True
            raise self._error(e) from None

    def _error(self, e: BaseException) -> StoreError:
        error = database.classify(self.path, e)
        if isinstance(error, database.Damaged):
            database.mark_for_rebuild(self.path)
            return StoreError(f"{error}. The next start wipes it and rebuilds it from the changelog")
        return error

    def _recover(self) -> Rdict:
        """Opens RocksDB again after a write that failed. It comes back as of its last complete batch."""
        try:
            self._release()
        except Exception as e:  # it cannot flush, which is why we are here; its log has the data
            log.warning("state: %s: closing after a failed write: %s", self.path, e)
        try:
            self._adopt(database.reopen(self.path, self.settings, self._database.owner))
        except BaseException:
            self._database.owner.release()
            raise
        self._failed = False
        log.warning("state: %s opened again after a failed write, at offset %s", self.path, self.position)
        return self._opened()

    def _release(self) -> None:
        db, self._db = self._db, None
        self._iterators.clear()
        self._families.clear()
        self._handles.clear()
        if db is not None:
            db.close()


def _input(a: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The array as the kernels are compiled for; a view that is read-only or strided would have them compiled anew."""
    return a if a.dtype == dtype and a.flags.carray else np.require(a, dtype, ["C", "A", "W"])


def _chunks(it: RdictIter) -> Iterator[tuple[int, int, bytes]]:
    it.seek_to_first()
    while it.valid():
        user, _, offset = KEY.unpack(it.key())
        yield user, offset, it.value()
        it.next()
    it.status()


def _order(name: str) -> tuple[int, int]:
    segment = segments.parse(name)
    return (1 << 62, 0) if segment is None else (segment.start_ms, segment.length_ms)


def open_store(path: Path | str, settings: StoreSettings = StoreSettings(), parse: Parser = parse_batch) -> RocksStore:
    """Opens or makes the store in `path`; what is done with what lies there: `state.database`.

    Raises `StoreLocked`, `StoreFormatError`, `StoreFull`, `StoreError`, `SettingsError`.
    """
    return RocksStore(path, settings, parse)
