"""A bundle is refused whole, with a reason that names the part, when anything of it is off."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.api import SLOTS
from models.bundle import load_bundle, read_bundle, write_bundle
from topics.errors import BundleError

DEMO = Path(__file__).parents[2] / "models" / "demo_bundle"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "bundle"))


def edit(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def replace_graph(bundle: Path, name: str, data: bytes) -> None:
    """A graph of other bytes whose hash is right."""
    (bundle / f"{name}.onnx").write_bytes(data)

    def change(m: dict[str, Any]) -> None:
        m["graphs"][name] |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}

    edit(bundle, change)


def test_the_demo_bundle_is_good_and_small() -> None:
    bundle = load_bundle(DEMO)
    assert bundle.info.slots == SLOTS
    assert bundle.info.dim == bundle.manifest.dims.embedding == 18  # 16 numbers, the logits of conversion and click
    assert sum(f.stat().st_size for f in DEMO.iterdir()) < 4_000_000


def test_written_again_it_is_the_same(tmp_path: Path) -> None:
    old = read_bundle(DEMO)
    new = write_bundle(tmp_path / "copy", old.manifest, old.graphs)
    assert new.info == old.info
    assert new.manifest == old.manifest
    again = write_bundle(tmp_path / "copy", old.manifest, old.graphs)
    assert again.info == old.info
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy"]


def test_writing_a_bad_bundle_leaves_the_old_one(tmp_path: Path) -> None:
    old = read_bundle(DEMO)
    write_bundle(tmp_path / "b", old.manifest, old.graphs)
    with pytest.raises(BundleError):
        write_bundle(tmp_path / "b", old.manifest, {**old.graphs, "vm": old.graphs["fm_item"]})
    assert load_bundle(tmp_path / "b").info == old.info
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b"]


def test_a_folder_with_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    old = read_bundle(DEMO)
    with pytest.raises(BundleError, match="other things"):
        write_bundle(tmp_path / "notes", old.manifest, old.graphs)
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


MANIFEST_FAULTS: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("newer format", lambda m: m.update(format=2), "format 2"),
    ("unknown key", lambda m: m.update(code="import os"), "code"),
    ("missing key", lambda m: m.pop("dims"), "dims"),
    ("no vm", lambda m: m["graphs"].pop("vm"), "no graph vm"),
    ("unknown graph", lambda m: m["graphs"].update(extra=m["graphs"]["vm"]), "extra"),
    ("unknown slot", lambda m: m.update(slots=["magic"]), "magic"),
    ("slot without its graph", lambda m: m["graphs"].pop("fm_user"), "fm_user"),
    ("path traversal", lambda m: m["graphs"]["vm"].update(file="../vm.onnx"), "plain name"),
    ("absolute path", lambda m: m["graphs"]["vm"].update(file="/etc/passwd"), "plain name"),
    ("pickle", lambda m: m["graphs"]["vm"].update(file="vm.pkl"), "plain name"),
    ("file that is not there", lambda m: m["graphs"]["vm"].update(file="gone.onnx"), "missing"),
    ("wrong hash", lambda m: m["graphs"]["vm"].update(sha256="0" * 64), "sha256"),
    ("wrong size", lambda m: m["graphs"]["vm"].update(bytes=3), "bytes"),
    ("unknown source", lambda m: m["graphs"]["vm"]["inputs"]["row"].update(source="label"), "label"),
    ("source of another graph", lambda m: m["graphs"]["vm"]["inputs"]["row"].update(source="slots"), "slots"),
    ("no buckets", lambda m: m["graphs"]["vm"]["inputs"]["item_bucket"].update(buckets=0), "buckets"),
    ("negative dim", lambda m: m["dims"].update(profile=-1), "profile"),
    ("huge dim", lambda m: m["dims"].update(embedding=10**9), "embedding"),
    ("wrong dim", lambda m: m["dims"].update(embedding=20), "embedding|input slots"),
    ("wrong profile", lambda m: m["dims"].update(profile=3), "profile"),
    ("topic that is no feature", lambda m: m["spec"].update(topic="nothing"), "topic"),
    ("history of another length", lambda m: m["spec"].update(history_length=7), "history"),
    ("feature more", lambda m: m["spec"]["item"].append({"name": "x", "kind": "number"}), "item_features"),
    ("missing input", lambda m: m["graphs"]["vm"]["inputs"].pop("row"), "inputs"),
    ("input of another type", lambda m: m["graphs"]["vm"]["inputs"]["row"].update(source="base_logit"), "base_logit"),
]


@pytest.mark.parametrize(("change", "says"), [f[1:] for f in MANIFEST_FAULTS], ids=[f[0] for f in MANIFEST_FAULTS])
def test_faults_of_the_manifest(bundle: Path, change: Callable[[dict[str, Any]], Any], says: str) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match=says):
        load_bundle(bundle)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_no_manifest(bundle: Path, text: bytes) -> None:
    (bundle / "manifest.json").write_bytes(text)
    with pytest.raises(BundleError, match=r"manifest\.json"):
        load_bundle(bundle)


def test_one_flipped_bit(bundle: Path) -> None:
    data = bytearray((bundle / "vm.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / "vm.onnx").write_bytes(data)
    with pytest.raises(BundleError, match="sha256"):
        load_bundle(bundle)


@pytest.mark.parametrize("data", [b"", b"not onnx at all", b"\x80\x04\x95pickle."])
def test_a_graph_that_is_no_graph(bundle: Path, data: bytes) -> None:
    replace_graph(bundle, "vm", data)
    with pytest.raises(BundleError, match="vm"):
        load_bundle(bundle)


def test_a_graph_cut_short(bundle: Path) -> None:
    replace_graph(bundle, "vm", (bundle / "vm.onnx").read_bytes()[:-1000])
    with pytest.raises(BundleError, match="vm"):
        load_bundle(bundle)


def test_a_symbolic_link_is_not_followed(bundle: Path, tmp_path: Path) -> None:
    shutil.move(bundle / "vm.onnx", tmp_path / "elsewhere")
    (bundle / "vm.onnx").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="plain file"):
        load_bundle(bundle)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="missing"):
        load_bundle(tmp_path / "nothing")
