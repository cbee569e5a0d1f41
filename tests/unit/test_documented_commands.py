"""Every `solaris ...` that the README, the documents, the Makefile and the commands' own help show can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from streams.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_SHOWN = re.compile(r"^(?:[$>] )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?solaris(?: (.*))?$")
ROOT_COMMAND: Any = typer.main.get_command(app)


def in_page(text: str) -> Iterator[str]:
    """Commands of code blocks (fenced or indented) and of inline code, without `solaris` itself."""
    fenced = False
    joined = re.sub(r"\\\n\s*", "", text)
    for line in joined.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            found = _SHOWN.match(line.strip().split("  #")[0].split(" # ")[0].strip())
            if found:
                yield found[1] or ""
        else:
            for code in re.findall(r"`([^`]+)`", line):
                found = _SHOWN.match(code.strip())
                if found:
                    yield found[1] or ""


def alternatives(command: str) -> Iterator[str]:
    """`topics create|check` is two commands; a pipe into another program ends one."""
    command = command.split(" | ")[0].rstrip("&").strip()
    words = command.split(" ")
    for n, word in enumerate(words):
        if "|" in word and "'" not in word:
            for one in word.split("|"):
                yield from alternatives(" ".join([*words[:n], one, *words[n + 1 :]]))
            return
    yield command


def commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name}{word} ")
        else:
            yield name + word, command


def shown() -> list[tuple[str, str]]:
    found = {(page.name, c) for page in PAGES for line in in_page(page.read_text()) for c in alternatives(line)}
    for name, command in commands(ROOT_COMMAND):
        for line in re.findall(r"solaris [a-z].*", (command.help or "").split("Example", 1)[-1]):
            found.update((f"{name} --help", c) for c in alternatives(line.strip().strip("`")[len("solaris ") :]))
    return sorted(found)


def parse(words: list[str]) -> None:
    """Finds the command and its options without running it; raises what is wrong."""
    command = ROOT_COMMAND
    while hasattr(command, "commands"):
        while words and words[0].startswith("-"):
            words = words[2:]
        if not words:
            return
        if words[0] not in command.commands:
            raise ValueError(f"No such command {words[0]}")
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context(command.name, [], resilient_parsing=True)
    context.resilient_parsing = False  # or its errors would be swallowed
    command.make_parser(context).parse_args(list(words))


@pytest.mark.parametrize(("where", "command"), shown(), ids=lambda x: str(x)[:60])
def test_a_shown_command_exists_with_its_options(where: str, command: str) -> None:
    parse(shlex.split(command))


def test_a_wrong_one_is_found() -> None:
    for wrong in ("replai x", "replay x --sped 1", "topics lst", "topics describe --nothing"):
        with pytest.raises(Exception, match=r"No such (command|option)"):
            parse(shlex.split(wrong))


def test_commands_are_found_where_they_are_shown() -> None:
    text = (
        "a `solaris topics create|check`\n```\nX=1 solaris a --b \\\n  c   # d\n"
        ".venv/bin/solaris e | head\n```\n    solaris f\n"
    )
    assert [c for line in in_page(text) for c in alternatives(line)] == [
        "topics create", "topics check", "a --b c", "e", "f",
    ]  # fmt: skip
    assert len(shown()) > 50


@pytest.mark.parametrize("name", [name for name, _ in commands(ROOT_COMMAND)])
def test_every_command_has_an_example_of_itself(name: str) -> None:
    help_text = dict(commands(ROOT_COMMAND))[name].help
    assert re.search(rf"Examples?:\s+`?solaris {name}\b", help_text), help_text
