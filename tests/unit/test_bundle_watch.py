"""A bundle replaced while a role runs: checked aside, taken between batches; a bad one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from counting_bundle import counting_bundle

from models.runtime import OnnxRuntime, open_runtime
from streams.bundles import RETRY_S, BundleWatch
from streams.settings import DEMO_BUNDLE
from topics.errors import DeviceError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_BUNDLE, tmp_path / "bundle"))


def watch(folder: Path, steps: int = 1) -> BundleWatch:
    first: OnnxRuntime = open_runtime(folder)
    return BundleWatch(folder, [first] * steps, lambda: open_runtime(folder), 0)


def edit(folder: Path, change) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_new_version_is_taken_once_by_each_step_after_it_stood_still(folder: Path) -> None:
    w = watch(folder, steps=2)
    edit(folder, lambda m: m["fm"].update(version="2"))
    w.look()
    assert w.take(0) is None, "it may still be moving"
    w.look()
    fresh = w.take(0)
    assert fresh is not None
    assert fresh.info.fm.endswith("@2")
    assert w.take(0) is None
    assert w.take(1) is not None
    assert (w.accepted, w.refused) == (1, 0)
    assert fresh.info.fm_hash != open_runtime(DEMO_BUNDLE).info.fm_hash, "vectors of the two never meet"


@pytest.mark.parametrize("damage", ["half a graph", "no manifest", "wrong dimension", "not json", "missing graph"])
def test_a_bad_bundle_is_refused_once_and_the_old_one_goes_on(folder: Path, damage: str) -> None:
    w = watch(folder)
    before = w.info
    graph = folder / "fm_pair.onnx"
    if damage == "half a graph":
        graph.write_bytes(graph.read_bytes()[: graph.stat().st_size // 2])
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    elif damage == "wrong dimension":
        edit(folder, lambda m: m["dims"].update(embedding=m["dims"]["embedding"] + 1))
    elif damage == "not json":
        (folder / "manifest.json").write_bytes(b"{")
    else:
        graph.unlink()
    for _ in range(5):
        w.look()
    assert w.take(0) is None
    assert w.info is before
    assert (w.accepted, w.refused) == (0, 1)
    assert not w.restart_wanted.is_set()


@pytest.mark.parametrize(
    "trouble",
    [MemoryError("graph fm_pair, 4096 pairs on cuda:0"), DeviceError("graph vm on cuda: out of memory"),
     OSError(5, "Input/output error"), RuntimeError("dictionary changed size during iteration")],
)  # fmt: skip
def test_what_says_nothing_about_the_bundle_is_tried_again_ever_less_often(folder: Path, trouble: Exception) -> None:
    now_s, tries, closed = 0.0, 0, []
    room = 1

    class Closing:
        info = open_runtime(folder).info

        def close(self) -> None:
            closed.append(self)

    def load():
        nonlocal tries
        tries += 1
        if tries % 2 == 0 and room < 2:
            raise trouble
        return Closing()

    first = open_runtime(folder)
    w = BundleWatch(folder, [first, first], load, 0, clock=lambda: now_s)
    edit(folder, lambda m: m["vm"].update(version="7"))
    w.look()
    at = []
    for now_s in range(1, 101):
        before = tries
        w.look()
        at += [now_s] if tries > before else []
    assert at == [1, 6, 16, 36, 76], "5, 10, 20, 40 s apart"
    assert (w.accepted, w.refused, w.failed) == (0, 0, 5)
    assert len(closed) == 5, "the first step's, each time"
    assert w.take(0) is None
    room = 2
    now_s = 156
    w.look()
    assert (w.accepted, w.refused, w.failed) == (1, 0, 5)
    assert w.take(0) is not None
    assert w.take(1) is not None


def test_a_file_that_cannot_be_read_now_is_no_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    first = open_runtime(folder)
    w = BundleWatch(folder, [first], lambda: open_runtime(folder), 0, clock=lambda: now_s)
    edit(folder, lambda m: m["vm"].update(version="7"))
    w.look()

    def stale(self: Path, *args: object) -> None:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", stale)
        w.look()
    assert (w.accepted, w.refused, w.failed) == (0, 0, 1)
    now_s = RETRY_S
    w.look()
    assert (w.accepted, w.refused, w.failed) == (1, 0, 1)


def test_a_changed_folder_is_looked_at_without_waiting(folder: Path) -> None:
    def load():
        raise MemoryError

    w = BundleWatch(folder, [open_runtime(folder)], load, 0, clock=lambda: 0.0)
    for version in ("7", "8"):
        edit(folder, lambda m, version=version: m["vm"].update(version=version * 2))
        w.look()
        w.look()
        w.look()
    assert w.failed == 2


def test_a_repaired_bundle_is_taken_after_a_bad_one(folder: Path) -> None:
    w = watch(folder)
    good = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_bytes(b"{")
    w.look()
    w.look()
    (folder / "manifest.json").write_text(good)
    edit(folder, lambda m: m["vm"].update(version="7"))
    w.look()
    w.look()
    fresh = w.take(0)
    assert fresh is not None
    assert fresh.info.vm.endswith("@7")


def test_touching_files_is_no_new_bundle(folder: Path) -> None:
    w = watch(folder)
    edit(folder, lambda m: m["training"].update(note="read by people only"))
    w.look()
    w.look()
    assert w.take(0) is None
    assert (w.accepted, w.refused) == (0, 0)


def test_another_feature_spec_asks_for_a_restart(folder: Path) -> None:
    w = watch(folder)
    edit(folder, lambda m: m["spec"].update(history_length=m["spec"]["history_length"] - 1))
    w.look()
    w.look()
    assert w.take(0) is None
    assert w.restart_wanted.is_set() or w.refused == 1, "taken by a restart, or refused when the graphs do not fit"


def test_a_bundle_that_sees_rolling_counts_asks_for_a_restart(folder: Path) -> None:
    w = watch(folder)
    counting = counting_bundle(folder.parent / "counting")
    for file in folder.iterdir():
        file.unlink()
    for file in counting.iterdir():
        file.rename(folder / file.name)
    w.look()
    w.look()
    assert w.info.rolling
    assert w.take(0) is None
    assert w.restart_wanted.is_set(), "the ranker is to follow other topics"
