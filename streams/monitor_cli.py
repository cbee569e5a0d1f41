"""`solaris monitor`."""

from __future__ import annotations

from streams.config_cli import ConfigOption, SetOption


def monitor(config: ConfigOption = None, sets: SetOption = None) -> None:
    """Run the monitor: coverage, age, calibration, loss, FM calls saved and lag, as a page, JSON and Prometheus text.

    Its figures are best effort, from the last hour; the report of `solaris demo` reads the topics back.

    Example: solaris monitor --set http.monitor_port=6066 --set monitor.sample_share=0.1
    """
    from streams.monitor.app import run
    from streams.settings import load

    run(load(config, sets or []))
