"""`solaris state` and `solaris neighbours`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

state_app = typer.Typer(name="state", help="Look inside state directories.", no_args_is_help=True)
neighbours_app = typer.Typer(name="neighbours", help="Precomputed neighbour tables.", no_args_is_help=True)

HOURS = 3_600_000
TtlHours = Annotated[float, typer.Option("--ttl-hours", help="How long direct entries live.")]
WindowHours = Annotated[float, typer.Option("--window-hours", help="How long aggregates look back.")]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]


@state_app.callback()
def state_main() -> None:
    """Look inside state directories."""


@neighbours_app.callback()
def neighbours_main() -> None:
    """Precomputed neighbour tables."""


@state_app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="One store, or the folder that holds them.")],
    user: Annotated[str | None, typer.Option(help="A user id: every pair of that user.")] = None,
    ttl_hours: TtlHours = 6.0,
    window_hours: WindowHours = 24.0,
    as_json: AsJson = False,
) -> None:
    """Partitions, offsets, segments, bytes, users, chunks, live and expired pairs, model versions.

    The store must not be in use; ages are told at its own clock, which is event time.

    Example: solaris state inspect .run/state/ranker --user u42
    """
    from state.api import StoreSettings
    from state.inspect import inspect_store, inspect_user, partitions
    from topics.ids import hash_id

    settings = StoreSettings(
        ttl_ms=int(ttl_hours * HOURS), window_ms=int(window_hours * HOURS), lock_timeout_s=1.0, cache_bytes=8 << 20
    )
    paths = partitions(directory)
    if user is not None:
        found = [inspect_user(p, hash_id(user), settings) for p in paths]
        found = [f for f in found if f["chunks"]] or found[:1]
        if as_json:
            _print_json({"id": user, "partitions": found})
        else:
            for f in found:
                _show_user(user, f)
        return
    stores = [inspect_store(p, settings) for p in paths]
    if as_json:
        _print_json({"partitions": stores})
    else:
        for s in stores:
            _show_store(s)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _ago(ms: int) -> str:
    return f"{ms / 60_000:.1f} min" if abs(ms) < HOURS else f"{ms / HOURS:.1f} h"


def _show_store(s: dict[str, Any]) -> None:
    print(f"{s['path']}: next offset {s['position']}, clock {s['clock_ms']} ms")
    print(
        f"  {s['users']:,} users, {s['chunks']:,} chunks, {s['live_pairs']:,} live and {s['expired_pairs']:,} expired "
        f"pairs, {s['payload_bytes']:,} bytes of chunks, {s['disk_bytes']:,} on disk"
    )
    for model, chunks in s["models"].items():
        print(f"  model {model}: {chunks:,} chunks")
    for g in s["segments"]:
        print(f"  {g['name']:28} {g['chunks']:>10,} chunks {g['pairs']:>12,} pairs {g['bytes']:>14,} bytes")


def _show_user(user: str, f: dict[str, Any]) -> None:
    state = "none" if f["state_age_ms"] is None else _ago(f["state_age_ms"])
    print(
        f"user {user} ({f['user']}) in {f['path']}: {f['chunks']} chunks, state age {state}, aggregate of "
        f"{f['aggregate_pairs']} pairs with norm {f['aggregate_norm']:.4f}"
    )
    for p in f["pairs"]:
        note = "" if p["newest"] else "  replaced"
        print(
            f"  item {p['item']} topic {p['topic']:>10} age {_ago(p['age_ms']):>9} "
            f"{'live' if p['live'] else 'expired':7} norm {p['norm']:.4f} model {p['model'][:8]}{note}"
        )


@neighbours_app.command()
def build(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="One store, or the folder that holds them.")],
    out: Annotated[Path, typer.Option(help="Folder for clusters.json and its table.")],
    clusters: Annotated[int, typer.Option(min=1, help="How many clusters, at most.")] = 64,
    now_ms: Annotated[int | None, typer.Option(help="Event time to build for; default: the stores' clock.")] = None,
    ttl_hours: TtlHours = 6.0,
    window_hours: WindowHours = 24.0,
    as_json: AsJson = False,
) -> None:
    """The clustering table of similar users: k-means over the profiles of all users with a live aggregate.

    For comparison offline: rankers use an index of their own. The stores must not be in use.

    Example: solaris neighbours build .run/state/ranker --clusters 64 --out .run/neighbours
    """
    from state.api import StoreSettings
    from state.clusters import cluster
    from state.inspect import partitions
    from state.profiles import Profiles, collect, newest_model
    from state.store import open_store
    from topics.errors import StoreError

    settings = StoreSettings(
        ttl_ms=int(ttl_hours * HOURS), window_ms=int(window_hours * HOURS), lock_timeout_s=1.0, cache_bytes=8 << 20
    )
    parts: list[Profiles] = []
    found = None
    for path in partitions(directory):
        store = open_store(path, settings)
        try:
            found = found or newest_model(store)
            if found is not None:
                parts.append(collect(store, now_ms if now_ms is not None else max(0, store.clock_ms), *found))
        finally:
            store.close()
    if found is None:
        raise StoreError(f"{directory} has no pairs to build neighbours from. Run the pipeline first")
    data = Profiles.joined(parts)
    table = cluster(data, clusters, found[0], settings.window_ms)
    table.save(out)
    report = {
        "out": str(out), "model": f"{found[0]:016x}", "users": len(data), "left_out": data.left_out,
        "clusters": len(table.centroids),
    }  # fmt: skip
    if as_json:
        _print_json(report)
    else:
        print(f"{len(table.centroids)} clusters of {len(data):,} users in {out} ({data.left_out} users left out)")
