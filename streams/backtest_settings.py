"""What a backtest runs with: the service's settings or none, and the command line's flags on top."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from state.api import StoreSettings
from state.counts import CountSettings
from streams.backtest import BacktestConfig
from streams.durations import parse_ms
from streams.roles import gate_settings
from streams.settings import Settings
from topics.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Flags:
    """As typed; None: not given."""

    ttl: str | None = None
    window: str | None = None
    budget: float | None = None
    burst: str | None = None
    share: float | None = None
    top_k: int | None = None
    per_user_cap: int | None = None
    threshold: float | None = None
    pair_delay: str = "0"
    state_delay: str = "0"
    count_lag: str | None = None
    refresh: str | None = None
    neighbours: int | None = None
    start: str | None = None
    with_fm: bool = True


def service(settings: Settings) -> BacktestConfig:
    """The settings that a service would have. The log is one partition, which has the role's whole budget."""
    one = replace(settings, kafka=replace(settings.kafka, partitions=1))
    return BacktestConfig(
        store=StoreSettings(**{f.name: getattr(settings.store, f.name) for f in fields(StoreSettings)}),
        gate=gate_settings(one),
        counts=None if settings.counter.lag_ms is None else settings.counter.counts(None),
        refresh=settings.embedder.refresh,
        neighbours=settings.ranker.neighbours,
    )


def configure(base: BacktestConfig, flags: Flags) -> BacktestConfig:
    """`base` with what was given. Raises `SettingsError` naming the flag."""
    if flags.refresh not in (None, "on_change", "ttl"):
        raise SettingsError("--refresh", flags.refresh, "use on_change or ttl")
    ttl_ms = _ms("--ttl", flags.ttl)
    if ttl_ms is not None and ttl_ms < 1:
        raise SettingsError("--ttl", flags.ttl, "must be above 0")
    burst_ms, lag_ms = _ms("--burst", flags.burst), _ms("--count-lag", flags.count_lag)
    gate = {
        "threshold": flags.threshold, "top_k": flags.top_k, "per_user_cap": flags.per_user_cap,
        "budget_pairs_per_s": flags.budget, "budget_share": flags.share,
        "budget_burst_s": None if burst_ms is None else burst_ms / 1000,
    }  # fmt: skip
    own = {
        "counts": None if lag_ms is None else CountSettings(lag_ms=lag_ms),
        "refresh": flags.refresh, "neighbours": flags.neighbours,
    }  # fmt: skip
    return replace(
        base,
        store=replace(base.store, **_given({"ttl_ms": ttl_ms, "window_ms": _ms("--window", flags.window)})),
        gate=replace(base.gate, **_given(gate)),
        pair_delay_ms=parse_ms("--pair-delay", flags.pair_delay),
        state_delay_ms=parse_ms("--state-delay", flags.state_delay),
        start_ms=parse_start(flags.start),
        with_fm=flags.with_fm,
        **_given(own),
    )


def describe(config: BacktestConfig) -> dict[str, Any]:
    """What of a config changes the result."""
    gate, store = config.gate, config.store
    cap = {"per_user_cap": gate.per_user_cap, "per_user_cap_window_ms": gate.cap_window_ms}
    return {
        "ttl_ms": store.ttl_ms, "window_ms": store.window_ms, "budget_pairs_per_s": gate.budget_pairs_per_s,
        "burst_ms": round(gate.budget_burst_s * 1000), "budget_share": gate.budget_share, "top_k": gate.top_k,
        **(cap if gate.per_user_cap else {"per_user_cap": 0}),
        "threshold": gate.threshold,
        "pair_delay_ms": config.pair_delay_ms, "state_delay_ms": config.state_delay_ms, "refresh": config.refresh,
        "neighbours": config.neighbours,
        **({} if config.counts is None else {"count_lag_ms": config.counts.lag_ms}),
        "start_ms": config.start_ms,
    }  # fmt: skip


def parse_start(text: str | None) -> int:
    """ISO time (UTC unless it says otherwise) or ms -> ms; None: 0. Raises `SettingsError`."""
    if text is None:
        return 0
    if text.isdigit():
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError("--start", text, "an ISO time such as 2019-11-14T16:00 (UTC) or milliseconds") from None
    return round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)


def _ms(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_ms(flag, text)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
