"""The ranker's step: records of several partitions, good and bad, each answered under its own key."""

from __future__ import annotations

from pathlib import Path

from models.runtime import open_runtime
from streams.roles import RankerStep
from streams.settings import DEMO_BUNDLE, load
from streams.step import Record, Work
from topics.events import Impression, decode_ranked_ads, encode

T0 = 1_700_000_000_000


def test_partitions_in_any_order_and_a_bad_record_between_them(tmp_path: Path) -> None:
    step = RankerStep(open_runtime(DEMO_BUNDLE), load(sets=[f"store.dir={tmp_path}"], environment={}))
    try:
        for p in range(3):
            step.open(p, None, {"embeddings": (0, 0)})
        records = []
        for i, p in enumerate([2, 0, 1, 0, 2, 2, 1]):
            value = b"{" if i == 3 else encode(Impression(f"i{i}", f"u{i}", T0, [f"N{k}" for k in range(i + 1)]))
            records.append(Record("impressions", p, i, f"u{i}".encode(), value, T0))
        result = step.run(records)
        work = Work.of(records, result, {0: 1, 1: 1, 2: 1}, step.metadata)
        answered = {r.offset: (o, decode_ranked_ads(o.value)) for r, o in work.outputs}
        assert sorted(answered) == [0, 1, 2, 4, 5, 6]
        for i, (output, answer) in answered.items():
            assert (output.partition, output.key) == (records[i].partition, records[i].key)
            assert (answer.id, answer.user, len(answer.ads)) == (f"i{i}", f"u{i}", i + 1)
        assert [(r.offset, why.reason) for r, why in work.dead] == [(3, "not_json")]
        for p in (0, 1, 2):
            offsets = [r.offset for r, o in work.outputs if o.partition == p]
            assert offsets == sorted(offsets)
    finally:
        for p in range(3):
            step.close(p)
