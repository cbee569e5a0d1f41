"""What the fuzzer keeps of its runs goes through the same targets here, without the fuzzer; and inputs that were found
to break something once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import targets
from seeds import found, seeds
from targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MAX_BYTES = 300_000


@pytest.fixture(autouse=True, scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    at = tmp_path_factory.mktemp("fuzz")
    patch = pytest.MonkeyPatch()
    patch.setattr(targets, "folder", lambda: at)
    yield
    patch.undo()


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_our_own_errors(target: str) -> None:
    kept = sorted((CORPUS / target).iterdir())
    assert kept, "tests/fuzz/fuzz.py --minimise writes it"
    for data in (
        b"",
        b"\0",
        b"{" * 5_000,
        b"[" * 5_000,
        *seeds(target),
        *found(target),
        *(path.read_bytes() for path in kept),
    ):
        TARGETS[target](data)


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < MAX_BYTES
