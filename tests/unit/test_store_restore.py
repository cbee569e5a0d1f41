from __future__ import annotations

import logging

import pytest

from state.restore import RestoreReporter, plan_restore


@pytest.mark.parametrize(
    ("position", "action", "start"),
    [
        (None, "rebuild", 10),
        (9, "wipe", 10),
        (10, "resume", 10),
        (15, "resume", 15),
        (20, "resume", 20),
        (21, "wipe", 10),
    ],
)
def test_where_a_restore_begins(position: int | None, action: str, start: int) -> None:
    plan = plan_restore(position, 10, 20)
    assert (plan.action, plan.start, plan.end, plan.records) == (action, start, 20, 20 - start)


def test_an_empty_log() -> None:
    assert plan_restore(None, 0, 0).action == "rebuild"
    assert plan_restore(0, 0, 0).action == "resume"
    assert plan_restore(5, 0, 0).action == "wipe"


def test_a_log_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match="5 to 4"):
        plan_restore(None, 5, 4)


def test_progress_has_records_rate_and_eta(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [100.0]
    r = RestoreReporter("embeddings[3]", plan_restore(None, 0, 1000), every_s=5, clock=lambda: now[0])
    assert r.progress().eta_s is None
    now[0] = 102.0
    p = r.update(200)
    assert (p.records, p.remaining, p.records_per_s, p.eta_s) == (200, 800, 100.0, 8.0)
    assert len(caplog.records) == 1
    now[0] = 105.0
    r.update(500)
    assert "500 to go, 100/s, ETA 5 s" in caplog.records[-1].message
    assert not r.done
    r.update(1000)
    assert r.done
    assert "caught up" in caplog.records[-1].message


def test_a_wipe_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    RestoreReporter("embeddings[3]", plan_restore(4, 10, 20))
    (said,) = caplog.records
    assert said.levelno == logging.ERROR
    assert "6 records were deleted unread" in said.message
