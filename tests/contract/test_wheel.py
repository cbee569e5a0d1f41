"""What `pip install .` brings: every module and every file they read; built offline from a copy of the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("topics", "models", "state", "streams")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as pip would into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    done = subprocess.run([*command, "-w", str(folder), str(tree)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as f:
        f.extractall(folder / "site")
    return folder / "site"


def files(root: Path) -> set[str]:
    found = (p.relative_to(root) for name in PACKAGES for p in (root / name).rglob("*") if p.is_file())
    return {str(p) for p in found if "__pycache__" not in p.parts}


def test_every_file_of_the_packages_is_in_the_wheel(installed: Path) -> None:
    there = files(installed)
    assert files(ROOT) - there == set()
    for name in ("models/demo_bundle/manifest.json", "streams/monitor/page.html", "topics/brokers/kafka/pom.xml"):
        assert name in there


def test_an_installed_solaris_finds_its_bundle_page_and_kafka(installed: Path, tmp_path: Path) -> None:
    code = (
        "import topics.brokers.jars as jars, streams.settings as s, streams.monitor.web as web, models.bundle as b\n"
        "from topics.brokers.compose import available\n"
        "assert b.read_bundle(s.load().model.bundle).info.vm\n"
        "assert web.PAGE.read_text().startswith('<!') and jars.jar_dir()\n"
        "assert not available(), 'docker/compose.yaml comes with the checkout only'\n"
        "print(s.__file__)"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SOLARIS_", "KAFKA_"))}
    # The packages of this environment but for the checkout itself, whose place in the path comes after.
    environment = {**clean, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(installed))
