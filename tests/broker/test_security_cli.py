"""The command line against a real SASL_SSL listener, configured by a solaris.toml: what is right works, what is wrong
is named in a line, with exit code 1 and no secret."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_brokers_security import PASSWORD, USER, WRONG, make_authority, make_server_pem
from test_replay import make_log

from topics.brokers import JavaKafka, Secured

pytestmark = [pytest.mark.broker, pytest.mark.java]

COMMAND = [sys.executable, "-m", "streams.cli"]


@dataclass(frozen=True)
class Case:
    folder: Path
    bootstrap: str
    log: Path

    def settings(self, ca: str = "right-ca", mechanism: str = "SCRAM-SHA-512") -> Path:
        path = self.folder / "solaris.toml"
        path.write_text(f"""
[kafka]
bootstrap = "{self.bootstrap}"
prefix = "secured."
partitions = 2
[kafka.properties]
"security.protocol" = "SASL_SSL"
"sasl.mechanism" = "{mechanism}"
"sasl.username" = "{USER}"
"ssl.ca.location" = "{self.folder / ca}.pem"
""")
        return path

    def solaris(self, *arguments: str | Path, password: str = PASSWORD, **settings: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr), after checking that neither shows a password. `settings` as for `settings`."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SOLARIS_", "KAFKA_"))}
        done = subprocess.run(
            [*COMMAND, *map(str, arguments), "--config", self.settings(**settings)],
            env=clean | {"SOLARIS_KAFKA_PROPERTIES__SASL_PASSWORD": password},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert PASSWORD not in done.stdout + done.stderr
        assert WRONG not in done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("tls")
    make_authority(folder, "right-ca")
    make_authority(folder, "wrong-ca")
    log = folder / "log.jsonl"
    make_log(log, requests=100)
    secured = Secured(make_server_pem(folder, "right-ca"), {USER: PASSWORD})
    with JavaKafka(folder / "kafka", secured=secured, tied=True) as broker:
        yield Case(folder, broker.bootstrap, log)


def test_from_create_to_tail(case: Case) -> None:
    code, out, err = case.solaris("topics", "create")
    assert code == 0, err
    assert "created  secured.impressions" in out
    assert case.solaris("topics", "check")[0] == 0
    code, out, err = case.solaris("replay", case.log)
    assert code == 0, err
    assert "350 events" in out
    code, out, err = case.solaris("tail", "impressions", "--from", "beginning", "--no-follow")
    assert code == 0, err
    assert len(out.splitlines()) == 100
    code, out, _ = case.solaris("config")
    assert code == 0
    assert "******" in out


COMMANDS = [
    ("topics", "create"),
    ("topics", "check"),
    ("topics", "describe"),
    ("replay", "LOG"),
    ("tail", "impressions"),
    ("dlq", "list"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_wrong_password_is_named(case: Case, command: tuple[str, ...]) -> None:
    arguments = [case.log if a == "LOG" else a for a in command]
    code, out, err = case.solaris(*arguments, password=WRONG)
    assert (code, out) == (1, "")
    assert "authentication failed" in err.splitlines()[-1].lower()
    assert case.bootstrap in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize("command", COMMANDS[2:5], ids=" ".join)
def test_a_wrong_authority_is_named(case: Case, command: tuple[str, ...]) -> None:
    arguments = [case.log if a == "LOG" else a for a in command]
    code, out, err = case.solaris(*arguments, ca="wrong-ca")
    assert (code, out) == (1, "")
    assert "certificate verify failed" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_mechanism_that_the_broker_does_not_offer_is_named(case: Case) -> None:
    code, out, err = case.solaris("topics", "check", mechanism="PLAIN")
    assert (code, out) == (1, "")
    assert "mechanism" in err.splitlines()[-1].lower()


def test_an_authority_file_that_is_not_there_is_named(case: Case) -> None:
    code, _, err = case.solaris("topics", "check", ca="no-such-ca")
    assert code == 1
    assert "no-such-ca" in err
    assert "Traceback" not in err


def test_an_expired_certificate_is_named(tmp_path: Path) -> None:
    make_authority(tmp_path, "right-ca")
    secured = Secured(make_server_pem(tmp_path, "right-ca", days=-1), {USER: PASSWORD})
    broker = JavaKafka(tmp_path / "kafka", secured=secured, tied=True)
    broker.start()
    try:
        code, _, err = Case(tmp_path, broker.bootstrap, tmp_path / "log.jsonl").solaris("topics", "check")
        assert code == 1
        assert "certificate verify failed" in err.splitlines()[-1]
        assert "expired" in err
    finally:
        broker.kill()
