"""Member numbers: stable over restarts, never shared by two living processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streams.instance import Instance
from topics.errors import SettingsError


def test_lowest_free_number_and_reuse(tmp_path: Path) -> None:
    one, two = Instance(tmp_path, "ranker", "host"), Instance(tmp_path, "ranker", "host")
    assert (one.name, two.name) == ("host-0", "host-1")
    one.release()
    three = Instance(tmp_path, "ranker", "host")
    assert three.name == "host-0"
    assert Instance(tmp_path, "verifier", "host").name == "host-0", "roles do not share numbers"
    two.release()
    three.release()


def test_a_killed_process_gives_its_number_back_at_once(tmp_path: Path) -> None:
    code = (
        "import time\nfrom pathlib import Path\nfrom streams.instance import Instance\n"
        f"x = Instance(Path({str(tmp_path)!r}), 'ranker', 'h')\nprint(x.name, flush=True)\ntime.sleep(60)"
    )
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert p.stdout is not None
    assert p.stdout.readline().strip() == "h-0"
    assert Instance(tmp_path, "ranker", "h").name == "h-1"
    p.kill()
    p.wait()
    assert Instance(tmp_path, "ranker", "h").name == "h-0"


def test_names_are_fit_for_kafka(tmp_path: Path) -> None:
    assert Instance(tmp_path, "ranker", "my host/ü").name == "my-host---0"


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"store\.dir"):
        Instance(tmp_path / "file", "ranker")
