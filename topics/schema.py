"""JSON Schema of the public JSON topics and the event log, generated from the types of `topics.events`.

The types say what decodes; the rules of `topics.events.check` that a schema can express are added as keywords, so that
a producer in another language can check its events before it sends them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from topics import events
from topics.events import Candidates, Event, Feedback, Impression, Item, RankedAds

SCHEMAS: dict[str, tuple[str, Any]] = {
    "candidates.json": ("A record of the candidates topic", Candidates),
    "impression.json": ("A record of the impressions topic", Impression),
    "feedback.json": ("A record of the feedback topic", Feedback),
    "item.json": ("A record of the items topic", Item),
    "ranked-ads.json": ("A record of the ranked-ads topic", RankedAds),
    "event-log.json": ("One line of an event log", Event),
}

_ID = {"minLength": 1, "maxLength": events.MAX_ID_CHARS}
_TIME = {"minimum": events.MIN_TS, "maximum": events.MAX_TS}
_LISTS = ("items", "ads", "scores", "bids", "clicked", "converted")


def generate(title: str, kind: Any) -> dict[str, Any]:
    schema = msgspec.json.schema(kind)
    for name, definition in schema.get("$defs", {}).items():
        if name != "RankedAds":
            _add_rules(definition)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}


def texts() -> dict[str, str]:
    """file name -> its text."""
    return {
        name: json.dumps(generate(title, kind), indent=2, ensure_ascii=False) + "\n"
        for name, (title, kind) in SCHEMAS.items()
    }


def write(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts().items():
        (folder / name).write_text(text, encoding="utf-8")
        paths.append(folder / name)
    return paths


def stale(folder: Path) -> list[str]:
    """Names of files in `folder` that are missing or differ from what `write` would put there."""
    return [
        name
        for name, text in texts().items()
        if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != text
    ]


def _add_rules(definition: dict[str, Any]) -> None:
    properties = definition.get("properties", {})
    for name in ("id", "user"):
        if properties.get(name, {}).get("type") == "string":
            properties[name].update(_ID)
    if "ts" in properties:
        properties["ts"].update(_TIME)
    for name in _LISTS:
        _lists(properties.get(name, {}), {"maxItems": events.MAX_ITEMS})
    for name in ("features", "item_features", "ad_features"):
        for part in _branches(properties.get(name, {})):
            if part.get("type") == "object":
                part["maxProperties"] = events.MAX_FEATURES


def _lists(part: dict[str, Any], keywords: dict[str, int]) -> None:
    for branch in _branches(part):
        if branch.get("type") == "array":
            branch.update(keywords)


def _branches(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [part, *part.get("anyOf", [])]
