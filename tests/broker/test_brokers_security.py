"""Real TLS + SASL listeners: the right password works through `KafkaSettings.properties`, anything else is refused."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import KafkaException

from topics.brokers import JavaKafka, Secured, wait_ready
from topics.errors import BrokerError
from topics.kafka import KafkaSettings, producer

pytestmark = [pytest.mark.broker, pytest.mark.java]

USER = "ranker"
PASSWORD = "p4ss-that-must-not-be-logged"
WRONG = "wr0ng-that-must-not-be-logged"


def openssl(*arguments: str | Path, cwd: Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], cwd=cwd, check=True, capture_output=True)


def make_authority(folder: Path, name: str) -> Path:
    """A certificate authority: `<name>.pem` with its `<name>.key`."""
    subject = f"/CN={name}"
    command = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", subject]
    openssl(*command, "-keyout", f"{name}.key", "-out", f"{name}.pem", cwd=folder)
    return folder / f"{name}.pem"


def make_server_pem(folder: Path, authority: str, days: int = 2) -> Path:
    """Key (PKCS 8) and certificate chain of 127.0.0.1 in one file, as Kafka's PEM key store wants it. Days below 0 give
    a certificate that has expired."""
    openssl(
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=127.0.0.1",
        "-keyout",
        "s.key",
        "-out",
        "s.csr",
        cwd=folder,
    )
    (folder / "s.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    sign = ["x509", "-req", "-in", "s.csr", "-days", str(days), "-CAcreateserial", "-extfile", "s.ext", "-out", "s.crt"]
    openssl(*sign, "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", cwd=folder)
    parts = [(folder / name).read_text() for name in ("s.key", "s.crt", f"{authority}.pem")]
    store = folder / "server.pem"
    store.write_text("".join(parts))
    store.chmod(0o600)
    return store


@dataclass(frozen=True)
class SecureBroker:
    broker: JavaKafka
    mechanism: str
    right_ca: Path
    wrong_ca: Path

    def settings(self, password: str = PASSWORD, ca: Path | None = None, **more: str) -> KafkaSettings:
        properties = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": self.mechanism,
            "sasl.username": USER,
            "sasl.password": password,
            "ssl.ca.location": str(ca or self.right_ca),
            **more,
        }
        return KafkaSettings(bootstrap=self.broker.bootstrap, prefix="secure.", properties=properties)


@pytest.fixture(scope="module", params=["SCRAM-SHA-512", "PLAIN"])
def secure(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    folder = tmp_path_factory.mktemp("tls")
    right = make_authority(folder, "right-ca")
    wrong = make_authority(folder, "wrong-ca")
    secured = Secured(make_server_pem(folder, "right-ca"), {USER: PASSWORD}, mechanism=request.param)
    with JavaKafka(folder / "kafka", secured=secured, tied=True) as broker:
        yield SecureBroker(broker, request.param, right, wrong)


def refused(settings: KafkaSettings, caplog: pytest.LogCaptureFixture) -> str:
    """The error's text, after checking that neither it nor any log line shows a password."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(BrokerError) as caught:
        wait_ready(settings, timeout_s=4)
    client = producer(settings)  # logs what goes wrong, as the roles' clients do
    with pytest.raises(KafkaException) as failed:
        client.list_topics(timeout=2)
    client.poll(0)
    shown = str(caught.value) + repr(caught.value) + str(failed.value) + caplog.text
    assert PASSWORD not in shown
    assert WRONG not in shown
    return str(caught.value) + caplog.text


def test_the_right_password_and_authority_get_in(secure: SecureBroker) -> None:
    assert wait_ready(secure.settings(), timeout_s=240) > 0


def test_a_wrong_password_is_refused_and_not_shown(secure: SecureBroker, caplog: pytest.LogCaptureFixture) -> None:
    assert "authentication failed" in refused(secure.settings(password=WRONG), caplog).lower()


def test_a_wrong_authority_is_refused(secure: SecureBroker, caplog: pytest.LogCaptureFixture) -> None:
    assert "certificate" in refused(secure.settings(ca=secure.wrong_ca), caplog).lower()


def test_plain_text_on_the_secure_port_is_refused(secure: SecureBroker, caplog: pytest.LogCaptureFixture) -> None:
    plain = KafkaSettings(bootstrap=secure.broker.bootstrap, prefix="secure.")
    assert "not ready" in refused(plain, caplog)


def test_the_server_side_keeps_passwords_to_itself(secure: SecureBroker) -> None:
    kafka = secure.broker
    assert PASSWORD not in repr(kafka.secured)
    assert PASSWORD not in (kafka.data_dir / "server.log").read_text()
    assert PASSWORD not in kafka.log_tail(1000)
    assert (kafka.data_dir / "server.properties").stat().st_mode & 0o077 == 0
