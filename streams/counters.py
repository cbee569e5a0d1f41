"""The counters of the roles, declared once as data: what the exporters call them and docs/monitoring.md says of them.

Names are those of `stats` records, ``/status`` and ``/api/roles``. A role with two lanes (`LANES`) has each lane's own
under the lane's prefix: `embedder_state_records`. ``python -m streams.counters`` prints the table of the docs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from models.api import SOURCES
from streams.gate import REASONS

Kind = Literal["counter", "gauge"]

LANES = {"embedder": ("embedder-state", "embedder"), "counter": ("counter", "counter-clicks")}
"""roles with two lanes"""
ALL = ("verifier", "embedder-state", "embedder", "ranker", "counter", "counter-clicks")
MODEL = ALL[:4]
"""lanes with a model and a catalogue"""
STORE = ("embedder", "ranker")
COUNTS = ("ranker",)
_NOT_NAME = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True, slots=True)
class Known:
    name: str
    """without the lane's prefix; a last ``*`` stands for any ending"""
    lanes: tuple[str, ...]
    meaning: str
    kind: Kind = "counter"
    of_process: bool = False
    """of the process, whatever lanes it has: no prefix"""


_STORE = (
    ("stores_wiped", "stores thrown away at their start, since the log had not what follows them; rebuilt from it"),
    ("stores_stood_in", "stores opened at a place aside, since a frozen process holds their own"),
    ("segments_dropped", "segments of a store that expired whole"),
    ("chunks_applied", "records of the changelog written to a store"),
    ("pairs_applied", "entries in them"),
    ("chunks_expired", "records of the changelog that had expired already, not written"),
    ("chunks_rejected", "records of the changelog that are no chunk, passed over"),
)

