"""`solaris config`: the settings in force and where each came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

MASK = "******"

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; else $SOLARIS_CONFIG, else ./solaris.toml.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="GROUP.KEY=VALUE", help="Override one setting; repeatable.")
]


def config(
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: key -> value and origin.")] = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="A commented TOML file with the values in force.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="All settings, as the table of the documentation.")
    ] = False,
) -> None:
    """Show the settings in force and where each value came from. Secrets are masked.

    Example: solaris config --set verifier.top_k=20 --json
    """
    from streams.settings import SPECS, load
    from topics.kafka import is_secret

    if markdown:
        print(settings_markdown())
        return
    settings = load(config, sets or [])
    rows = [
        (key, MASK if is_secret(key) else str(value) if isinstance(value, Path) else value, settings.origin(key))
        for key, value in settings.flat().items()
    ]
    if as_json:
        print(json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, indent=2))
    elif as_toml:
        print(to_toml([(key, value, SPECS[key].help if key in SPECS else "") for key, value, _ in rows]))
    else:
        wide = max(len(key) for key, _, _ in rows)
        for key, value, origin in rows:
            print(f"{key:<{wide}}  {json.dumps(value):<28}  {origin}")


def to_toml(rows: list[tuple[str, object, str]]) -> str:
    """Rows of (key, value, help) as TOML that `streams.settings.load` reads back. None is left out, as a comment."""
    lines: list[str] = []
    group = ""
    for key, value, help in rows:
        parts = key.split(".")
        table, name = (".".join(parts[:2]), ".".join(parts[2:])) if len(parts) > 2 else (parts[0], parts[1])
        if table != group:
            lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
            group = table
        if help:
            lines.append(f"# {help}")
        name = json.dumps(name) if "." in name or not name.isascii() else name
        if value is None:
            lines.append(f"# {name} =   (unset)")
        elif value == MASK:  # must not be read back as if it were the secret
            lines.append(f"# {name} = ...  (masked)")
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines)


def settings_markdown() -> str:
    """The table of docs/settings.md."""
    from streams import settings
    from streams.layers import accepts

    lines = ["| setting | default | accepts | |", "|---|---|---|---|"]
    groups = list(dict.fromkeys(key.partition(".")[0] for key in settings.SPECS))
    for key, spec in sorted(settings.SPECS.items(), key=lambda item: groups.index(item[0].partition(".")[0])):
        help = spec.help.replace("<", "\\<")  # which Markdown takes for HTML
        default = "demo bundle" if spec.default == settings.DEMO_BUNDLE else _default(spec.default)
        lines.append(f"| `{key}` | {default} | {accepts(spec)} | {help} |")
    return "\n".join(lines)


def _default(value: object) -> str:
    if value is None:
        return "unset"
    return f"`{json.dumps(str(value) if isinstance(value, Path) else value)}`"
