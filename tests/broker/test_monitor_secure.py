"""The monitor's own Kafka client logs in over TLS as the roles do; no password in its log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_brokers_security import PASSWORD, SecureBroker, secure  # noqa: F401 -- a fixture
from test_monitor import Monitor, expect, feed

from topics.admin import create

pytestmark = [pytest.mark.broker, pytest.mark.java]


def test_sasl_over_tls(secure: SecureBroker, tmp_path: Path) -> None:  # noqa: F811
    kafka = replace(secure.settings(), prefix="m.")
    create(kafka)
    feed(kafka, "i", 400)
    m = Monitor(kafka, tmp_path)
    try:
        expect(m.wait(lambda f: f["sampled"]["joined"] == 400), 400)
        assert m.stop() == 0
    finally:
        if m.process.poll() is None:
            m.process.kill()
            m.process.wait()
    assert PASSWORD not in m.log.read_text()
