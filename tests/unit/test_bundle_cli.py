"""`solaris bundle check|show|diff`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from models.cli import bundle_app
from topics.errors import BundleError

DEMO = Path(__file__).parents[2] / "models" / "demo_bundle"
run = CliRunner()


def test_check() -> None:
    result = run.invoke(bundle_app, ["check", str(DEMO), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["device"] == "cpu"


def test_check_refuses(tmp_path: Path) -> None:
    bad = shutil.copytree(DEMO, tmp_path / "bad")
    (bad / "vm.onnx").unlink()
    result = run.invoke(bundle_app, ["check", str(bad)])
    assert isinstance(result.exception, BundleError)
    assert "vm.onnx" in str(result.exception)


def test_show() -> None:
    result = run.invoke(bundle_app, ["show", str(DEMO)])
    assert result.exit_code == 0
    assert "fm_pair" in result.stdout
    assert "log_loss" in result.stdout
    manifest = json.loads(run.invoke(bundle_app, ["show", str(DEMO), "--json"]).stdout)
    assert manifest["format"] == 1


@pytest.mark.parametrize(("key", "same_fm"), [("vm", True), ("fm", False)])
def test_diff(tmp_path: Path, key: str, same_fm: bool) -> None:
    other = shutil.copytree(DEMO, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest[key]["version"] = "next"
    (other / "manifest.json").write_text(json.dumps(manifest))
    report = json.loads(run.invoke(bundle_app, ["diff", str(DEMO), str(other), "--json"]).stdout)
    assert report["same_fm"] is same_fm
    assert report["changed"] == {f"{key}.version": ["1", "next"]}
