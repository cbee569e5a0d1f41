"""README.md and the pages of docs/ render as meant: tables are whole, and links between pages lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from streams.settings import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_RULE = re.compile(r"\|\s*:?-+")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def outside_fences(text: str) -> list[str]:
    """The lines of a page; those of fenced blocks are empty, so that line numbers stay."""
    lines, fenced = [], False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        lines.append("" if fenced or fence else line)
        fenced ^= fence
    return lines


def torn_tables(text: str) -> list[int]:
    """Numbers of lines that begin a table without a header: Markdown shows these rows as plain text."""
    lines = ["", *outside_fences(text), ""]
    return [
        n
        for n in range(1, len(lines) - 1)
        if lines[n].startswith("|") and not lines[n - 1].startswith("|") and not _RULE.match(lines[n + 1])
    ]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found = set()
    for line in outside_fences(text):
        if re.match(r"#+ ", line):
            title = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            found.add(title.replace(" ", "-"))
    return found


def broken_links(page: Path) -> Iterator[str]:
    for line in outside_fences(page.read_text(encoding="utf-8")):
        for target in _LINK.findall(line):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name) if name else page
            if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
                yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tables_are_whole(page: Path) -> None:
    assert torn_tables(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_a_torn_table_and_a_broken_link_are_found(tmp_path: Path) -> None:
    assert torn_tables("| a |\n|---|\n| 1 |\n\n| 2 |\n\n```\n| code |\n```\n") == [5]
    page = tmp_path / "page.md"
    page.write_text("# One thing\n[a](#one-thing) [b](#two) [c](none.md) [d](page.md#one-thing)\n")
    assert list(broken_links(page)) == ["#two", "none.md"]


def test_every_page_is_in_the_list_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\((docs/[^)#]+)\)", readme))
    pages = {f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")} | {"docs/evaluate/README.md"}
    assert pages - named == set()


def test_the_kubernetes_file_has_settings_that_exist_and_time_to_stop() -> None:
    text = (ROOT / "docs" / "upgrading.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    pod = yaml.safe_load(block)["spec"]["template"]["spec"]
    container = pod["containers"][0]
    settings = load(environment={e["name"]: e["value"] for e in container["env"]})
    assert pod["terminationGracePeriodSeconds"] >= settings.loop.shutdown_deadline_s + 10
    assert str(settings.store.dir) in [m["mountPath"] for m in container["volumeMounts"]]
    assert settings.http.port == container["readinessProbe"]["httpGet"]["port"]
