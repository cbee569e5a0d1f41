"""`solaris up` with Docker Compose: Kafka and the roles in containers, from docker/compose.yaml."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from topics.brokers.local import Part
from topics.errors import BrokerError

COMPOSE_FILE = Path(__file__).resolve().parents[2] / "docker" / "compose.yaml"
ROLES = ("verifier", "embedder", "ranker")


def available() -> bool:
    """A Docker engine answers and the compose plugin is there."""
    if shutil.which("docker") is None:
        return False
    for command in (["docker", "info", "--format", "{{.ServerVersion}}"], ["docker", "compose", "version"]):
        try:
            if subprocess.run(command, capture_output=True, check=False, timeout=10).returncode != 0:
                return False
        except subprocess.TimeoutExpired:
            return False
    return True


class ComposeStack:
    def __init__(self, port: int = 9092) -> None:
        self.bootstrap = f"127.0.0.1:{port}"
        self._environment = {**os.environ, "SOLARIS_KAFKA_PORT": str(port)}

    def start_kafka(self, timeout_s: float) -> None:
        self._run("up", "--detach", "--wait", "--wait-timeout", str(int(timeout_s)), "kafka")

    def start_processors(self, timeout_s: float, monitor: bool = True, counter: bool = False) -> None:
        services = (*ROLES, *(["counter"] if counter else []), *(["monitor"] if monitor else []))
        self._run("up", "--detach", "--build", "--wait", "--wait-timeout", str(int(timeout_s)), *services)

    def parts(self) -> list[Part]:
        shown = self._run("ps", "--all", "--format", "json", quiet=True)
        rows = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
        state = {row["Service"]: row for row in rows}
        return [
            Part(name, state[name].get("State") == "running", f"{state[name].get('Status', '')}, container {name}")
            if name in state
            else Part(name, False, "not running")
            for name in ("kafka", *ROLES, *(["counter"] if "counter" in state else []))
        ]

    def down(self, deadline_s: float, wipe: bool) -> None:
        self._run("--profile", "rolling", "down", "--timeout", str(int(deadline_s)), *(["--volumes"] if wipe else []))

    def _run(self, *arguments: str, quiet: bool = False) -> str:
        command = ["docker", "compose", "--file", str(COMPOSE_FILE), "--project-name", "solaris", *arguments]
        done = subprocess.run(
            command, check=False, text=True, env=self._environment, stdout=subprocess.PIPE if quiet else None
        )
        if done.returncode != 0:
            raise BrokerError(f"docker compose {' '.join(arguments[:3])} ended with exit code {done.returncode}")
        return done.stdout or ""
