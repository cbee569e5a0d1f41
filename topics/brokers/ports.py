"""Free loopback ports that stay ours while a broker is down.

A port from `bind(0)` lies in the kernel's ephemeral range: while the broker restarts, a client's outgoing connection
can be given that very port (even connect to itself), and the broker cannot bind again. So ports come from below it.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from topics.errors import BrokerError

_LOWEST = 15_000


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on at this moment, outside the ephemeral range where that is known."""
    highest = max(_LOWEST + 2_000, _ephemeral_start() - 1)
    for _ in range(200):
        port = random.randint(_LOWEST, highest)
        if is_free(port, host):
            return port
    raise BrokerError(f"no free port found on {host} between {_LOWEST} and {highest}")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
