"""Who may do what on the bus, declared once as data: what a role requires of the broker at its start, the table of
docs/security.md and the broker test that gives each role these rights and no other."""

from __future__ import annotations

from dataclasses import dataclass

from topics.contracts import BY_NAME
from topics.errors import ContractError


@dataclass(frozen=True, slots=True)
class Rights:
    """Of one principal. Topics are named without the prefix; `Read` and `Write` include `Describe`."""

    principal: str
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    describe: tuple[str, ...] = ()
    """topics of which only partitions and offsets are asked"""
    counts_read: tuple[str, ...] = ()
    """read as well where the bundle's VM sees rolling counts"""
    groups: tuple[str, ...] = ()
    """`Read` on every consumer group whose name begins so, after the prefix"""
    describe_groups: tuple[str, ...] = ()
    """`Describe` on the consumer group of exactly this name, after the prefix"""
    transactional_ids: tuple[str, ...] = ()
    """`Write` and `Describe` on every transactional id that begins so, after the prefix"""
    own_topics: tuple[str, ...] = ()
    """`Create`, `Read` and `Write` on every topic that begins so, after the prefix"""


RIGHTS: tuple[Rights, ...] = (
    Rights(
        "verifier", ("candidates", "items"), ("precompute", "stats", "dlq"),
        groups=("verifier",), describe_groups=("embedder",), transactional_ids=("verifier-",),
    ),
    Rights(
        "embedder", ("precompute", "embeddings", "items"), ("embeddings", "stats", "dlq"),
        groups=("embedder",), transactional_ids=("embedder-",),
    ),
    Rights(
        "ranker", ("impressions", "embeddings", "items"), ("ranked-ads", "stats", "dlq"),
        counts_read=("counts", "item-counts"), groups=("ranker",), transactional_ids=("ranker-",),
    ),
    Rights(
        "counter", ("impressions", "feedback"), ("counts", "item-counts", "stats", "dlq"),
        groups=("counter",), transactional_ids=("counter-",),
    ),
    Rights(
        "monitor", ("stats", "ranked-ads", "feedback"), describe=("candidates", "precompute", "impressions"),
        describe_groups=("verifier", "embedder", "embedder-state", "ranker", "counter", "counter-clicks"),
        groups=("monitor",), own_topics=("monitor-",),
    ),
    Rights("retrieval", write=("candidates",)),
    Rights("catalogue", write=("items",)),
    Rights("ad server", ("ranked-ads",), ("impressions", "feedback")),
)  # fmt: skip
BY_PRINCIPAL = {r.principal: r for r in RIGHTS}


def topics_of(role: str, counts: bool = False) -> list[str]:
    """The topics (without the prefix) that a role reads or writes, in the contracts' order: what must be there for it
    to start. `counts`: its bundle's VM sees rolling counts."""
    r = BY_PRINCIPAL.get(role)
    if r is None:
        raise ContractError(f"no role {role!r}; there are {', '.join(BY_PRINCIPAL)}")
    wanted = {*r.read, *r.write, *(r.counts_read if counts else ())}
    return [name for name in BY_NAME if name in wanted]


def rights_markdown() -> str:
    """The table of docs/security.md."""
    rows = ["| principal | Read | Write | other |", "|---|---|---|---|"]
    for r in RIGHTS:
        read = _listed(r.read) + (f"; with rolling counts {_listed(r.counts_read)}" if r.counts_read else "")
        other = []
        if r.groups:
            other.append(f"Read on groups {_listed(r.groups, '*')}")
        if r.describe_groups:
            groups = "groups" if len(r.describe_groups) > 1 else "group"
            other.append(f"Describe on {groups} {_listed(r.describe_groups)}")
        if r.transactional_ids:
            other.append(f"Write, Describe on transactional ids {_listed(r.transactional_ids, '*')}")
        if r.describe:
            other.append(f"Describe on topics {_listed(r.describe)}")
        if r.own_topics:
            other.append(f"Create, Read, Write on topics {_listed(r.own_topics, '*')}")
        rows.append(f"| {r.principal} | {read} | {_listed(r.write)} | {'; '.join(other)} |")
    return "\n".join(rows)


def _listed(names: tuple[str, ...], end: str = "") -> str:
    return ", ".join(f"`{name}{end}`" for name in names)
