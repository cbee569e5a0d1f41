"""The frame of our pages: one self-contained file, light and dark, from a phone's width up. No script, no link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from streams.charts import STYLE

_CSS = """
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:20px 16px 48px}h1{font-size:1.5rem;margin:0 0 4px}
h2{font-size:1.05rem;margin:0 0 4px}p{margin:6px 0}.dim,figcaption,.empty{color:var(--dim);font-size:.9rem}
.tiles{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:12px;margin:18px 0}
.tile,section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.tile b{display:block;font-size:1.45rem;line-height:1.25;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span{color:var(--dim);font-size:.85rem}
.cards{margin-top:14px;display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}
section.wide{grid-column:1/-1}section{min-width:0}figure{margin:12px 0 0}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.85rem;margin:8px 0}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}
details{margin-top:8px;font-size:.85rem}summary{cursor:pointer;color:var(--dim)}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%;font-size:.88rem}
th,td{text-align:right;padding:4px 8px;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}thead th{color:var(--dim);font-weight:500}
table.facts{table-layout:fixed}table.facts th,table.facts td{text-align:left;overflow-wrap:anywhere;vertical-align:top}
table.facts th{width:9.5em;color:var(--dim);font-weight:500}
.if-narrow{display:none}
@media (max-width:760px){.if-wide{display:none}.if-narrow{display:block}
svg text{font-size:14px}th,td{padding:4px 5px}table{font-size:.8rem}
.cards{grid-template-columns:minmax(0,1fr)}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:8px}}
@media print{section,.tile{break-inside:avoid}}
"""


def document(title: str, about: str, body: Sequence[str]) -> str:
    """A whole page. `title` and `about` are text, `body` is markup."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{_CSS}</style></head>\n<body><main>"
        f'<h1>{escape(title)}</h1><p class="dim">{escape(about)}</p>\n' + "\n".join(body) + "\n</main></body></html>\n"
    )


def tiles(entries: Sequence[tuple[str, str]]) -> str:
    """(figure, what it is) as a row of tiles."""
    shown = (f'<div class="tile"><b>{escape(v)}</b><span>{escape(name)}</span></div>' for v, name in entries)
    return f'<div class="tiles">{"".join(shown)}</div>'


def card(title: str, body: str, note: str = "", wide: bool = False) -> str:
    """A section; `body` is markup, `title` and `note` are text."""
    below = f'<p class="dim">{escape(note)}</p>' if note else ""
    return f"<section{' class=wide' if wide else ''}><h2>{escape(title)}</h2>{below}{body}</section>"


def figure(chart: str, head: Sequence[str], rows: Sequence[Sequence[str]], keys: str = "") -> str:
    """A chart with its legend and, folded away, its numbers."""
    numbers = f"<details><summary>numbers</summary>{table(head, rows)}</details>" if rows else ""
    return f"<figure>{keys}{chart}{numbers}</figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(entries: Mapping[str, Any]) -> str:
    """Names and values as a table of two columns."""
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(_text(value))}</td></tr>'
        for name, value in entries.items()
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:,g}"
    return str(value)
