"""Every setting there is, in small frozen groups, and how they are loaded.

Order, later wins: the defaults below; one TOML file (``--config``, else ``SOLARIS_CONFIG``, else ``./solaris.toml``
where there is one); the environment (``SOLARIS_VERIFIER__TOP_K=20``, ``KAFKA_BOOTSTRAP``); flags
(``--set verifier.top_k=20``). `solaris config` shows what is in force and where each value came from.

Adding a setting is one line in its group; units are in the name. Relative paths are relative to where the program runs.
"""

# ruff: noqa: RUF009 -- `setting` makes a dataclass field, as dataclasses.field does
from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from state.api import StoreSettings
from state.counts import DAY_MS, CountSettings
from streams import layers
from streams.layers import Value
from topics.contracts import BY_NAME, CONTRACTS, HOUR_MS
from topics.errors import SettingsError
from topics.fields import setting
from topics.kafka import KafkaSettings

CONFIG_VARIABLE = "SOLARIS_CONFIG"
CONFIG_FILE = Path("solaris.toml")
_DEVICE = re.compile(r"cpu|(cuda|tensorrt)(:[0-9]{1,3})?")
"""what `models.runtime.OnnxRuntime` takes"""
DEMO_BUNDLE = Path(__file__).parents[1] / "models" / "demo_bundle"


@dataclass(frozen=True, slots=True)
class Store(StoreSettings):
    """The store's own settings and where it lies; one sub-folder per role and partition."""

    dir: Path = setting(Path("state-data"), "folder of the stores; losing it costs a rebuild, never answers")


@dataclass(frozen=True, slots=True)
class Model:
    bundle: Path = setting(DEMO_BUNDLE, "folder of the model bundle")
    device: str = setting(
        "cpu", "device the models run on: cpu, cuda, cuda:<n>, tensorrt or tensorrt:<n>; refused when it is not there"
    )
    threads: int = setting(1, "threads of one inference session on a CPU", low=1, high=1024)
    reload_s: float = setting(5.0, "how often the bundle folder is looked at for a new bundle; 0: never", low=0)


@dataclass(frozen=True, slots=True)
class Verifier:
    threshold: float = setting(0.0, "lowest value (0..1) a pair may have to be accepted", low=0, high=1)
    top_k: int = setting(100, "pairs accepted at most from one candidates event", low=1, high=10_000)
    per_user_cap: int = setting(2_000, "pairs accepted at most per user and cap window", low=1)
    per_user_cap_window_ms: int = setting(3_600_000, "window of the cap, event time", low=1)
    budget_pairs_per_s: float = setting(
        0.0, "pairs accepted per second over the role, in event time, shared out evenly over kafka.partitions; 0: no "
        "such budget", low=0,
    )  # fmt: skip
    budget_burst_s: float = setting(10.0, "so much of the budget may be saved up for one moment, event time", low=0)
    budget_share: float = setting(1.0, "share of the pairs seen that may be accepted", above=0, high=1)
    backlog_high_pairs: int = setting(200_000, "pairs waiting at the embedder from which on the budget shrinks", low=1)
    batch_age_ms: int = setting(15, "how long an event may wait for others to be scored with", low=0, high=10_000)


@dataclass(frozen=True, slots=True)
class Embedder:
    batch_pairs: int = setting(1024, "pairs in one FM call at most", low=1, high=1 << 20)
    batch_age_ms: int = setting(20, "how long a request may wait for its batch to fill, in either lane", low=0)
    refresh: Literal["on_change", "ttl"] = setting(
        "on_change", "recompute a live pair when the user's state has moved, or only after its TTL"
    )


@dataclass(frozen=True, slots=True)
class Ranker:
    explain: bool = setting(False, "write the age of every slot of every ad into ranked-ads")
    vm_scores_share: float = setting(
        0.1, "share of the messages that carry the VM's own scores too, for comparison", low=0.0, high=1.0
    )
    neighbours: int = setting(16, "similar users asked for a user without an aggregate; 0: never", low=0, high=1024)
    neighbours_every_s: float = setting(60.0, "how often the index of similar users is built anew", above=0)
    restore_deadline_s: float = setting(30.0, "rank with what is restored after this long; 0: wait for all", low=0)


@dataclass(frozen=True, slots=True)
class Counter:
    lag_ms: int | None = setting(
        None, "rankers count no event newer than this; none: as the bundle's VM was trained, or 10 s",
        low=0, high=3_600_000,
    )  # fmt: skip
    max_items: int = setting(1_000_000, "items whose counts a ranker keeps in memory; later ones are refused", low=1)
    batch_age_ms: int = setting(50, "how long an event may wait for others to be counted with", low=0, high=10_000)

    def counts(self, trained_lag_ms: int | None) -> CountSettings:
        """For a bundle trained with that lag (None: it does not say). Raises `SettingsError` when another is set."""
        if self.lag_ms is not None and trained_lag_ms not in (None, self.lag_ms):
            raise SettingsError(
                "counter.lag_ms", self.lag_ms,
                f"the bundle's VM was trained with {trained_lag_ms}; leave the setting out, or train with --count-lag",
            )  # fmt: skip
        lag_ms = self.lag_ms if self.lag_ms is not None else trained_lag_ms
        return replace(CountSettings.as_trained(lag_ms), max_items=self.max_items)


