"""What may lie in a state directory, and what opening it does."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rocksdict import Options, Rdict
from store_child import SETTINGS, record
from test_store_kill import T0, answers, assert_exact

from state import metadata
from state.reference import ReferenceStore
from state.store import RocksStore, open_store
from topics.errors import StoreError, StoreFormatError


def filled(path: Path, records: int = 300) -> None:
    store = open_store(path, SETTINGS)
    store.apply([record(o) for o in range(records)])
    for family in store._families.values():
        family.flush()
    store.close()


def cut(suffix: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        for victim in path.glob(f"*{suffix}"):
            victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])

    return damage


def delete(pattern: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        victims = list(path.glob(pattern))
        assert victims
        for victim in victims:
            victim.unlink()

    return damage


def spoil(path: Path) -> None:
    """Inside the first data block of each table; index and footer stay whole."""
    for victim in path.glob("*.sst"):
        data = bytearray(victim.read_bytes())
        if len(data) > 4096:
            data[200:300] = b"\xff" * 100
            victim.write_bytes(bytes(data))


def overwrite(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda path: [p.write_bytes(data) for p in path.glob(name)] and None


def no_metadata(path: Path) -> None:
    names = [n for n in Rdict.list_cf(str(path), Options(raw_mode=True)) if n != "default"]
    db = Rdict(str(path), Options(raw_mode=True), {n: Options(raw_mode=True) for n in names})
    db.delete(metadata.KEY)
    db.close()


@pytest.mark.parametrize(
    "damage",
    [
        delete("CURRENT"), delete("MANIFEST-*"), delete("*.sst"), cut(".sst"), overwrite("CURRENT", b""),
        overwrite("CURRENT", b"MANIFEST-999999\n"), overwrite("MANIFEST-*", b"\xff" * 64), no_metadata, spoil,
    ],
    ids=["no-current", "no-manifest", "no-sst", "short-sst", "empty-current", "wrong-current", "bad-manifest",
         "no-meta", "spoiled-block"],
)  # fmt: skip
def test_a_damaged_store_is_begun_anew_and_says_so(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    damage(tmp_path)
    store = open_store(tmp_path, SETTINGS)
    assert store.rebuilt
    assert store.position is None
    assert any(r.levelno == logging.ERROR and "wiped and rebuilt" in r.message for r in caplog.records)
    store.apply([record(o) for o in range(300)])
    assert_exact(store, 300)
    store.close()
    store = open_store(tmp_path, SETTINGS)
    assert not store.rebuilt
    assert store.position == 300
    store.close()


def test_damage_met_while_reading_is_an_error_and_the_next_start_rebuilds(tmp_path: Path) -> None:
    filled(tmp_path)
    store = open_store(tmp_path, replace(SETTINGS, cache_bytes=8 << 10))  # too small to have read all by now
    spoil(tmp_path)
    with pytest.raises(StoreError, match="next start wipes it"):
        assert_exact(store, 300)
    store.close()
    store = open_store(tmp_path, SETTINGS)
    assert store.rebuilt
    assert store.position is None
    store.close()


def test_a_deleted_or_empty_directory_is_a_new_store(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    filled(directory)
    shutil.rmtree(directory)
    store = open_store(directory, SETTINGS)
    assert store.position is None
    assert not store.rebuilt
    store.close()
    empty = tmp_path / "empty"
    empty.mkdir()
    open_store(empty, SETTINGS).close()


def test_a_process_that_died_before_rocksdb_wrote_anything(tmp_path: Path) -> None:
    metadata.write_mark(tmp_path)
    store = open_store(tmp_path, SETTINGS)
    assert store.position is None
    store.close()


@pytest.mark.parametrize("name", ["notes.txt", "CURRENT"])
def test_a_foreign_directory_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(StoreFormatError, match=f"not a Solaris store and not empty .*{name}"):
        open_store(tmp_path, SETTINGS)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_somebody_else_s_rocksdb_is_refused(tmp_path: Path) -> None:
    db = Rdict(str(tmp_path), Options(raw_mode=True))
    db[b"key"] = b"value"
    db.close()
    with pytest.raises(StoreFormatError, match="not a Solaris store"):
        open_store(tmp_path, SETTINGS)
    db = Rdict(str(tmp_path), Options(raw_mode=True))
    assert db[b"key"] == b"value"
    db.close()


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "STORE").write_text('{"kind": "solaris-store", "format": 2}')
    with pytest.raises(StoreFormatError, match="format 2; this program reads up to 1"):
        open_store(tmp_path, SETTINGS)
    (tmp_path / "STORE").write_text('{"kind": "solaris-store", "format": 1}')
    store = open_store(tmp_path, SETTINGS)
    assert_exact(store, 300)
    store.close()


def test_newer_metadata_is_refused_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    newer = bytearray(metadata.Metadata(300).encode())
    newer[4] = 9
    names = [n for n in Rdict.list_cf(str(tmp_path), Options(raw_mode=True)) if n != "default"]
    for value, error in ((bytes(newer), "metadata version 9"), (metadata.Metadata(300, 5).encode(), None)):
        db = Rdict(str(tmp_path), Options(raw_mode=True), {n: Options(raw_mode=True) for n in names})
        db[metadata.KEY] = value
        db.close()
        if error:
            with pytest.raises(StoreFormatError, match=error):
                open_store(tmp_path, SETTINGS)
    store = open_store(tmp_path, SETTINGS)
    assert (store.position, store.clock_ms, store.rebuilt) == (300, 5, False)
    store.close()


def test_the_mark_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "STORE").write_text("corner shop")
    with pytest.raises(StoreFormatError, match="corner shop"):
        open_store(tmp_path, SETTINGS)


def test_another_ttl_finds_the_old_segments_and_drops_them_in_time(tmp_path: Path) -> None:
    filled(tmp_path)
    other = replace(SETTINGS, ttl_ms=SETTINGS.ttl_ms * 2, segments_per_ttl=7)
    store = RocksStore(tmp_path, other)
    assert store.position == 300
    store.apply([record(o) for o in range(200, 600)])
    reference = ReferenceStore(other)
    reference.apply([record(o) for o in range(600)])
    got, want = answers(store, T0 + 300 * 600), answers(reference, T0 + 300 * 600)
    assert got.aggregate_count.tolist() == want.aggregate_count.tolist()
    store.expire(T0 + 300 * 600 + 10 * other.window_ms)
    assert store.stats()["segments"] == 0
    store.close()


def test_a_checkpoint_is_a_store_of_its_own(tmp_path: Path) -> None:
    store = open_store(tmp_path / "live", SETTINGS)
    store.apply([record(o) for o in range(300)])
    store.checkpoint(tmp_path / "copy")
    store.apply([record(o) for o in range(300, 350)])
    copy = open_store(tmp_path / "copy", SETTINGS)
    assert copy.position == 300
    assert_exact(copy, 300)
    with pytest.raises(StoreError, match="no checkpoint"):
        store.checkpoint(tmp_path / "copy")
    copy.close()
    store.close()


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "a-file-instead"])
def test_a_store_removed_under_its_process_is_named_and_begun_anew(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "0"
    filled(path)
    store = open_store(path, SETTINGS)
    shutil.rmtree(path)
    if replaced:
        path.write_text("")
    if replaced:  # a file in the directory's place is met when another one is made
        store.apply([record(o) for o in range(300, 310)])
    with pytest.raises(StoreError, match=r"/0 was removed under its store. The next start rebuilds it"):
        store.flush() if replaced else store.apply([record(o) for o in range(300, 310)])
    store.close()
    if replaced:
        path.unlink()
    store = open_store(path, SETTINGS)
    assert store.position is None
    store.close()
