"""The published JSON Schema is the one the types give now, and docs/topics.md is what the contracts say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from topics import schema
from topics.contracts import CONTRACTS

DOCS = Path(__file__).parents[2] / "docs"


def test_committed_schemas_are_current() -> None:
    assert schema.stale(DOCS / "schemas") == [], "run `solaris topics schema`"


@pytest.mark.parametrize("name", schema.SCHEMAS)
def test_schema_names_the_type_and_its_bounds(name: str) -> None:
    text = schema.texts()[name]
    tree = json.loads(text)
    assert tree["$schema"].startswith("https://json-schema.org/")
    for definition in tree["$defs"].values():
        assert "type" in definition["required"]
        if definition["title"] != "RankedAds":
            assert definition["properties"]["ts"]["minimum"] == 0


def test_stale_sees_a_change_and_a_missing_file(tmp_path: Path) -> None:
    schema.write(tmp_path)
    assert schema.stale(tmp_path) == []
    (tmp_path / "item.json").write_text("{}")
    (tmp_path / "feedback.json").unlink()
    assert sorted(schema.stale(tmp_path)) == ["feedback.json", "item.json"]


def test_topics_page_has_the_table_of_the_contracts() -> None:
    from topics.topics_cli import contracts_markdown

    assert contracts_markdown() in (DOCS / "topics.md").read_text(encoding="utf-8")
    assert all(f"`{c.name}`" in contracts_markdown() for c in CONTRACTS)