@dataclass(frozen=True, slots=True)
class Loop:
    guarantee: Literal["exactly_once", "at_least_once"] = setting(
        "exactly_once", "at_least_once: lower latency, outputs keep deterministic ids"
    )
    batch_records: int = setting(500, "records in one step at most", low=1, high=100_000)
    queue_batches: int = setting(2, "polled batches that wait for the core; partitions are paused above it", low=1)
    session_timeout_ms: int = setting(10_000, "a silent process loses its partitions after this long", low=1_000)
    shutdown_deadline_s: float = setting(10.0, "one deadline for a revoke and for a shutdown", above=0)
    transaction_timeout_ms: int = setting(60_000, "the broker aborts a transaction left open this long", low=1_000)
    max_ahead_ms: int = setting(86_400_000, "an event this far ahead of the wall clock is rejected", low=0)
    instance_id: str = setting("", "prefix of the static member ids, unique per machine; empty: the host name")


@dataclass(frozen=True, slots=True)
class Http:
    host: str = setting("127.0.0.1", "address the metrics and pages listen on")
    port: int = setting(
        0,
        "port of /live, /ready, /status and /metrics of one process; 0: none; under `solaris run` the first of "
        "consecutive ports",
        low=0, high=65_535,
    )  # fmt: skip
    monitor_port: int = setting(6066, "where the monitor serves its page", low=1, high=65_535)


@dataclass(frozen=True, slots=True)
class Monitor:
    sample_share: float = setting(1.0, "share of the impressions looked at, by a hash of the id", above=0, high=1)
    feedback_window_ms: int = setting(600_000, "an impression waits so long for its feedback", low=1_000)
    keep_ms: int = setting(3_600_000, "how far back the monitor's figures go", low=60_000, high=86_400_000)


_GROUPS: dict[str, type] = {
    "kafka": KafkaSettings,
    "store": Store,
    "model": Model,
    "verifier": Verifier,
    "embedder": Embedder,
    "ranker": Ranker,
    "counter": Counter,
    "loop": Loop,
    "http": Http,
    "monitor": Monitor,
}
_TABLES = ("kafka.properties", "kafka.retention_ms")
_RETENTION = "kafka.retention_ms"
SPECS: dict[str, layers.Spec] = {
    spec.key: spec for group, cls in _GROUPS.items() for spec in layers.specs(group, cls) if spec.key not in _TABLES
} | {
    f"{_RETENTION}.{c.name}": layers.Spec(
        f"{_RETENTION}.{c.name}", int, c.retention_ms, f"how long {c.name} keeps a record", low=60_000
    )
    for c in CONTRACTS
    if c.retention_ms is not None
}
SLACK_MS = 6 * HOUR_MS
"""how much longer than a store needs them embeddings are kept, for restores that begin late"""

# Set by the client factories because a guarantee hangs on them; a value here would be overridden in silence.
_GUARDED = {
    "group.id": "groups are named after kafka.prefix and the role",
    "group.instance.id": "set loop.instance_id",
    "transactional.id": "the loop names its transactions itself",
    "auto.offset.reset": "a role begins where nothing is committed, and says what was deleted before it was read",
    "partition.assignment.strategy": "stores move with their partitions, one at a time",
    "max.poll.interval.ms": "set loop.session_timeout_ms",
    "isolation.level": "roles read committed records only",
    "enable.auto.commit": "offsets are committed with the results",
    "enable.auto.offset.store": "offsets are committed with the results",
    "enable.idempotence": "always on; set loop.guarantee",
    "partitioner": "partitions must line up between topics",
    "session.timeout.ms": "set loop.session_timeout_ms",
    "transaction.timeout.ms": "set loop.transaction_timeout_ms",
}


