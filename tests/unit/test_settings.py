"""Settings: layers, origins, and errors that name key, value and remedy."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streams import config_cli, settings
from streams.layers import coerce
from streams.settings import SPECS, Settings, load
from topics.errors import SettingsError
from topics.kafka import KafkaSettings, admin, is_secret, masked


@pytest.fixture(autouse=True)
def _nothing_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("SOLARIS_") or n == "KAFKA_BOOTSTRAP"]:
        monkeypatch.delenv(name)


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "s.toml"
        path.write_text(text)
        return path

    return write


def test_defaults_are_within_their_own_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    s = load(environment={})
    assert s == dataclasses.replace(s)
    assert s.kafka.bootstrap == "127.0.0.1:9092"
    assert s.origin("verifier.top_k") == "default"
    for key, spec in SPECS.items():
        if spec.default is not None:
            assert coerce(spec, _as_read(spec.default), key, text=False) == spec.default


def test_later_layers_win_and_each_value_remembers_its_own(toml) -> None:
    path = toml('[verifier]\ntop_k = 7\nthreshold = 0.25\nbudget_share = 1\n[kafka]\nbootstrap = "file:1"\n')
    env = {"SOLARIS_VERIFIER__TOP_K": "8", "SOLARIS_VERIFIER__BUDGET_PAIRS_PER_S": "5", "KAFKA_BOOTSTRAP": "env:2"}
    s = load(path, ["verifier.top_k=9", "embedder.refresh=ttl"], env)
    assert (s.verifier.top_k, s.origin("verifier.top_k")) == (9, "--set")
    assert s.verifier.threshold == 0.25
    assert s.origin("verifier.threshold") == str(path)
    assert type(s.verifier.budget_share) is float
    assert s.verifier.budget_pairs_per_s == 5.0
    assert s.origin("verifier.budget_pairs_per_s") == "environment SOLARIS_VERIFIER__BUDGET_PAIRS_PER_S"
    assert s.kafka.bootstrap == "env:2"
    assert s.embedder.refresh == "ttl"
    s = load(path, [], env | {"SOLARIS_KAFKA__BOOTSTRAP": "env:3"})
    assert s.kafka.bootstrap == "env:3"


def test_config_file_comes_from_flag_variable_or_folder(toml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = toml("[http]\nport = 1\n")
    assert load(environment={"SOLARIS_CONFIG": str(path)}).http.port == 1
    (tmp_path / "solaris.toml").write_text("[http]\nport = 2\n")
    assert load(environment={}).http.port == 2
    assert load(environment={"SOLARIS_CONFIG": str(path)}).http.port == 1
    with pytest.raises(SettingsError, match="no such file"):
        load(tmp_path / "nothing.toml", environment={})
    with pytest.raises(SettingsError, match="cannot be read"):
        load(tmp_path, environment={})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[verifier]\ntop_kk = 1", ["verifier.top_kk", "did you mean verifier.top_k?", "s.toml"]),
        ("[verifer]\ntop_k = 1", ["verifer", "did you mean verifier?"]),
        ('[verifier]\ntop_k = "many"', ["verifier.top_k = 'many'", "a whole number"]),
        ("[verifier]\ntop_k = true", ["verifier.top_k = True", "a whole number"]),
        ("[verifier]\ntop_k = 1.5", ["a whole number"]),
        ("[verifier]\ntop_k = 0", ["at least 1"]),
        ("[verifier]\nthreshold = nan", ["a finite number"]),
        ("[verifier]\nbudget_share = 0", ["above 0"]),
        ("[verifier]\nbudget_share = 1.01", ["at most 1"]),
        ('[model]\ndevice = "gpu"', ["model.device = 'gpu'", "one of cpu, cuda"]),
        ('[model]\ndevice = "cuda:x"', ["cuda:<n>"]),
        ('[model]\ndevice = "cpu:0"', ["one of cpu, cuda"]),
        ("[store]\ndir = 3", ["a path"]),
        ("[store]\nsync = 1", ["true or false"]),
        ("[store]\nttl_ms = 100\nwindow_ms = 50", ["store.window_ms = 50", "store.ttl_ms = 100"]),
        ("[kafka.retention_ms]\nembeddings = 60000", ["kafka.retention_ms.embeddings = 60000", "86400000"]),
        ("[kafka.retention_ms]\nitem-counts = 60000", ["kafka.retention_ms.item-counts = 60000", "86410000"]),
        ("[counter]\nlag_ms = 3600001", ["counter.lag_ms = 3600001"]),
        ("[kafka.retention_ms]\nembedings = 60000", ["did you mean kafka.retention_ms.embeddings?"]),
        ("[kafka.retention_ms]\nitems = 60000", ["no such setting"]),
        ('[kafka]\nprefix = "a b"', ["kafka.prefix"]),
        ('[kafka]\nbootstrap = " "', ["kafka.bootstrap"]),
        ('[kafka]\nsasl = "x"', ["kafka.sasl", "[kafka.properties]"]),
        ('[kafka.properties]\n"group.id" = "x"', ["group.id", "named after kafka.prefix"]),
        ('[kafka.properties]\n"isolation.level" = "x"', ["committed records only"]),
        ("[kafka.properties]\nlist = [1]", ["not a string"]),
        ("top_k = 1", ["top_k", "no such group"]),
        ("verifier = 1", ["write [verifier]"]),
        ("[verifier", ["is not TOML"]),
    ],
)
def test_errors_name_key_value_and_remedy(toml, text: str, parts: list[str]) -> None:
    with pytest.raises(SettingsError) as e:
        load(toml(text), environment={})
    for part in parts:
        assert part in str(e.value)


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({"SOLARIS_VERIFIER_TOP_K": "1"}, "SOLARIS_VERIFIER__TOP_K"),
        ({"SOLARIS_VERIFIER__TOPK": "1"}, "did you mean verifier.top_k?"),
        ({"SOLARIS_NOTHING__X": "1"}, "no such group"),
        ({"SOLARIS_STORE__SYNC": "perhaps"}, "true or false"),
        ({"SOLARIS_VERIFIER__THRESHOLD": "inf"}, "a finite number"),
    ],
)
def test_mistyped_variables_are_errors(env: dict[str, str], part: str) -> None:
    with pytest.raises(SettingsError) as e:
        load(environment=env)
    assert part in str(e.value)


def test_foreign_variables_of_our_prefix_pass() -> None:
    assert load(environment={"SOLARIS_HOME": "/x", "OTHER": "1"}) == load(environment={})


@pytest.mark.parametrize("flag", ["verifier.top_k", "top_k=1", "=1", "verifier.top_k=x", "nothing.at_all=1"])
def test_wrong_flags(flag: str) -> None:
    with pytest.raises(SettingsError):
        load(sets=[flag], environment={})


def test_librdkafka_properties_pass_through_every_layer(toml) -> None:
    path = toml('[kafka]\nsecurity.protocol = "SASL_SSL"\n[kafka.properties]\n"sasl.username" = "u"\nacks = 1\n')
    env = {
        "SOLARIS_KAFKA_PROPERTIES__sasl.mechanism": "PLAIN",
        "SOLARIS_KAFKA_PROPERTIES__SSL_CA_LOCATION": "/ca",
        "SOLARIS_KAFKA__PROPERTIES__CLIENT_ID": "me",
    }
    s = load(path, ["kafka.properties.socket.timeout.ms=5", "kafka.sasl.password=geheim", "kafka.debug.x=1"], env)
    assert s.kafka.properties == {
        "security.protocol": "SASL_SSL",
        "sasl.username": "u",
        "acks": 1,
        "sasl.mechanism": "PLAIN",
        "ssl.ca.location": "/ca",
        "client.id": "me",
        "socket.timeout.ms": "5",
        "sasl.password": "geheim",
        "debug.x": "1",
    }
    assert load(sets=["kafka.bootstrap.servers=b:1"], environment={}).kafka.bootstrap == "b:1"


def test_embeddings_are_kept_as_long_as_a_rebuild_needs_them() -> None:
    day = 86_400_000
    s = load(sets=[f"store.ttl_ms={3 * day}", f"store.window_ms={3 * day}"], environment={})
    assert s.kafka.retention_ms["embeddings"] > 3 * day
    s = load(sets=["kafka.retention_ms.ranked-ads=70000"], environment={"SOLARIS_KAFKA__RETENTION_MS__DLQ": "80000"})
    assert s.kafka.retention_ms["ranked-ads"] == 70_000
    assert s.kafka.retention_ms["dlq"] == 80_000
    s = load(environment={"SOLARIS_KAFKA__RETENTION_MS__RANKED_ADS": "90000"})
    assert s.kafka.retention_ms["ranked-ads"] == 90_000


SECRET = "correct-horse-battery"


def test_lag_of_the_rolling_counts_is_the_bundles() -> None:
    plain, own = load(environment={}), load(sets=["counter.lag_ms=5000", "counter.max_items=7"], environment={})
    assert [plain.counter.counts(lag).lag_ms for lag in (None, 0, 60_000)] == [10_000, 0, 60_000]
    assert (own.counter.counts(5_000).lag_ms, own.counter.counts(None).lag_ms) == (5_000, 5_000)
    assert own.counter.counts(None).max_items == 7
    with pytest.raises(SettingsError, match=r"counter.lag_ms.*5000.*trained with 10000") as e:
        own.counter.counts(10_000)
    assert e.value.key == "counter.lag_ms"


def test_no_secret_in_repr_output_or_errors(toml, caplog: pytest.LogCaptureFixture) -> None:
    sets = [f"kafka.sasl.password={SECRET}", f"kafka.ssl.key.pem={SECRET}", f"kafka.sasl.oauthbearer.config={SECRET}"]
    s = load(sets=sets, environment={})
    assert SECRET not in repr(s)
    assert SECRET not in str(masked(s.kafka.properties))
    for flag in ([], ["--json"], ["--toml"]):
        out = CliRunner().invoke(_app(), [*flag, *(a for x in sets for a in ("--set", x))])
        assert out.exit_code == 0, out.output
        assert SECRET not in out.output
        assert "sasl.password" in out.output
    with pytest.raises(SettingsError) as e:
        load(sets=[f"kafka.sasl.password.={SECRET}", "verifier.x=1"], environment={})
    assert SECRET not in str(e.value)
    with caplog.at_level(logging.DEBUG), pytest.raises(SettingsError) as e:
        admin(KafkaSettings(properties={"sasl.password": SECRET, "no.such.property": 1}))
    assert "no.such.property" in str(e.value)
    assert SECRET not in str(e.value) + caplog.text
    with pytest.raises(SettingsError) as e:
        admin(KafkaSettings(properties={"security.protocol": "ssl", "ssl.key.pem": SECRET}))
    assert SECRET not in str(e.value)


@pytest.mark.parametrize("key", ["sasl.password", "ssl.key.password", "ssl.key.pem", "sasl.oauthbearer.client.secret"])
def test_secret_names(key: str) -> None:
    assert is_secret(key)
    assert not is_secret("sasl.username")


def test_toml_output_reads_back_as_the_same_settings(tmp_path: Path) -> None:
    sets = ["verifier.threshold=0.5", "kafka.client.id=a", "loop.guarantee=at_least_once", "store.dir=x y"]
    sets += ["kafka.retention_ms.ranked-ads=70000"]
    args = [a for x in sets for a in ("--set", x)]
    out = CliRunner().invoke(_app(), ["--toml", *args])
    path = tmp_path / "out.toml"
    path.write_text(out.output)
    assert load(path, environment={}) == load(sets=sets, environment={})


def test_a_value_that_is_not_set_is_shown_as_what_no_reader_takes_for_toml() -> None:
    out = CliRunner().invoke(_app(), ["--toml"]).output
    assert "# lag_ms =   (unset)" in out
    assert "null" not in out


def test_the_page_has_the_table_of_the_settings() -> None:
    table = CliRunner().invoke(_app(), ["--markdown"]).output.strip()
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert table in page, "docs/settings.md is not what `solaris config --markdown` prints"
    assert all(f"| `{key}` |" in table for key in SPECS)
    assert "| `verifier.budget_share` | `1.0` | a finite number, above 0, at most 1 |" in table
    assert "| `store.cache_bytes` | `67108864` | a whole number, at least 1,048,576 |" in table
    assert "cuda:\\<n>" in table, "Markdown would take it for HTML"


def test_every_setting_says_what_it_is_for() -> None:
    assert [key for key, spec in SPECS.items() if not spec.help] == []


def test_json_output_names_origins(toml) -> None:
    path = toml("[verifier]\ntop_k = 7\n")
    out = CliRunner().invoke(_app(), ["--config", str(path), "--json"])
    shown = json.loads(out.output)
    assert shown["verifier.top_k"] == {"value": 7, "origin": str(path)}
    assert shown["verifier.threshold"]["origin"] == "default"
    assert {k for k in shown if not k.startswith("kafka.properties")} == set(SPECS)


def test_settings_are_frozen() -> None:
    s = load(environment={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.verifier = settings.Verifier()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.store.dir = Path()  # type: ignore[misc]
    assert isinstance(s, Settings)


def _as_read(value: object) -> object:
    """As TOML would give it."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def _app():
    import typer

    app = typer.Typer()
    app.command()(config_cli.config)
    return app


def test_plain_output_shows_every_key() -> None:
    with redirect_stdout(io.StringIO()) as out:
        config_cli.config(None, None)
    assert all(key in out.getvalue() for key in SPECS)


def test_the_file_of_the_documentation_loads(toml) -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    s = load(toml(page.partition("```toml\n")[2].partition("```")[0]), environment={})
    assert s.kafka.partitions == 16
    assert s.kafka.properties["sasl.mechanism"] == "SCRAM-SHA-256"
    assert s.kafka.properties["debug"] == "broker"
    assert s.kafka.retention_ms["ranked-ads"] == 86_400_000
