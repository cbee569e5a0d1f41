"""What training produced, as graphs and a bundle: which net becomes which graph, with which inputs and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.api import I64, FeatureSpec
from models.bundle import Bundle, Dims, Graph, Input, Manifest, Model, model_info
from models.export import FM_ITEM, FM_PAIR, FM_USER, VM, VM_PLUS, export, with_counts
from models.inputs import EXTRA, slot_spans, slot_width
from models.nets import FmSize, ItemSide, ItemSideWithTopics, PairFm, StateFm, Vm, VmPlus, VmSize
from models.program import export_program
from models.runtime import OnnxRuntime
from models.topics import BUCKETS
from models.train_settings import TrainSettings

GraphToExport = tuple[str, nn.Module, Sequence[str], dict[str, int], Sequence[str]]
"""(name, module, sources, buckets, outputs)"""


class Packing:
    """The layout that the nets of one run share."""

    settings: TrainSettings
    spec: FeatureSpec
    topic_column: int
    fm_size: FmSize
    vm_size: VmSize
    topics: I64 | None
    """topic by item bucket, for a log without a category to be the topic"""
    slots: tuple[str, ...]

    @property
    def fm_buckets(self) -> dict[str, int]:
        return {"item_bucket": self.fm_size.item_buckets}

    @property
    def vm_buckets(self) -> dict[str, int]:
        return {"item_bucket": self.vm_size.item_buckets}

    def graphs(
        self, pair: PairFm, state: StateFm, vm: Vm, plus: VmPlus | None = None
    ) -> tuple[dict[str, bytes], dict[str, dict[str, Input]]]:
        """Exported graphs and their inputs."""
        data, inputs = {}, {}
        for name, module, sources, buckets, outputs in self._to_export(pair, state, vm, plus):
            data[name], inputs[name] = export(
                module, self.spec, self.topic_column, sources, buckets, outputs, self.slot_width
            )
        return data, inputs

    def programs(self, pair: PairFm, state: StateFm, vm: Vm, plus: VmPlus | None = None) -> dict[str, bytes]:
        """The same graphs as `torch.export` programs, for `models.torch_runtime`."""
        return {
            name: export_program(module, self.spec, self.topic_column, sources, buckets, outputs, self.slot_width)
            for name, module, sources, buckets, outputs in self._to_export(pair, state, vm, plus)
        }

    def _to_export(self, pair: PairFm, state: StateFm, vm: Vm, plus: VmPlus | None) -> list[GraphToExport]:
        todo: list[GraphToExport] = [
            ("fm_pair", pair, FM_PAIR, self.fm_buckets, ("embedding",)),
            ("fm_user", state, FM_USER, {}, ("state",)),
            self._item_graph(state),
            ("vm", vm, with_counts(VM, vm.size.rolling), self.vm_buckets, ("logit", "profile")),
        ]
        if plus is not None:
            todo.append(("vm_plus", plus, with_counts(VM_PLUS, plus.size.rolling), {}, ("logit",)))
        return todo

    @property
    def slot_width(self) -> int:
        return slot_width(self.slots, self.dims.embedding, self.dims.dots)

    def _item_graph(self, state: StateFm) -> GraphToExport:
        if self.topics is None:
            return "fm_item", ItemSide(state), FM_ITEM, {}, ("vector",)
        module = ItemSideWithTopics(state, torch.from_numpy(self.topics))
        return "fm_item", module, ("item_bucket", *FM_ITEM), {"item_bucket": BUCKETS}, ("vector", "topic")

    @property
    def slot_spans(self) -> dict[str, tuple[int, int]]:
        """Where each slot's columns lie."""
        return slot_spans(self.slots, self.dims.embedding, self.dims.dots)

    @property
    def age_columns(self) -> list[int]:
        return [end - EXTRA[s] + 1 for s, (_, end) in self.slot_spans.items()]

    @property
    def dims(self) -> Dims:
        s = self.fm_size
        return Dims(s.outputs, self.vm_size.profile, s.heads, 64, s.towers, s.tower_dim)

    def manifest(
        self, graphs: dict[str, bytes], inputs: dict[str, dict[str, Input]], training: dict[str, Any]
    ) -> Manifest:
        s = self.settings
        return Manifest(
            format=1,
            vm=Model(f"{s.name}-vm-{s.vm}" + ("-rolling" if s.counters == "rolling" else ""), s.version),
            fm=Model(f"{s.name}-fm-{s.preset}", s.version),
            spec=self.spec,
            dims=self.dims,
            slots=self.slots if "vm_plus" in graphs else (),
            graphs={
                name: Graph(f"{name}.onnx", sha256(data).hexdigest(), len(data), inputs[name])
                for name, data in graphs.items()
            },
            count_lag_ms=s.count_lag_ms if s.counters == "rolling" else None,
            training=training,
        )

    def runtime(self, graphs: dict[str, bytes], inputs: dict[str, dict[str, Input]]) -> OnnxRuntime:
        """The production runtime over graphs that are not written yet. All slots are built, `vm_plus` or not."""
        manifest = self.manifest(graphs, inputs, {})
        info = replace(model_info(manifest), slots=self.slots)
        return OnnxRuntime(Bundle(Path(), manifest, graphs, info), "cpu", threads=torch.get_num_threads())