@dataclass(frozen=True, slots=True)
class Settings:
    kafka: KafkaSettings = field(default_factory=KafkaSettings)
    store: Store = field(default_factory=Store)
    model: Model = field(default_factory=Model)
    verifier: Verifier = field(default_factory=Verifier)
    embedder: Embedder = field(default_factory=Embedder)
    ranker: Ranker = field(default_factory=Ranker)
    counter: Counter = field(default_factory=Counter)
    loop: Loop = field(default_factory=Loop)
    http: Http = field(default_factory=Http)
    monitor: Monitor = field(default_factory=Monitor)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """key -> where its value came from; keys that are not in it have their default"""

    def origin(self, key: str) -> str:
        return self.origins.get(key, "default")

    def flat(self) -> dict[str, Any]:
        """Every key and its value, `kafka.properties.NAME` for each property. Not masked."""
        out: dict[str, Any] = {}
        for group in _GROUPS:
            part = getattr(self, group)
            for f in fields(part):
                value = getattr(part, f.name)
                key = f"{group}.{f.name}"
                if key in _TABLES:
                    out.update((f"{key}.{name}", v) for name, v in sorted(value.items()))
                else:
                    out[key] = value
        return out


def load(
    config: Path | None = None, sets: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Settings:
    """The settings in force. `environment` defaults to the process's own. Raises `SettingsError`."""
    env = os.environ if environment is None else environment
    values: dict[str, Value] = {}
    path = _config_path(config, env)
    if path is not None:
        values.update(layers.from_toml(path, SPECS))
    values.update(layers.from_environment(env, SPECS))
    values.update(layers.from_flags(sets, SPECS))
    return _build(values)


def _config_path(config: Path | None, env: Mapping[str, str]) -> Path | None:
    if config is not None:
        return config
    if env.get(CONFIG_VARIABLE):
        return Path(env[CONFIG_VARIABLE])
    return CONFIG_FILE if CONFIG_FILE.exists() else None


def _build(values: Mapping[str, Value]) -> Settings:
    parts: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    properties: dict[str, Any] = {}
    retention = {c.name: c.retention_ms for c in CONTRACTS if c.retention_ms is not None}
    for key, v in values.items():
        if key.startswith(layers.PROPERTIES + "."):
            name = key[len(layers.PROPERTIES) + 1 :]
            if name in _GUARDED:
                raise SettingsError(key, v.value, f"is not for settings: {_GUARDED[name]} (from {v.origin})")
            properties[name] = v.value
        elif key.startswith(_RETENTION + "."):
            retention[key[len(_RETENTION) + 1 :]] = v.value
        else:
            group, _, name = key.partition(".")
            parts[group][name] = v.value
    if properties:
        parts["kafka"]["properties"] = properties
    store = Store(**parts["store"])
    need = max(store.ttl_ms, store.window_ms) + SLACK_MS
    if f"{_RETENTION}.embeddings" not in values:
        retention["embeddings"] = max(need, BY_NAME["embeddings"].retention_ms or 0)
    parts["kafka"]["retention_ms"] = retention
    settings = Settings(
        **{group: cls(**parts[group]) for group, cls in _GROUPS.items()},
        origins={key: v.origin for key, v in values.items()},
    )
    _check(settings)
    return settings


def _check(s: Settings) -> None:
    """What no single key can say."""
    if not s.kafka.bootstrap.strip():
        raise SettingsError("kafka.bootstrap", s.kafka.bootstrap, "name a broker, as in 127.0.0.1:9092")
    if not _DEVICE.fullmatch(s.model.device):
        raise SettingsError(
            "model.device", s.model.device, "one of cpu, cuda, cuda:<n>, tensorrt, tensorrt:<n>; n counts cards from 0"
        )
    legal = all(c.isascii() and (c.isalnum() or c in "._-") for c in s.kafka.prefix)
    if not legal or len(s.kafka.prefix) > 200:
        raise SettingsError("kafka.prefix", s.kafka.prefix, "letters, digits, '.', '_' and '-', at most 200")
    kept, need = s.kafka.retention_ms["embeddings"], max(s.store.ttl_ms, s.store.window_ms)
    if kept < need:
        raise SettingsError(
            "kafka.retention_ms.embeddings", kept,
            f"a store that is rebuilt needs max(store.ttl_ms, store.window_ms) = {need} of it",
        )  # fmt: skip
    for topic in ("counts", "item-counts"):
        kept, need = s.kafka.retention_ms[topic], DAY_MS + s.counter.counts(None).lag_ms
        if kept < need:
            raise SettingsError(
                f"kafka.retention_ms.{topic}",
                kept,
                f"a ranker that starts needs a day and counter.lag_ms, {need}, of it",
            )
    if s.monitor.keep_ms < s.monitor.feedback_window_ms:
        raise SettingsError(
            "monitor.keep_ms", s.monitor.keep_ms,
            f"is shorter than monitor.feedback_window_ms = {s.monitor.feedback_window_ms}: joins would find no figures",
        )  # fmt: skip
    if s.store.window_ms < s.store.ttl_ms:
        raise SettingsError(
            "store.window_ms", s.store.window_ms,
            f"is shorter than store.ttl_ms = {s.store.ttl_ms}: aggregates would be emptier than what they summarise",
        )  # fmt: skip
