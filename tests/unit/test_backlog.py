"""The pressure gauge knows the pairs of what it sent, so an overload levels off at the limit."""

import numpy as np
import pytest

from streams.backlog import Sent
from streams.gate import Gate, GateSettings


def test_pairs_in_the_last_records_are_those_that_were_sent() -> None:
    sent = Sent()
    for pairs in (1_000, 0, 500):
        sent.add(100, pairs)
    assert sent.pairs_in(100) == 500
    assert sent.pairs_in(200) == 500
    assert sent.pairs_in(300) == 1_500
    assert sent.pairs_in(50) == 250
    assert sent.pairs_in(0) == 0


def test_records_from_before_count_as_the_runs_in_which_pairs_were_accepted() -> None:
    sent = Sent()
    assert sent.pairs_in(1_000) == 0
    sent.add(100, 5_000)
    sent.add(100, 0)
    assert sent.pairs_in(300) == 10_000


@pytest.mark.parametrize("batch", [1, 4, 50, 500])
def test_ten_times_the_load_levels_off_at_the_limit(batch: int) -> None:
    """1,000 events a second with 100 pairs each; the embedder does 10,000 pairs a second; the lag is heard of once a
    second. However the events are batched, what waits stays near the limit."""
    high = 50_000
    gate = Gate(GateSettings(backlog_low_pairs=high // 4, backlog_high_pairs=high))
    sent, queue = Sent(), []
    logits = np.sort(np.random.default_rng(3).normal(-3, 1, 100).astype(np.float32))[::-1].copy()
    done = waiting = peak = lag = sent_then = 0
    for k in range(60_000):
        if k % batch == 0:
            known = sent.pairs_in(lag + sent.records - sent_then) if k else 0
            in_batch: list[int] = []
        accepted = gate.take(k % 7, k, logits, 100, known + sum(in_batch))
        in_batch.append(accepted)
        queue.append(accepted)
        waiting += accepted
        if len(in_batch) == batch:
            sent.add(batch, sum(in_batch))
        budget = 10
        while budget and done < len(queue):
            took = min(budget, queue[done])
            queue[done] -= took
            budget -= took
            waiting -= took
            done += not queue[done]
        if k % 1_000 == 999:
            lag, sent_then = len(queue) - done, sent.records
        if k > 20_000:
            peak = max(peak, waiting)
    assert high // 8 < waiting
    assert peak < 1.25 * high
