"""Liveness, readiness and counters over HTTP, on loopback unless told otherwise. Reads only; GET and HEAD only.

``/live`` 200 while the worker shows signs of life, ``/ready`` 200 once in the group, catalogue loaded and stores
restored, ``/metrics`` the counters in Prometheus' text format, ``/status`` the same as JSON.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from streams.counters import known, metric
from topics.errors import SettingsError

log = logging.getLogger(__name__)


class HealthServer:
    """`status()` returns {"live": bool, "ready": bool, "role": str, "counters": {...}, ...}.

    Raises `SettingsError` when the port or the address cannot be listened on."""

    def __init__(self, host: str, port: int, status: Callable[[], Mapping[str, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            server_version = "solaris"
            sys_version = ""
            timeout = 5

            def do_GET(self) -> None:
                try:
                    now = status()
                except Exception:  # a caller that gets no answer at all knows less
                    log.exception("status not known")
                    self._send(500, "text/plain", b"status not known\n")
                    return
                if self.path == "/live":
                    self._send(200 if now["live"] else 503, "text/plain", b"live\n" if now["live"] else b"not live\n")
                elif self.path == "/ready":
                    self._send(
                        200 if now["ready"] else 503, "text/plain", b"ready\n" if now["ready"] else b"not ready\n"
                    )
                elif self.path == "/status":
                    self._send(200, "application/json", msgspec.json.encode(now) + b"\n")
                elif self.path == "/metrics":
                    self._send(200, "text/plain; version=0.0.4", prometheus(now).encode())
                else:
                    self._send(404, "text/plain", b"try /live, /ready, /status or /metrics\n")

            do_HEAD = do_GET  # noqa: N815

            def _send(self, code: int, kind: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                log.debug(format, *args)

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as e:
            raise _cannot_listen(host, port, e) from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def require_free(host: str, ports: Iterable[int]) -> None:
    """Raises `SettingsError` for the first port that could not be listened on now."""
    for port in ports:
        try:
            with socket.create_server((host, port), reuse_port=False):
                pass
        except OSError as e:
            raise _cannot_listen(host, port, e) from None


def _cannot_listen(host: str, port: int, e: OSError) -> SettingsError:
    if e.errno == errno.EADDRINUSE:
        return SettingsError("http.port", port, "is in use")
    if e.errno == errno.EACCES:
        return SettingsError("http.port", port, "is not for this user to listen on")
    return SettingsError("http.host", host, f"cannot be listened on: {e.strerror}")


def prometheus(status: Mapping[str, Any]) -> str:
    role = status["role"]
    lines = []
    for name in ("live", "ready"):
        lines += [f"# TYPE solaris_{name} gauge", f'solaris_{name}{{role="{role}"}} {int(status[name])}']
    for name, value in sorted(status["counters"].items()):
        full, kind = metric(role, name, "solaris_")
        of = known(role, name)
        lines += [f"# HELP {full} {of.meaning}"] if of is not None else []
        lines += [f"# TYPE {full} {kind}", f'{full}{{role="{role}"}} {value}']
    return "\n".join(lines) + "\n"
