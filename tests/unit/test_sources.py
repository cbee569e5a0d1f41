"""Candidate sources: what they announce, when, from what they know, and within which bounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.errors import SettingsError
from topics.events import Candidates, Event, Feedback, Impression, check
from topics.readers import EventLog
from topics.sources import HOUR_MS, MINUTE_MS, CandidateSources, Mix, Popular


def derive(mix: str, events: Sequence[Event], **bounds: int) -> tuple[list[Candidates], CandidateSources]:
    sources = CandidateSources(mix, **bounds)
    return [e for e in sources.derive(events) if isinstance(e, Candidates)], sources


def shown(i: int, user: str, ts: int, ads: list[str], history: list[str] | None = None) -> Impression:
    return Impression(f"i{i}", user, ts, list(ads), features={} if history is None else {"history": list(history)})


def test_carry_over_is_the_last_list_and_never_the_impressions_own() -> None:
    events = [shown(1, "u", 1_000, ["a", "b"]), shown(2, "u", 1_000_000, ["c"])]
    made, _ = derive("carry_over", events)
    assert [(c.ts, c.items) for c in made] == [(1_001, ["a", "b"]), (1_000_001, ["c"])]


def test_a_click_comes_last_in_the_history_and_first_among_the_touched() -> None:
    events: list[Event] = [
        shown(1, "u", 1_000, ["a", "b", "c"], ["x", "y"]),
        Feedback("i1", "u", 31_000, ["b"]),
    ]
    made, _ = derive("touched:2,carry_over", events)
    assert made[0].items == ["y", "x", "a", "b", "c"]
    assert made[0].features == {"history": ["x", "y"]}
    assert (made[1].ts, made[1].items) == (31_001, ["b", "y", "a", "c"])
    assert made[1].features == {"history": ["x", "y", "b"], "history_ts": [-1, -1, 31_000]}


def test_feedback_without_a_click_is_no_user_event() -> None:
    assert derive("carry_over", [shown(1, "u", 1, ["a"]), Feedback("i1", "u", 2, [])])[1].counts.events == 1


def test_clicks_the_logs_own_history_lacks_are_kept_and_not_doubled() -> None:
    events: list[Event] = [
        shown(1, "u", 1_000, ["a"], ["x"]),
        Feedback("i1", "u", 2_000, ["a"]),
        shown(2, "u", 3_000, ["b"], ["x"]),  # lags
        shown(3, "u", 4_000, ["c"], ["x", "a"]),  # has caught up
    ]
    made, _ = derive("touched", events)
    assert [c.features["history"] for c in made] == [["x"], ["x", "a"], ["x", "a"], ["x", "a"]]


def test_popular_is_the_top_of_the_past_hour_with_ties_by_id() -> None:
    events = [shown(i, f"u{i}", i, ["b", "a"]) for i in range(3)]
    events += [shown(9, "v", 20_000, ["z"])]
    made, _ = derive("popular:2", events)
    assert made[-1].items == ["a", "b"]
    later, _ = derive("popular:5", [*events, shown(10, "w", 2 * HOUR_MS, ["q"])])
    assert later[-1].items == ["q"]


def test_the_popular_hour_equals_a_recount() -> None:
    import random

    rng = random.Random(2)
    popular = Popular(10_000)
    seen: list[tuple[int, str]] = []
    ts = 10 * HOUR_MS
    for _ in range(2_000):
        ts += rng.randrange(30_000)
        ads = [f"n{rng.randrange(30)}" for _ in range(3)]
        popular.add(ts, ads)
        seen += [(ts // MINUTE_MS, a) for a in ads]
    popular._top.clear()
    first = ts // MINUTE_MS - 60
    counts: dict[str, int] = {}
    for minute, ad in seen:
        if minute > first:
            counts[ad] = counts.get(ad, 0) + 1
    want = sorted(counts, key=lambda a: (-counts[a], a))[:10]
    assert popular.top(ts, 10) == want
    assert set(popular._totals) == set(counts)


def test_one_wrong_time_does_not_empty_the_popular_hour() -> None:
    far = 4_000_000_000_000
    events = [shown(i, f"u{i}", 1_000 * i, ["a"]) for i in range(5)]
    events += [shown(7, "v", far, ["z"]), shown(8, "w", 60_000, ["b"]), shown(9, "w", 90_000, ["b"])]
    sources = CandidateSources("popular:9")
    made = {c.id: c.items for e in events if (c := sources.observe(e)) is not None}
    assert made["i9:shown:90000"][0] == "a"
    # two in a row are the log going on after a gap
    assert sources.observe(shown(10, "x", far, ["z"])) is not None
    after = sources.observe(shown(11, "x", far + 20_000, ["z"]))
    assert after is not None
    assert "a" not in after.items


def test_users_are_bounded_and_evictions_counted() -> None:
    events = [shown(i, f"u{i}", i, ["a"]) for i in range(10)]
    _, sources = derive("carry_over", events, max_users=4)
    assert sources.counts.users_evicted == 6
    assert len(sources._users) == 4


def test_items_are_capped_deduplicated_and_the_cut_is_counted() -> None:
    made, sources = derive("carry_over,touched", [shown(1, "u", 1, ["a", "b", "a", "c"], ["c", "d"])], max_items=3)
    assert made[0].items == ["a", "b", "c"]
    assert (sources.counts.pairs, sources.counts.cut) == (3, 1)


def test_popular_items_beyond_the_bound_are_counted() -> None:
    _, sources = derive("popular", [shown(1, "u", 1, ["a", "b", "c"])], max_popular=2)
    assert sources.counts.popular_overflow == 1


@pytest.mark.parametrize("mix", ["", "carry", "popular:0", "popular:x", "touched,touched", "touched:"])
def test_wrong_mixes_name_the_part(mix: str) -> None:
    with pytest.raises(SettingsError, match="candidate_sources"):
        Mix.parse(mix)


events_in_order = st.lists(
    st.tuples(
        st.integers(0, 4_000_000),
        st.sampled_from("uvw"),
        st.lists(st.sampled_from("abcdef"), max_size=5),
        st.booleans(),
    ),
    max_size=40,
)


@given(events_in_order)
def test_the_merged_stream_is_in_order_valid_unique_and_repeatable(
    rows: list[tuple[int, str, list[str], bool]],
) -> None:
    events: list[Event] = [
        Feedback(f"i{n}", user, ts, list(ads)) if click else shown(n, user, ts, ads)
        for n, (ts, user, ads, click) in enumerate(sorted(rows))
    ]
    out = list(CandidateSources().derive(events))
    assert [e for e in out if not isinstance(e, Candidates)] == events
    assert [e.ts for e in out] == sorted(e.ts for e in out)
    made = [e for e in out if isinstance(e, Candidates)]
    assert len({e.id for e in made}) == len(made)
    for e in made:
        check(e)
        assert e.items
        assert len(set(e.items)) == len(e.items)
    assert list(CandidateSources().derive(events)) == out


def test_sources_are_off_by_default_where_the_log_has_candidates(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from topics.events import encode

    path = tmp_path / "log.jsonl"
    rows: list[Event] = [shown(1, "u", 1, ["a"]), Candidates("c", "u", 2, ["b"])]
    path.write_bytes(b"\n".join(map(encode, rows)))
    assert EventLog(path).mix is None
    assert len(list(EventLog(path, "carry_over").events())) == 3
    path.write_bytes(encode(rows[0]))
    assert len(list(EventLog(path).events())) == 2
    assert len(list(EventLog(path, "off").events())) == 1
