"""The benchmark's runner: a case that fails, hangs or lacks something costs no other case its figures."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the benchmarks are no package of the application

from benchmarks import bench
from benchmarks.harness.cluster import NotMeasured
from benchmarks.harness.run import Run


def _works(run: Run) -> None:
    run.figures.add("verifier.cpu_over_floor", [1.5, 1.7, 1.6])


def _fails(run: Run) -> None:
    raise ValueError("of no use")


def _lacks(run: Run) -> None:
    raise NotMeasured("no such thing here")


def _hangs(run: Run) -> None:
    signal.alarm(1)  # its time is over sooner
    while True:
        time.sleep(10)


@contextmanager
def _no_broker(folder: Path) -> Iterator[str]:
    yield "nowhere:1"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    return tmp_path


def test_other_cases_go_on(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "CASES", {"fails": _fails, "hangs": _hangs, "lacks": _lacks, "works": _works})
    monkeypatch.setattr(bench, "_broker", _no_broker)
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    assert bench.main() == 1
    result = json.loads((root / "reports" / "bench.json").read_text())
    assert result["verifier"]["cpu_over_floor"] == 1.6
    assert result["failures"] == {
        "fails": "ValueError: of no use",
        "hangs": "BenchError: hangs was not done after 600 s",
    }
    assert result["not_measured"] == {"lacks": "no such thing here"}
    page = (root / "docs" / "benchmarks.md").read_text()
    assert "case `lacks`: not measured: no such thing here" in page
    assert "fails: ValueError: of no use" in page
    assert "1.6" in capsys.readouterr().out


def test_what_a_machine_lacks_is_no_failure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CASES", {"lacks": _lacks, "works": _works})
    monkeypatch.setattr(bench, "_broker", _no_broker)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "lacks,works"])
    assert bench.main() == 0
    assert not (root / "docs" / "benchmarks.md").exists(), "only a whole run writes the page"


def test_without_java_and_broker_nothing_is_measured(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KAFKA_BOOTSTRAP", raising=False)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(root))
    monkeypatch.setattr(sys, "argv", ["bench.py", "--quick"])
    assert bench.main() == 2
    assert "not measured: Java 17" in capsys.readouterr().err
    assert not (root / "reports").exists()
