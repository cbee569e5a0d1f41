"""docs/integration.md, run as written: its producer and reader against a ranker on a real broker."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pipeline import Roles

from streams.audit import read_all
from streams.decoding import catalogue_change
from streams.settings import load
from topics import admin
from topics.events import check_key, decode_candidates, decode_feedback
from topics.kafka import KafkaSettings

pytestmark = pytest.mark.broker
PAGE = Path(__file__).parents[2] / "docs" / "integration.md"


def snippets(kafka: KafkaSettings) -> dict[str, Any]:
    """What the page's Python blocks define, for the test's broker and prefix."""
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        ours = block.replace('"broker-1:9092"', repr(kafka.bootstrap)).replace('"solaris."', repr(kafka.prefix))
        exec(compile(ours, str(PAGE), "exec"), scope)
    return scope


def test_the_page_gets_an_answer(kafka: KafkaSettings, tmp_path: Path) -> None:
    admin.create(kafka)
    page = snippets(kafka)
    now = int(time.time() * 1000)
    impression = {"user": "u\u00e4 1", "ts": now, "ads": ["N7", "N9", "N8"], "bids": [1, 3, 2]}
    assert page["fallback"](impression) == ["N9", "N8", "N7"]
    page["fallback"] = lambda impression: None
    page["item_changed"]("N7", 0, {"category": "sport"})
    page["item_deleted"]("N7")
    page["user_event"]("c1", impression["user"], now, ["N1"], ["N7", "N9"])
    stop = threading.Event()
    reader = threading.Thread(target=page["follow"], args=(stop,))
    with Roles(kafka, tmp_path / "roles", load().model.bundle) as roles:
        roles.start("ranker")
        roles.wait_ready()
        reader.start()
        try:
            answer, n = None, 0
            while answer is None and n < 60:  # the reader begins at the end, which it finds in its own time
                n += 1
                answer = page["rank"]({**impression, "id": f"i{n}"}, 5.0)
            page["clicked"]({**impression, "id": f"i{n}"}, now, answer[:1])
        finally:
            stop.set()
            reader.join(60)
    assert answer is not None, roles.logs()
    assert sorted(answer) == ["N7", "N8", "N9"]
    assert page["waiting"] == {}
    assert page["producer"].flush(60) == 0

    assert read_all(kafka, "dlq") == []
    candidates, shown, clicks = (read_all(kafka, topic) for topic in ("candidates", "impressions", "feedback"))
    assert len({r.partition for r in candidates + shown + clicks + read_all(kafka, "ranked-ads")}) == 1
    assert (len(candidates), len(clicks)) == (1, 1)
    check_key(candidates[0].key, decode_candidates(candidates[0].value or b""))
    check_key(clicks[0].key, decode_feedback(clicks[0].value or b""))
    assert [catalogue_change(r.key, r.value)[1] is None for r in read_all(kafka, "items")] == [False, True]
