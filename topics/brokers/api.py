"""What every broker of ours can do, whichever program it is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Broker(Protocol):
    """One broker (or cluster) that this process starts and stops. All methods may raise `BrokerError`."""

    @property
    def bootstrap(self) -> str:
        """host:port of the client listener (comma-separated for a cluster); valid before `start`."""
        ...

    @property
    def running(self) -> bool:
        """The process exists; says nothing about readiness."""
        ...

    def start(self, timeout_s: float = 60.0) -> None:
        """Returns when a record went in and came out. A broker that runs already is left as it is."""
        ...

    def stop(self, deadline_s: float = 20.0) -> None:
        """Asks the process to end; kills it when the deadline passes. Data stays. No-op when not running."""
        ...

    def kill(self) -> None:
        """SIGKILL, as in a crash. Data stays as the crash leaves it."""
        ...

    def restart(self, timeout_s: float = 60.0) -> None:
        """Stops if running, then starts on the same data and ports."""
        ...

    def log_tail(self, lines: int = 40) -> str:
        """The last lines the broker wrote, for error texts."""
        ...
