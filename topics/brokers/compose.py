"""`solaris up` with Docker Compose: Kafka and the roles in containers, from docker/compose.yaml.

<dir>/compose/settings-<hash>.toml   the settings in force, mounted into every container as its settings file

What a container must have differently (address of Kafka, where stores and bundle lie, what it listens on) is in
docker/compose.yaml as environment, which wins over the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from topics.brokers.local import Part
from topics.errors import BrokerError, SettingsError
from topics.kafka import is_secret

if TYPE_CHECKING:
    from streams.settings import Settings

COMPOSE_FILE = Path(__file__).resolve().parents[2] / "docker" / "compose.yaml"
ROLES = ("verifier", "embedder", "ranker")
AROUND = ("counter", "monitor", "prometheus", "grafana")
"""services that a stack may have besides Kafka and `ROLES`"""
OF_THE_CONTAINER = ("kafka.bootstrap", "store.dir", "model.bundle", "http.host", "http.port", "http.monitor_port")
"""settings that the containers have from docker/compose.yaml"""
SETTINGS_VARIABLE, BUNDLE_VARIABLE, PAGE_VARIABLE = "SOLARIS_SETTINGS_FILE", "SOLARIS_BUNDLE_DIR", "SOLARIS_PAGE_PORT"
_PROFILES = ("--profile", "rolling", "--profile", "metrics")


def available() -> bool:
    """There is a checkout with docker/compose.yaml, a Docker engine answers and the compose plugin is there."""
    if not COMPOSE_FILE.exists() or shutil.which("docker") is None:
        return False
    for command in (["docker", "info", "--format", "{{.ServerVersion}}"], ["docker", "compose", "version"]):
        try:
            if subprocess.run(command, capture_output=True, check=False, timeout=10).returncode != 0:
                return False
        except subprocess.TimeoutExpired:
            return False
    return True


def settings_text(settings: Settings) -> str:
    """The settings file of the containers: as `solaris config --toml`, without `OF_THE_CONTAINER`. The broker of the
    stack knows no logins, so that secrets are left out: the file need not be hidden from the containers' user."""
    from streams.config_cli import to_toml

    rows = [
        (key, str(value) if isinstance(value, Path) else value, "")
        for key, value in settings.flat().items()
        if key not in OF_THE_CONTAINER and not is_secret(key)
    ]
    return to_toml(rows) + "\n"


class ComposeStack:
    """`folder`: that of `solaris up`, for the settings file."""

    def __init__(self, folder: Path, port: int = 9092) -> None:
        self.bootstrap = f"127.0.0.1:{port}"
        self._own = folder.resolve() / "compose"
        self._environment = {**os.environ, "SOLARIS_KAFKA_PORT": str(port)}

    def configure(self, settings: Settings) -> None:
        """Writes the settings for the containers; call it before `start_roles`. Raises `SettingsError`."""
        if settings.model.device != "cpu":
            raise SettingsError(
                "model.device", settings.model.device,
                "the containers of docker/compose.yaml have no GPU; `solaris up --java` runs the roles on this host",
            )  # fmt: skip
        text = settings_text(settings)
        # Named after what is in it: with other settings Compose makes the containers anew, with the same it leaves
        # them; and one that is restarted finds the file it was started with.
        file = self._own / f"settings-{hashlib.sha256(text.encode()).hexdigest()[:12]}.toml"
        self._own.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".new")
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)  # the containers' user is another than ours
        temporary.replace(file)
        self._environment[SETTINGS_VARIABLE] = str(file)
        self._environment[BUNDLE_VARIABLE] = str(settings.model.bundle.resolve())
        if not self._environment.get(PAGE_VARIABLE):
            self._environment[PAGE_VARIABLE] = str(settings.http.monitor_port)

    @property
    def page_port(self) -> int:
        """Where the monitor's page is published, on 127.0.0.1."""
        return int(self._environment.get(PAGE_VARIABLE) or 6066)

    def start_kafka(self, timeout_s: float) -> None:
        self._run("up", "--detach", "--wait", "--wait-timeout", str(int(timeout_s)), "kafka")

    def start_roles(self, timeout_s: float, monitor: bool = True, counter: bool = False) -> None:
        services = (*ROLES, *(["counter"] if counter else []), *(["monitor"] if monitor else []))
        self._run("up", "--detach", "--build", "--wait", "--wait-timeout", str(int(timeout_s)), *services)

    def parts(self) -> list[Part]:
        """Kafka and the roles; of `AROUND` those that were started and not removed since."""
        shown = self._run(*_PROFILES, "ps", "--all", "--format", "json", quiet=True)
        rows = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
        state = {row["Service"]: row for row in rows}
        return [
            Part(name, state[name].get("State") == "running", f"{state[name].get('Status', '')}, container {name}")
            if name in state
            else Part(name, False, "not running")
            for name in ("kafka", *ROLES, *(name for name in AROUND if name in state))
        ]

    def down(self, deadline_s: float, wipe: bool) -> None:
        """Every service, whichever profile it is of."""
        self._run(*_PROFILES, "down", "--timeout", str(int(deadline_s)), *(["--volumes"] if wipe else []))
        shutil.rmtree(self._own, ignore_errors=True)

    def _run(self, *arguments: str, quiet: bool = False) -> str:
        command = ["docker", "compose", "--file", str(COMPOSE_FILE), "--project-name", "solaris", *arguments]
        done = subprocess.run(
            command, check=False, text=True, env=self._environment, stdout=subprocess.PIPE if quiet else None
        )
        if done.returncode != 0:
            said = [a for a in arguments if a not in _PROFILES][:3]
            raise BrokerError(f"docker compose {' '.join(said)} ended with exit code {done.returncode}")
        return done.stdout or ""
