"""Settings from layers: defaults, then a TOML file, then the environment, then flags; later ones win.

This module knows how to read and check values against frozen dataclasses; `streams.settings` says which settings there
are. Nothing is guessed: an unknown key, a wrong type or a value out of bounds is a `SettingsError` that names the key,
the value, where it came from and the remedy. The text of a secret is never part of an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from topics.errors import SettingsError
from topics.kafka import is_secret

ENV_PREFIX = "SOLARIS_"
PROPERTIES = "kafka.properties"
"""the one open-ended table: names in it are librdkafka's"""

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Spec:
    """What one key accepts."""

    key: str
    type: Any
    default: Any
    help: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None


@dataclass(frozen=True, slots=True)
class Value:
    value: Any
    origin: str
    """"default", the file's path, "environment NAME" or "--set" """


def specs(group: str, cls: type) -> list[Spec]:
    """The keys of a group, whose fields are made by `topics.fields.setting`."""
    hints = typing.get_type_hints(cls)
    out = []
    for f in dataclasses.fields(cls):
        key = f"{group}.{f.name}"
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        meta = f.metadata
        out.append(
            Spec(key, hints[f.name], default, meta["help"], meta.get("low"), meta.get("high"), meta.get("above"))
        )
    return out


def from_toml(path: Path, known: Mapping[str, Spec]) -> dict[str, Value]:
    """Raises `SettingsError` when the file cannot be read, is not TOML or has a key that nothing reads."""
    try:
        with path.open("rb") as f:
            tree = tomllib.load(f)
    except FileNotFoundError:
        raise SettingsError("--config", str(path), "there is no such file") from None
    except OSError as e:
        raise SettingsError("--config", str(path), f"cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:  # of TOML, of UTF-8, of an integer of 5,000 digits, of 10,000 brackets
        raise SettingsError("--config", str(path), f"is not TOML: {e}") from None
    out: dict[str, Value] = {}
    groups = {key.partition(".")[0] for key in known}
    for group, table in tree.items():
        if group not in groups:
            raise SettingsError(group, "[...]", f"no such group{did_you_mean(group, groups)} (in {path})")
        if not isinstance(table, dict):
            raise SettingsError(group, table, f"is a table: write [{group}] and its keys below (in {path})")
        for name, raw in _leaves(table):
            put(out, known, f"{group}.{name}", raw, str(path), text=False)
    return out


def from_environment(environment: Mapping[str, str], known: Mapping[str, Spec]) -> dict[str, Value]:
    """`SOLARIS_GROUP__KEY`, case ignored; `SOLARIS_KAFKA_PROPERTIES__NAME` with dots or underscores in NAME; and
    `KAFKA_BOOTSTRAP`. Variables of ours that name no setting are errors, since they are typing mistakes."""
    out: dict[str, Value] = {}
    groups = {key.partition(".")[0] for key in known}
    if environment.get("KAFKA_BOOTSTRAP"):
        put(out, known, "kafka.bootstrap", environment["KAFKA_BOOTSTRAP"], "environment KAFKA_BOOTSTRAP", text=True)
    for variable in sorted(environment):
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        rest = variable[len(ENV_PREFIX) :]
        group, two, name = rest.partition("__")
        group = group.lower()
        if group in ("kafka_properties", "kafka") and (group != "kafka" or name.lower().startswith("properties__")):
            name = name[len("properties__") :] if group == "kafka" else name
            key = f"{PROPERTIES}.{name.lower().replace('_', '.')}"
        elif two:
            key = f"{group}.{name.lower().replace('__', '.')}"
            table, _, last = key.rpartition(".")
            if key not in known and f"{table}.{last.replace('_', '-')}" in known:  # a variable cannot have hyphens
                key = f"{table}.{last.replace('_', '-')}"
        elif group.partition("_")[0] in groups:
            word = group.partition("_")[0]
            hint = f"{ENV_PREFIX}{word}__{group.partition('_')[2] or 'KEY'}".upper()
            raise SettingsError(variable, "...", f"group and key are parted by two underscores, as in {hint}")
        else:
            continue  # SOLARIS_CONFIG and the like
        put(out, known, key, environment[variable], f"environment {variable}", text=True)
    return out


def from_flags(sets: Sequence[str], known: Mapping[str, Spec]) -> dict[str, Value]:
    """`group.key=value`; the last of the same key wins."""
    out: dict[str, Value] = {}
    for item in sets:
        key, eq, raw = item.partition("=")
        if not eq or "." not in key:
            raise SettingsError("--set", item if eq == "" else key, "write group.key=value, as in verifier.top_k=20")
        put(out, known, key.strip(), raw, "--set", text=True)
    return out


def put(out: dict[str, Value], known: Mapping[str, Spec], key: str, raw: Any, origin: str, text: bool) -> None:
    """Checks one value and stores it. Dotted names below `kafka` are librdkafka's and pass through."""
    name = key.removeprefix(PROPERTIES + ".")
    in_table = any(k.startswith(key.rpartition(".")[0] + ".") for k in known)
    if name == key and key.startswith("kafka.") and "." in key[6:] and not in_table:
        name = key[6:]
    if name != key:
        if name == "bootstrap.servers":
            key = "kafka.bootstrap"
        else:
            if isinstance(raw, list) or not isinstance(raw, str | int | float | bool):
                raise _wrong(name, raw, "is not a string, a number or a boolean", origin)
            out[f"{PROPERTIES}.{name}"] = Value(raw, origin)
            return
    spec = known.get(key)
    if spec is None:
        groups = {k.partition(".")[0] for k in known}
        table, _, field = key.rpartition(".") if in_table else key.partition(".")
        group = key.partition(".")[0]
        if group not in groups:
            raise _wrong(key, raw, f"no such group{did_you_mean(group, groups)}", origin)
        near = did_you_mean(field, [k[len(table) + 1 :] for k in known if k.startswith(table + ".")], table + ".")
        if table == "kafka":
            near += "; a librdkafka property without a dot in its name goes under [kafka.properties]"
        raise _wrong(key, raw, f"no such setting{near}", origin)
    out[key] = Value(coerce(spec, raw, origin, text), origin)


def coerce(spec: Spec, raw: Any, origin: str, text: bool) -> Any:
    """The value in the type of its key. `text`: it came as characters (environment, flag), so "5" may be a number."""
    kinds = typing.get_args(spec.type) if typing.get_origin(spec.type) in (Union, types.UnionType) else (spec.type,)
    if types.NoneType in kinds and text and raw.strip().lower() in ("", "none"):
        return None
    for kind in kinds:
        if kind is types.NoneType:
            continue
        ok, value = _one(kind, raw, text)
        if ok:
            _bounds(spec, value, origin)
            return value
    raise _wrong(spec.key, raw, f"expected {_described(spec.type)}", origin)


def did_you_mean(word: str, known: Sequence[str] | set[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    return f"; there are {', '.join(sorted(known))}" if known else ""


def _one(kind: Any, raw: Any, text: bool) -> tuple[bool, Any]:
    """(fits, value) of one plain type."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return raw in typing.get_args(kind), raw
    if origin is tuple:
        parts = [p.strip() for p in raw.split(",") if p.strip()] if text else raw
        if not isinstance(parts, list):
            return False, None
        pairs = [_one(typing.get_args(kind)[0], p, text) for p in parts]
        return all(ok for ok, _ in pairs), tuple(v for _, v in pairs)
    try:
        if kind is bool:
            if text:
                word = raw.strip().lower()
                return word in _TRUE + _FALSE, word in _TRUE
            return type(raw) is bool, raw
        if kind is int:
            return (True, int(raw)) if text else (type(raw) is int, raw)
        if kind is float:
            if not text and type(raw) not in (int, float):
                return False, None
            number = float(raw)
            return math.isfinite(number), number
    except (ValueError, OverflowError):
        return False, None
    if kind is Path:
        return isinstance(raw, str) and raw != "", Path(raw) if isinstance(raw, str) else None
    return isinstance(raw, str), raw


def _bounds(spec: Spec, value: Any, origin: str) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if type(number) not in (int, float):
            continue
        if spec.low is not None and number < spec.low:
            raise _wrong(spec.key, value, f"must be at least {spec.low:g}", origin)
        if spec.above is not None and number <= spec.above:
            raise _wrong(spec.key, value, f"must be above {spec.above:g}", origin)
        if spec.high is not None and number > spec.high:
            raise _wrong(spec.key, value, f"must be at most {spec.high:g}", origin)


def _wrong(key: str, raw: Any, remedy: str, origin: str) -> SettingsError:
    return SettingsError(key, "******" if is_secret(key) else raw, f"{remedy} (from {origin})")


def accepts(spec: Spec) -> str:
    """The type and the bounds of a key, in words."""
    if spec.above is not None:
        bounds = f"above {spec.above:,g}"
    elif spec.low is not None and spec.high is None:
        bounds = f"at least {spec.low:,.17g}"
    else:
        bounds = f"{spec.low:,.17g} to " if spec.low is not None else ""
    if spec.high is not None:
        bounds = f"{bounds}, at most {spec.high:,.17g}" if spec.above is not None else f"{bounds}{spec.high:,.17g}"
    return ", ".join(part for part in (_described(spec.type), bounds) if part)


def _described(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if origin in (Union, types.UnionType):
        return " or ".join(_described(k) if k is not types.NoneType else "nothing" for k in typing.get_args(kind))
    if origin is tuple:
        return f"a list, each {_described(typing.get_args(kind)[0])}"
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string", Path: "a path"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted names: `security.protocol = "SSL"` is the property security.protocol, quoted or not."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
