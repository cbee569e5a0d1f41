"""The guide of docs/models.md, run as written: a foreign PyTorch FM becomes a bundle that serves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytestmark = pytest.mark.train

from models.probe import probe_batch  # noqa: E402
from models.runtime import open_runtime  # noqa: E402
from topics.errors import BundleError  # noqa: E402

GUIDE = Path(__file__).parents[2] / "docs" / "models.md"


class ForeignVm(torch.nn.Module):
    def forward(self, item_features: torch.Tensor) -> torch.Tensor:
        return item_features[:, 1].clamp(-5, 5) * 0.1 - 3


def vm_bytes() -> bytes:
    import io

    file = io.BytesIO()
    torch.onnx.export(
        ForeignVm().eval(), (torch.zeros(3, 2),), file, input_names=["item_features"], output_names=["logit"],
        opset_version=18, dynamo=False, dynamic_axes={"item_features": {0: "n"}, "logit": {0: "n"}},
    )  # fmt: skip
    return file.getvalue()


def blocks() -> tuple[str, str]:
    section = GUIDE.read_text().split("## Bringing your own PyTorch FM")[1]
    found = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(found) == 2
    return found[0], found[1]


def test_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"vm_bytes": vm_bytes()}
    for block in blocks():
        exec(block, scope)
    runtime = open_runtime(tmp_path / "bundles" / "mine")
    batch = probe_batch(scope["spec"], 5, 60, seed=1)
    assert runtime.embed(batch).shape == (60, 17)
    np.testing.assert_allclose(runtime.score(batch).logit, np.clip(batch.item_features[1], -5, 5) * 0.1 - 3, rtol=1e-5)
    assert runtime.info.fm == "my-fm@1"


def test_a_batch_axis_left_fixed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = blocks()
    scope: dict[str, Any] = {"vm_bytes": vm_bytes()}
    exec(re.sub(r"    dynamic_axes=.*\n", "", first), scope)
    with pytest.raises(BundleError, match="fixed batch"):
        exec(second, scope)
    assert not (tmp_path / "bundles" / "mine").exists()
