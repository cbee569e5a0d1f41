"""A bundle: a folder with `manifest.json` and ONNX graphs, read and checked whole before it serves.

Nothing in a bundle is code: no pickle is read, graphs must carry their weights inside, file names stay in the folder.
See docs/models.md for the manifest and for bringing one's own model.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from models import onnxfile
from models.api import SLOTS, FeatureSpec, ModelInfo
from models.inputs import ALLOWED, BUCKETED, COUNTED, slot_width
from topics.errors import BundleError, SettingsError
from topics.ids import hash_id

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
MAX_GRAPH_BYTES = (2 << 30) - 1  # protobuf's own limit
MAX_DIM = 4096
MAX_BUCKETS = 1 << 26
GRAPHS = ("fm_pair", "fm_user", "fm_item", "vm", "vm_plus")
OUTPUTS: dict[str, dict[str, bool]] = {
    "fm_pair": {"embedding": True},
    "fm_user": {"state": True},
    "fm_item": {"vector": True, "topic": False},
    "vm": {"logit": True, "profile": False},
    "vm_plus": {"logit": True},
}
"""Outputs of each graph by name, and whether it must have them."""


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where one graph input comes from: a source of `models.inputs`; `buckets` for the hashed ones."""

    source: str
    buckets: int = 0


class Graph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str
    sha256: str
    bytes: int
    inputs: dict[str, Input]


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    version: str


class Dims(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lengths of the vectors. The state is `heads` vectors of `head_dim`, then `towers` of `tower_dim`; the item vector
    is one of `head_dim` (when there are heads), then `towers` of `tower_dim`. Their dots are the state slot: those of
    the heads as sign(x) * log1p(|x|), those of the towers as they are."""

    embedding: int = 0
    """D, the FM's logit last"""
    profile: int = 0
    heads: int = 0
    head_dim: int = 0
    towers: int = 0
    tower_dim: int = 0

    @property
    def state(self) -> int:
        return self.heads * self.head_dim + self.towers * self.tower_dim

    @property
    def item(self) -> int:
        return (self.head_dim if self.heads else 0) + self.towers * self.tower_dim

    @property
    def dots(self) -> int:
        return self.heads + self.towers


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    vm: Model
    fm: Model
    spec: FeatureSpec
    dims: Dims
    slots: tuple[str, ...]
    """slots that `vm_plus` was trained with"""
    graphs: dict[str, Graph]
    count_lag_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] | None = None
    """lag that the VM's rolling counts were trained with (`state.counts`); the service's must be the same"""
    training: dict[str, Any] = {}
    """data hash, code version, settings, seeds and metrics: for people, never read by the pipeline"""


@dataclass(frozen=True, slots=True)
class Bundle:
    path: Path
    manifest: Manifest
    graphs: dict[str, bytes]
    """the bytes whose hashes were checked; sessions are made from these, not from the files again"""
    info: ModelInfo


def load_bundle(path: Path | str) -> Bundle:
    """Reads and checks everything, including a run of each graph at 1, 2 and 1000 rows. Raises `BundleError`."""
    from models.probe import probe

    bundle = read_bundle(path)
    probe(bundle)
    return bundle


def read_bundle(path: Path | str) -> Bundle:
    """Reads manifest and graphs and checks them without running one. Raises `BundleError`."""
    path = Path(path)
    raw = _read(path, MANIFEST, MAX_MANIFEST_BYTES)
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BundleError(f"{path / MANIFEST}: {e}") from None
    check_manifest(manifest, str(path))
    graphs = {}
    for name, graph in manifest.graphs.items():
        data = _read(path, graph.file, MAX_GRAPH_BYTES)
        if len(data) != graph.bytes:
            raise BundleError(f"{path / graph.file}: {len(data)} bytes, the manifest says {graph.bytes}")
        digest = hashlib.sha256(data).hexdigest()
        if digest != graph.sha256:
            raise BundleError(f"{path / graph.file}: sha256 {digest}, the manifest says {graph.sha256}")
        try:
            onnxfile.refuse_external_data(data)
        except ValueError as e:
            raise BundleError(f"{path / graph.file}: {e}") from None
        graphs[name] = data
    return Bundle(path, manifest, graphs, model_info(manifest))