KNOWN: tuple[Known, ...] = (
    Known("stats_dropped", ALL, "`stats` records that could not be sent", of_process=True),
    Known("bundles_accepted", MODEL, "bundles that took the place of the one before", of_process=True),
    Known("bundles_refused", MODEL, "bundles that failed their check; the old one serves on", of_process=True),
    Known(
        "bundles_failed", MODEL, "attempts to load a bundle that failed for a passing reason, tried again",
        of_process=True,
    ),
    Known("events", ("verifier",), "candidates events scored"),
    Known("pairs_seen", ("verifier",), "pairs scored"),
    Known("pairs_accepted", ("verifier",), "pairs sent on to the embedder"),
    *(
        Known(f"refused_{r}", ("verifier",), f"pairs refused: {text}")
        for r, text in zip(
            REASONS,
            (
                "below `verifier.threshold`, or without a score",
                "beyond `verifier.top_k` of their event",
                "beyond `verifier.per_user_cap`",
                "below the adaptive threshold",
                "beyond the budget of the moment",
            ),
            strict=True,
        )
    ),
    Known("states", ("embedder-state",), "user states computed and written"),
    Known("states_not_finite", ("embedder-state",), "user states with a number that is not finite, to the DLQ"),
    Known("requests", ("embedder",), "requests of the verifier"),
    Known("pairs_accepted", ("embedder",), "pairs in them"),
    Known("pairs_saved", ("embedder",), "of these, not embedded: the embedding there is fresh"),
    Known("pairs_embedded", ("embedder",), "of these, embedded by the FM and written"),
    Known("pairs_not_finite", ("embedder",), "of these, with a number that is not finite, left out"),
    Known("impressions", ("ranker",), "impressions ranked"),
    Known("ads", ("ranker",), "ads in them"),
    *(
        Known(f"source_{s}", ("ranker",), f"ads whose best source was `{s}`" + ": nothing known" * (s == "none"))
        for s in SOURCES
    ),
    Known("similar_asked", ("ranker",), "impressions of users without an aggregate, for whom similar users were asked"),
    Known("neighbour_builds", ("ranker",), "builds of the index of similar users that were begun"),
    Known("neighbour_failures", ("ranker",), "of these, failed: the index before stays in use, and ages"),
    Known("counts_known", COUNTS, "impressions ranked with rolling counts"),
    Known("counts_unknown", COUNTS, "impressions ranked without: no counter, or one that is far behind"),
    Known("events_counted", ("counter", "counter-clicks"), "impressions, or feedback events, counted"),
    Known("ads_counted", ("counter",), "ads in them"),
    Known("clicks_counted", ("counter-clicks",), "clicks in them"),
    Known("events_empty", ("counter", "counter-clicks"), "events in which there was nothing to count"),
    Known("items", MODEL, "records of the catalogue taken"),
    Known("items_deleted", MODEL, "null values of the catalogue: the item is as one never seen"),
    Known("items_rejected", MODEL, "records of the catalogue passed over: unreadable, or under another key"),
    Known("items_evicted", MODEL, "items forgotten because the catalogue was full, those written longest ago"),
    Known("mistyped", MODEL, "feature values of the wrong kind, taken as missing"),
    Known("non_finite", MODEL, "numbers out of the model's graphs that are not finite, replaced"),
    Known("bundles_swapped", MODEL, "times that this lane went on with another model"),
    Known("rejected_*", ALL, "records rejected, by the reason that their dead letter has"),
    Known("events_late", STORE, "events behind the clock of their partition"),
    Known("jumps_doubted", STORE, "events so far ahead that the clock of their partition did not follow"),
    *(Known(name, STORE, meaning) for name, meaning in _STORE),
    *(Known(f"counts_{name}", COUNTS, f"the same of rolling counts: `{name}`") for name, _ in _STORE),
    Known("item_counts_records", COUNTS, "records of `item-counts` added up"),
    Known("item_counts_repeated", COUNTS, "records of `item-counts` seen before, passed over"),
    Known("item_counts_rejected", COUNTS, "records of `item-counts` that are unreadable, passed over"),
    Known("item_counts_refused", COUNTS, "entries of items beyond `counter.max_items`, not counted"),
    Known("item_counts_compactions", COUNTS, "times that items without counts were thrown out of memory"),
    Known("item_counts_items", COUNTS, "items whose counts are held", "gauge"),
    Known("item_counts_bytes", COUNTS, "memory they take", "gauge"),
    Known("item_counts_restored", COUNTS, "1 once `item-counts` was read to where it ended at the start", "gauge"),
    Known("loop_steps", ALL, "batches committed"),
    Known("loop_records", ALL, "records in them"),
    Known("loop_dead", ALL, "of these, rejected"),
    Known("loop_dropped_generation", ALL, "records polled and not done, since their partition went to another process"),
    Known("loop_input_deleted", ALL, "records that the topic's retention deleted before they were read"),
    Known("loop_input_truncated", ALL, "records read and committed that the broker lost since"),
    Known("loop_pauses", ALL, "times that reading was paused because the core did not keep up"),
    Known("loop_poll_errors", ALL, "errors of the Kafka client that it goes on from"),
    Known("loop_broker_retries", ALL, "calls to the broker that were tried again"),
    Known("loop_partitions_lost", ALL, "partitions that were another's before they could be handed over"),
    Known("loop_revoke_deadline_missed", ALL, "batches not finished inside `loop.shutdown_deadline_s` of a revoke"),
    Known("loop_transactions_aborted", ALL, "transactions aborted; their records are done again"),
)  # fmt: skip


def known(role: str, name: str) -> Known | None:
    """What is declared of a counter as it stands in the status of a role."""
    return _known(role, name)


def kind(role: str, name: str) -> Kind:
    found = _known(role, name)
    return found.kind if found is not None else "counter"


def metric(role: str, name: str, prefix: str) -> tuple[str, Kind]:
    """Its name in Prometheus' text format, and its type there."""
    of = kind(role, name)
    return prefix + _NOT_NAME.sub("_", name) + ("_total" if of == "counter" else ""), of


@lru_cache(4096)  # names come from `stats`, which others can write to
def _known(role: str, name: str) -> Known | None:
    lanes = LANES.get(role, (role,))
    prefixes = {lane: lane.replace("-", "_") + "_" if len(lanes) > 1 else "" for lane in lanes}
    # The longest prefix first: one lane's is the beginning of the other's.
    for lane in sorted(lanes, key=len, reverse=True):
        bare = name.removeprefix(prefixes[lane]) if name.startswith(prefixes[lane]) else None
        for k in KNOWN:
            own = name if k.of_process else bare
            if lane in k.lanes and own is not None and _fits(k.name, own):
                return k
    return None


def _fits(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def markdown() -> str:
    """The table of docs/monitoring.md."""
    rows = ["| name | of | type | counts |", "|---|---|---|---|"]
    for k in KNOWN:
        lanes = {ALL: "all", MODEL: "all with a model"}.get(k.lanes, ", ".join(k.lanes))
        rows.append(f"| `{k.name}` | {lanes}{', per process' * k.of_process} | {k.kind} | {k.meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
