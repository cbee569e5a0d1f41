"""What `solaris up` gives to Docker Compose: commands, environment and the settings file of the containers.

The `docker` of these tests is a script that writes down how it was called; no engine runs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.settings import DEMO_BUNDLE, load
from topics.brokers.compose import COMPOSE_FILE, OF_THE_CONTAINER, ROLES, ComposeStack, available, settings_text
from topics.errors import BrokerError, SettingsError

SCRIPT = """#!{python}
import json, os, sys
with open({calls!r}, "a") as f:
    seen = {{k: v for k, v in os.environ.items() if k.startswith("SOLARIS_")}}
    f.write(json.dumps([sys.argv[1:], seen]) + "\\n")
if "ps" in sys.argv:
    print(open({state!r}).read())
sys.exit(int(open({code!r}).read()))
"""


class Docker:
    def __init__(self, folder: Path) -> None:
        self._calls, self.state, self.code = (folder / name for name in ("calls", "state", "code"))
        self.state.write_text("")
        self.code.write_text("0")
        program = folder / "docker"
        paths = {"calls": str(self._calls), "state": str(self.state), "code": str(self.code)}
        program.write_text(SCRIPT.format(python=sys.executable, **paths))
        program.chmod(0o755)

    @property
    def calls(self) -> list[tuple[list[str], dict[str, str]]]:
        return [tuple(json.loads(line)) for line in self._calls.read_text().splitlines()]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    for name in [n for n in os.environ if n.startswith(("SOLARIS_", "KAFKA_"))]:
        monkeypatch.delenv(name)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return Docker(folder)


def services() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
    return dict(document["services"])


def test_containers_have_the_settings_of_up_but_for_their_own(docker: Docker, tmp_path: Path) -> None:
    bundle = tmp_path / "my bundle"
    sets = [
        "verifier.top_k=7", "kafka.partitions=8", "loop.guarantee=at_least_once", "kafka.retention_ms.stats=3600000",
        "counter.lag_ms=20000", "store.dir=/somewhere", "http.port=9000", f"model.bundle={bundle}",
    ]  # fmt: skip
    given = load(sets=[*sets, "kafka.properties.client.rack=r1", "kafka.properties.sasl.password=hidden"])
    stack = ComposeStack(tmp_path / ".run", 19092)
    stack.configure(given)
    stack.start_roles(10)
    environment = docker.calls[-1][1]
    file = Path(environment["SOLARIS_SETTINGS_FILE"])
    assert file.parent == tmp_path / ".run" / "compose"
    assert environment["SOLARIS_BUNDLE_DIR"] == str(bundle)
    assert environment["SOLARIS_KAFKA_PORT"] == "19092"
    assert "hidden" not in file.read_text(), "the broker of the stack knows no logins"
    assert file.stat().st_mode & 0o777 == 0o644, "the containers' user is another than ours"

    for role in (*ROLES, "counter", "monitor"):
        inside = load(file, environment=services()[role]["environment"])
        had, has = given.flat(), inside.flat()
        del had["kafka.properties.sasl.password"]
        differ = {key for key in had if had[key] != has.get(key)}
        assert differ <= set(OF_THE_CONTAINER), role
        assert set(has) == set(had)
        assert inside.kafka.bootstrap == "kafka:19092"
        assert (str(inside.store.dir), inside.http.port) == ("/var/lib/solaris", 8080)


def test_settings_and_bundle_are_mounted_where_the_environment_says() -> None:
    for role in (*ROLES, "counter", "monitor"):
        service = services()[role]
        mounts = {v["target"]: v["source"] for v in service["volumes"] if isinstance(v, dict)}
        environment = service["environment"]
        assert mounts[environment["SOLARIS_CONFIG"]].startswith("${SOLARIS_SETTINGS_FILE:-")
        assert mounts[environment["SOLARIS_MODEL__BUNDLE"]].startswith("${SOLARIS_BUNDLE_DIR:-")
        defaults = [source.partition(":-")[2].rstrip("}") for source in mounts.values()]
        found = [(COMPOSE_FILE.parent / name).resolve() for name in defaults]
        assert found == [COMPOSE_FILE.with_name("defaults.toml").resolve(), DEMO_BUNDLE.resolve()]


def test_other_settings_make_other_containers_and_the_same_do_not(docker: Docker, tmp_path: Path) -> None:
    def file_of(*sets: str) -> str:
        stack = ComposeStack(tmp_path)
        stack.configure(load(sets=sets))
        stack.start_roles(10)
        return docker.calls[-1][1]["SOLARIS_SETTINGS_FILE"]

    first, other, again = file_of(), file_of("verifier.top_k=7"), file_of()
    assert first == again
    assert first != other
    assert Path(first).exists(), "a container that is restarted finds what it was started with"


def test_the_page_is_published_where_it_is_set(docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = ComposeStack(tmp_path)
    assert stack.page_port == 6066
    stack.configure(load(sets=["http.monitor_port=7000"]))
    assert stack.page_port == 7000
    stack.start_roles(10)
    assert docker.calls[-1][1]["SOLARIS_PAGE_PORT"] == "7000"
    monkeypatch.setenv("SOLARIS_PAGE_PORT", "7001")
    stack = ComposeStack(tmp_path)
    stack.configure(load(sets=["http.monitor_port=7000"]))
    assert stack.page_port == 7001


def test_a_gpu_is_refused_rather_than_restarted_for_ever(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.device.*no GPU.*--java"):
        ComposeStack(tmp_path).configure(load(sets=["model.device=cuda"]))


def test_what_is_started_and_stopped(docker: Docker, tmp_path: Path) -> None:
    assert available()
    stack = ComposeStack(tmp_path)
    stack.start_kafka(60)
    stack.start_roles(60, monitor=False)
    stack.start_roles(60, monitor=True, counter=True)
    stack.configure(load())
    stack.down(30, wipe=True)
    said = [arguments[arguments.index("solaris") + 1 :] for arguments, _ in docker.calls[2:]]
    assert said[0] == ["up", "--detach", "--wait", "--wait-timeout", "60", "kafka"]
    assert said[1][-3:] == [*ROLES]
    assert said[2][-5:] == [*ROLES, "counter", "monitor"]
    down = said[3]
    assert down[:4] == ["--profile", "rolling", "--profile", "metrics"], "else Prometheus and Grafana would stay"
    assert down[4:] == ["down", "--timeout", "30", "--volumes"]
    profiles = {p for service in services().values() for p in service.get("profiles", [])}
    assert profiles == {"rolling", "metrics"}
    assert not (tmp_path / "compose").exists()


def test_parts_are_what_belongs_to_the_stack(docker: Docker, tmp_path: Path) -> None:
    def row(name: str, state: str = "running") -> str:
        return json.dumps({"Service": name, "State": state, "Status": "Up 3 seconds"})

    docker.state.write_text("\n".join(row(n) for n in ("kafka", "verifier", "embedder")))
    stack = ComposeStack(tmp_path)
    assert {p.name: p.running for p in stack.parts()} == {
        "kafka": True, "verifier": True, "embedder": True, "ranker": False
    }  # fmt: skip
    docker.state.write_text(
        "\n".join([*(row(n) for n in ("kafka", *ROLES, "counter", "grafana")), row("monitor", "exited")])
    )
    assert {p.name for p in stack.parts() if p.running} == {"kafka", *ROLES, "counter", "grafana"}
    assert [p.name for p in stack.parts() if not p.running] == ["monitor"]


def test_a_failure_names_the_command(docker: Docker, tmp_path: Path) -> None:
    docker.code.write_text("17")
    with pytest.raises(BrokerError, match="docker compose down --timeout 5 ended with exit code 17"):
        ComposeStack(tmp_path).down(5, wipe=False)


def test_the_file_is_what_config_prints(tmp_path: Path) -> None:
    path = tmp_path / "solaris.toml"
    path.write_text(settings_text(load(environment={})))
    read = load(path, environment={})
    assert dataclasses.replace(read, origins={}) == dataclasses.replace(load(environment={}), origins={})
