"""Files that other programs read: Compose, the pom, the Makefile."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.monitor.blocks import Blocks
from streams.monitor.figures import View
from streams.monitor.processes import Processes
from streams.monitor.web import prometheus
from streams.settings import load
from topics.brokers.compose import COMPOSE_FILE, ROLES
from topics.brokers.jars import KAFKA_FILES, find_java, jar_dir
from topics.errors import BrokerError
from topics.events import Feedback, RankedAds, encode

ROOT = COMPOSE_FILE.parents[1]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
    return document


def test_compose_has_kafka_and_the_roles_each_with_a_health_check(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"kafka", *ROLES, "counter", "monitor", "prometheus", "grafana"}
    assert all(services[name]["healthcheck"]["test"] for name in ("kafka", *ROLES, "counter", "monitor"))
    assert services["counter"]["profiles"] == ["rolling"], "only for bundles whose VM sees rolling counts"
    assert all(services[name]["profiles"] == ["metrics"] for name in ("prometheus", "grafana")), "only when asked for"


def test_compose_publishes_on_loopback_only(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_compose_keeps_data_in_named_volumes(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service["volumes"]:
            if not isinstance(volume, str):
                assert volume["type"] == "bind"
                assert volume["read_only"], "what is mounted from the host is configuration"
                continue
            source, _, rest = volume.partition(":")
            if source.startswith("./"):
                assert rest.endswith(":ro"), "what is mounted from the checkout is configuration"
                assert (COMPOSE_FILE.parent / source).exists()
            else:
                assert source in compose["volumes"]


def test_settings_in_compose_are_settings_there_are(compose: dict[str, Any]) -> None:
    for role in (*ROLES, "counter"):
        environment = compose["services"][role]["environment"]
        settings = load(COMPOSE_FILE.with_name("defaults.toml"), environment=environment)
        assert settings.kafka.bootstrap == "kafka:19092"
        assert settings.http.port == 8080


def test_prometheus_scrapes_every_role_and_loads_the_alerts(compose: dict[str, Any]) -> None:
    folder = COMPOSE_FILE.parent / "prometheus"
    settings = yaml.safe_load((folder / "prometheus.yaml").read_text())
    targets = {t for job in settings["scrape_configs"] for c in job["static_configs"] for t in c["targets"]}
    assert targets == {"monitor:6066", *(f"{role}:8080" for role in (*ROLES, "counter"))}
    mounted = {v.split(":")[1]: v.split(":")[0] for v in compose["services"]["prometheus"]["volumes"]}
    (rules,) = settings["rule_files"]
    alerts = yaml.safe_load((COMPOSE_FILE.parent / mounted[rules]).read_text())
    said = (ROOT / "docs" / "monitoring.md").read_text()
    for rule in alerts["groups"][0]["rules"]:
        assert f"`{rule['alert']}`" in said
        assert rule["annotations"]["summary"]


def test_alerts_are_about_metrics_there_are() -> None:
    at = 1_700_000_000_000
    view = View(Blocks(1.0, 60_000, 3_600_000), Processes(3_600_000), 1.0, {"ranker": 1})
    said = {"ts": 1, "role": "ranker", "instance": "h", "pid": 1, "live": True, "ready": True}
    view.processes.stats(at, json.dumps(said).encode())
    ranked = RankedAds("i", "u", at, ["x", "y"], [0, 1], [0.8, 0.1], ["direct"] * 2, [5, 5], "v", "f", "live", 1, 2)
    view.blocks.ranked(0, at, encode(ranked), at)
    view.blocks.feedback(0, at, encode(Feedback("i", "u", at, ["x"])), at)
    exported = set(re.findall(r"^# TYPE (\w+) gauge", prometheus(view, at), re.MULTILINE))
    rules = yaml.safe_load((COMPOSE_FILE.parent / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    used = {name for rule in rules for name in re.findall(r"\bsolaris_\w+", rule["expr"])}
    assert len(used) >= 5
    assert used <= exported


def test_docker_and_java_run_the_same_kafka(compose: dict[str, Any]) -> None:
    image = compose["services"]["kafka"]["image"]
    found = re.search(r"kafka_2\.13</artifactId>\s*<version>([\d.]+)<", (KAFKA_FILES / "pom.xml").read_text())
    assert found is not None
    assert image == f"apache/kafka:{found.group(1)}"


def test_what_the_image_copies_is_in_the_checkout() -> None:
    for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists(), name


def test_the_jar_folder_follows_the_pom_and_the_cache_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOLARIS_CACHE", str(tmp_path))
    assert jar_dir().parent == tmp_path
    assert re.fullmatch(r"kafka-jars-[0-9a-f]{12}", jar_dir().name)


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_292"])
def test_an_old_java_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(BrokerError, match=f"Java 17 or newer is needed.*{version}"):
        find_java()


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "demo", "up", "down", "test", "lint", "help"):
        assert f"make {target} " in shown


def test_setup_names_the_remedy_when_there_is_no_fitting_python() -> None:
    command = ["sh", str(ROOT / "docker" / "find-python.sh"), "/bin/false"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no Python 3.11 or newer" in done.stderr
    assert "make setup PYTHON=" in done.stderr
