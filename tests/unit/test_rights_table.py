"""The declared rights against what the contracts and the steps say, and the table of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from streams.counter_steps import ClickedLane, ShownLane
from streams.monitor.connect import TOPICS
from streams.roles import PairLane, RankerStep, StateLane, VerifierStep
from topics.admin import ROLES as GROUPS
from topics.contracts import CONTRACTS
from topics.errors import ContractError
from topics.rights import BY_PRINCIPAL, RIGHTS, rights_markdown, topics_of

STEPS = {
    "verifier": (VerifierStep,),
    "embedder": (StateLane, PairLane),
    "ranker": (RankerStep,),
    "counter": (ShownLane, ClickedLane),
}


@pytest.mark.parametrize("role", STEPS)
def test_a_role_may_read_what_its_steps_read_and_no_more(role: str) -> None:
    r = BY_PRINCIPAL[role]
    reads = {t for step in STEPS[role] for t in (step.input_topic, *step.follows, *step.broadcasts)}
    reads |= {"items"} if any(step.reads_items for step in STEPS[role]) else set()
    assert set(r.read) == reads
    assert set(r.write) == {c.name for c in CONTRACTS if c.writes == role} | {"stats", "dlq"}
    # A group and the transactional ids of a lane begin with the lane's name.
    assert all(any(step.role.startswith(g) for g in r.groups) for step in STEPS[role])
    assert all(any(f"{step.role}-host-0".startswith(t) for t in r.transactional_ids) for step in STEPS[role])


def test_every_topic_has_those_who_write_and_read_it() -> None:
    for c in CONTRACTS:
        writers = {r.principal for r in RIGHTS if c.name in r.write}
        readers = {r.principal for r in RIGHTS if c.name in (*r.read, *r.counts_read)}
        if c.writes not in ("all roles", "any"):
            assert writers == {c.writes}, c.name
        for who in c.reads.split(", "):
            if who in BY_PRINCIPAL:
                assert who in readers, c.name
    monitor = BY_PRINCIPAL["monitor"]
    assert set(monitor.read) == set(TOPICS)
    assert {*monitor.describe_groups, "monitor"} == set(GROUPS), "whose lag it shows"
    behind = {c.name for c in CONTRACTS if set(c.reads.split(", ")) & set(GROUPS)}
    assert behind <= {*monitor.read, *monitor.describe}


def test_topics_of_a_role() -> None:
    assert topics_of("verifier") == ["candidates", "precompute", "items", "stats", "dlq"]
    assert "counts" not in topics_of("ranker")
    assert {"counts", "item-counts"} < set(topics_of("ranker", counts=True))
    with pytest.raises(ContractError, match="no role 'rankr'"):
        topics_of("rankr")


def test_the_documentation_shows_this_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    assert rights_markdown() in page
