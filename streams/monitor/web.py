"""What is served: JSON, one page, Prometheus text. GET and HEAD only; nothing a request says changes any state."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from streams.counters import metric
from streams.monitor.figures import View

PAGE = Path(__file__).with_name("page.html")
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}
_NOT_NAME = re.compile(r"[^a-zA-Z0-9_]")
MINUTE_MS = 60_000


def add_views(app: Any, view: View) -> None:
    from aiohttp.web import Response

    page = PAGE.read_text("utf-8")

    def add(path: str, answer: Callable[[Mapping[str, str], int], tuple[int, str, str | bytes]]) -> None:
        async def handler(self: Any, request: Any) -> Response:
            code, kind, body = answer(request.query, int(time.time() * 1000))
            data = body if isinstance(body, bytes) else body.encode()
            return Response(status=code, body=data, content_type=kind, charset="utf-8", headers=_HEADERS)

        handler.__name__ = "view_" + _NOT_NAME.sub("_", path)
        app.page(path)(handler)

    def span(query: Mapping[str, str], default: int) -> int | None:
        text = query.get("minutes", str(default))
        ok = text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) * MINUTE_MS <= view.keep_ms
        return int(text) * MINUTE_MS if ok else None

    def spanned(make: Callable[[int, int], Any], default: int) -> Callable[..., tuple[int, str, str | bytes]]:
        def answer(query: Mapping[str, str], now_ms: int) -> tuple[int, str, str | bytes]:
            span_ms = span(query, default)
            if span_ms is None:
                error = {"error": f"minutes: a whole number from 1 to {view.keep_ms // MINUTE_MS}"}
                return 400, "application/json", msgspec.json.encode(error)
            return 200, "application/json", msgspec.json.encode(make(span_ms, now_ms))

        return answer

    def said(name: str, good: bool) -> tuple[int, str, str]:
        return (200, "text/plain", f"{name}\n") if good else (503, "text/plain", f"not {name}\n")

    add("/", lambda query, now: (200, "text/html", page))
    add("/api/figures", spanned(view.figures, 10))
    add("/api/series", spanned(view.series, 60))
    add("/api/roles", lambda query, now: (200, "application/json", msgspec.json.encode(view.roles(now))))
    add("/api/lag", lambda query, now: (200, "application/json", msgspec.json.encode(view.lag)))
    add("/metrics", lambda query, now: (200, "text/plain", prometheus(view, now)))
    add("/live", lambda query, now: said("live", True))
    add("/ready", lambda query, now: said("ready", view.ready))


def prometheus(view: View, now_ms: int) -> str:
    """Prometheus' text format 0.0.4: figures of the last minute as gauges, the roles' own counters as counters."""
    f = view.figures(MINUTE_MS, now_ms)
    out: dict[str, list[str]] = {}

    def add(name: str, kind: str, value: float | None, **labels: object) -> None:
        if value is None:
            return
        lines = out.setdefault(name, [f"# TYPE {name} {kind}"])
        text = ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())
        lines.append(f"{name}{{{text}}} {value}" if text else f"{name} {value}")

    for source, share in f["coverage"].items():
        add("solaris_coverage_ratio", "gauge", share, source=source)
    for name, figures in (("age", f["age_ms"]), ("rank_latency", f["rank_latency_ms"])):
        for key, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            if figures[key] is not None:
                add(f"solaris_{name}_seconds", "gauge", figures[key] / 1000, quantile=quantile)
    add("solaris_calibration_ratio", "gauge", f["calibration"]["ratio"])
    add("solaris_mean_pctr", "gauge", f["calibration"]["mean_pctr"])
    add("solaris_ctr", "gauge", f["calibration"]["ctr"])
    add("solaris_log_loss", "gauge", f["log_loss"]["solaris"])
    for who in ("solaris", "vm"):
        add("solaris_log_loss_compared", "gauge", f["log_loss"]["against_vm"][who], who=who)
    add("solaris_verifier_acceptance_ratio", "gauge", f["verifier"]["acceptance"])
    add("solaris_fm_calls_saved_ratio", "gauge", f["fm_calls_saved"]["share_of_seen"])
    add("solaris_hits_per_fm_call", "gauge", f["hits_per_fm_call"])
    for name, n in f["sampled"].items():
        add("solaris_monitor_sampled", "gauge", n, what=name)
    for role, n in view.lag.items():
        add("solaris_lag_records", "gauge", n, role=role)
    for r in view.roles(now_ms):
        if r["ended"]:
            continue
        labels = {"role": r["role"], "instance": r["instance"], "pid": r["pid"]}
        # A process that fell silent is down until it is forgotten: an alert must not end because its subject has gone.
        add("solaris_role_live", "gauge", int(r["live"] and not r["gone"]), **labels)
        add("solaris_role_ready", "gauge", int(r["ready"] and not r["gone"]), **labels)
        if r["gone"]:
            continue
        for name, n in sorted(r["counters"].items()):
            full, kind = metric(r["role"], name, "solaris_role_")
            add(full, kind, n, **labels)
    return "\n".join(line for lines in out.values() for line in lines) + "\n"


def _escaped(value: object) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