def write_bundle(path: Path | str, manifest: Manifest, graphs: dict[str, bytes]) -> Bundle:
    """Writes aside, checks whole, then puts the folder in place; a bundle that was at `path` is replaced only then.

    `file`, `sha256` and `bytes` of the manifest's graphs are filled in here. Raises `BundleError`.
    """
    path = Path(path)
    filled = {
        name: Graph(name + ".onnx", hashlib.sha256(data).hexdigest(), len(data), manifest.graphs[name].inputs)
        for name, data in graphs.items()
    }
    manifest = msgspec.structs.replace(manifest, graphs=filled)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and any(path.iterdir()) and not (path / MANIFEST).exists():
        raise BundleError(f"{path} is a folder with other things in it; name a new folder or a bundle to replace")
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for name, data in graphs.items():
            (aside / filled[name].file).write_bytes(data)
        (aside / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        bundle = load_bundle(aside)
        aside.chmod(0o755)
        if path.exists():
            old = path.with_name(f".{path.name}.old-{os.getpid()}")
            path.rename(old)
            aside.rename(path)
            shutil.rmtree(old)
        else:
            aside.rename(path)
    finally:
        if aside.exists():
            shutil.rmtree(aside)
    return Bundle(path, bundle.manifest, bundle.graphs, bundle.info)


def check_manifest(m: Manifest, where: str) -> None:
    """What a manifest must keep beyond its types. Raises `BundleError`."""

    def refuse(text: str) -> None:
        raise BundleError(f"{where}: {text}")

    if m.format != FORMAT:
        refuse(f"bundle format {m.format}; this program reads {FORMAT}")
    for role, model in (("vm", m.vm), ("fm", m.fm)):
        for field, value in (("name", model.name), ("version", model.version)):
            if not 0 < len(value) <= 128:
                refuse(f"{role}.{field} = {value!r}: give it 1 to 128 characters")
    if unknown := set(m.graphs) - set(GRAPHS):
        refuse(f"graphs {sorted(unknown)} are unknown; the graphs of a bundle are {GRAPHS}")
    if "vm" not in m.graphs:
        refuse("there is no graph vm; a bundle needs at least that one")
    if unknown := set(m.slots) - set(SLOTS):
        refuse(f"slots {sorted(unknown)} are unknown; slots are {SLOTS}")
    if len(set(m.slots)) < len(m.slots):
        refuse(f"slots {m.slots} name one twice")
    for field in Dims.__struct_fields__:
        value = getattr(m.dims, field)
        if not 0 <= value <= MAX_DIM:
            refuse(f"dims.{field} = {value}: expected 0..{MAX_DIM}")
    if m.dims.state > 0xFFFF:
        refuse(f"the state has {m.dims.state} numbers, at most 65535 fit a record")
    _check_parts(m, refuse)
    for name, graph in m.graphs.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.onnx", graph.file):
            refuse(f"graph {name}: file {graph.file!r}; expected a plain name ending in .onnx, in the bundle's folder")
        for key, given in graph.inputs.items():
            if given.source not in ALLOWED[name]:
                refuse(f"graph {name}: input {key} has source {given.source!r}; one of {sorted(ALLOWED[name])}")
            if (given.source in BUCKETED) != (given.buckets > 0) or not 0 <= given.buckets <= MAX_BUCKETS:
                refuse(
                    f"graph {name}: input {key} ({given.source}) has buckets = {given.buckets}; "
                    f"1..{MAX_BUCKETS} for {sorted(BUCKETED)}, 0 for others"
                )
    if not 0 <= m.spec.history_length <= 1000:
        refuse(f"spec.history_length = {m.spec.history_length}: expected 0..1000")
    from models.catalogue import Catalogue

    try:
        Catalogue(m.spec)
    except SettingsError as e:
        refuse(str(e))


def _check_parts(m: Manifest, refuse: Any) -> None:
    """Graphs, dims and slots that need each other."""
    has = m.graphs.__contains__
    if has("fm_pair") != (m.dims.embedding > 0):
        refuse(f"dims.embedding = {m.dims.embedding} but graph fm_pair is {'there' if has('fm_pair') else 'absent'}")
    if has("fm_user") != (m.dims.state > 0):
        refuse(f"dims give a state of {m.dims.state} but graph fm_user is {'there' if has('fm_user') else 'absent'}")
    if has("fm_user") and not has("fm_item"):
        refuse("graph fm_user needs fm_item: the state slot is their dot product")
    if (m.dims.heads > 0) != (m.dims.head_dim > 0) or (m.dims.towers > 0) != (m.dims.tower_dim > 0):
        refuse("dims: heads and head_dim, towers and tower_dim go together")
    if has("vm_plus") != bool(m.slots):
        refuse(f"slots = {m.slots} but graph vm_plus is {'there' if has('vm_plus') else 'absent'}")
    if not has("fm_pair") and set(m.slots) - {"state"}:
        refuse(f"slots {m.slots} need graph fm_pair")
    if not has("fm_user") and "state" in m.slots:
        refuse("slot state needs graph fm_user")
    if "similar" in m.slots and not m.dims.profile:
        refuse("slot similar needs a profile from graph vm (dims.profile > 0)")


def model_info(m: Manifest) -> ModelInfo:
    """The FM's hash covers its graphs and the feature spec: what could give the same pair another vector."""
    parts = [m.fm.name, m.fm.version, str(m.spec.hash()), str(m.dims.embedding), str(m.dims.state)]
    parts += [f"{name}={m.graphs[name].sha256}" for name in ("fm_pair", "fm_user", "fm_item") if name in m.graphs]
    return ModelInfo(
        vm=f"{m.vm.name}@{m.vm.version}",
        fm=f"{m.fm.name}@{m.fm.version}",
        fm_hash=hash_id("|".join(parts)),
        spec=m.spec,
        dim=m.dims.embedding,
        state_dim=m.dims.state,
        item_dim=m.dims.item,
        dots=m.dims.dots,
        profile_dim=m.dims.profile,
        slots=tuple(s for s in SLOTS if s in m.slots),
        rolling=any(i.source in COUNTED for g in m.graphs.values() for i in g.inputs.values()),
        count_lag_ms=m.count_lag_ms,
        extra={"slot_width": slot_width(m.slots, m.dims.embedding, m.dims.dots)},
    )


def _read(folder: Path, name: str, limit: int) -> bytes:
    file = folder / name
    try:
        if file.is_symlink() or not file.is_file():
            raise BundleError(f"{file} is missing or not a plain file")
        size = file.stat().st_size
        if size > limit:
            raise BundleError(f"{file} has {size} bytes, at most {limit}")
        with file.open("rb") as f:
            data = f.read(limit + 1)
    except OSError as e:
        raise BundleError(f"{file}: {e.strerror or e}") from e  # the cause says that it is the disk's, not the bundle's
    if len(data) > limit:
        raise BundleError(f"{file} has more than {limit} bytes")
    return data
