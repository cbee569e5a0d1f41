"""The Faust application: three streams in, two windowed tables, the web views.

What Faust's tables guarantee is too little for counters (after kill -9 they were found 44 to 111 % too high), so no row
is ever added to:

1. streams are summed in memory, by ten-second window of the broker's append time;
2. every five seconds the windows that changed are *set*, whole, as rows of the tables (`Table.tumbling`);
3. a start first recovers the tables, then reads again from the beginning of a window that is older than every open
   join (`rewind`), and sets those rows anew.

So a row is what its window's records say, however often the monitor was killed; and Faust's slow tables see some tens
of writes in five seconds whatever the traffic is. One monitor a prefix: a second is refused at its start.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import Any

import faust
from faust.web.base import BlueprintManager

from streams.monitor.blocks import BLOCK_MS, Blocks
from streams.monitor.connect import TOPICS, broker_urls, credentials, rewind
from streams.monitor.figures import View
from streams.monitor.processes import Processes
from streams.monitor.transport import OnePartition, Transport, Unbundler
from streams.monitor.web import add_views
from streams.settings import Settings
from topics.admin import ROLES, describe, require
from topics.errors import BrokerError, SettingsError, SolarisError
from topics.kafka import group_name
from topics.rights import topics_of

log = logging.getLogger(__name__)

STORE_EVERY_S = 5.0
LAG_EVERY_S = 10.0


def run(settings: Settings) -> None:
    """Until SIGTERM or Ctrl-C. Raises `SolarisError` when it cannot start or go on."""
    require(settings.kafka, topics_of("monitor"))
    _quiet()
    auth = credentials(settings.kafka.properties)
    m = settings.monitor
    # A monitor that was killed stays a member of its group until its session ends.
    since_ms = rewind(
        settings.kafka, m.keep_ms, m.feedback_window_ms, _now_ms(), settings.loop.session_timeout_ms / 1000 + 5.0
    )
    view = View(Blocks(m.sample_share, m.feedback_window_ms, m.keep_ms, since_ms), Processes(m.keep_ms), m.sample_share)
    asyncio.run(_serve(settings, auth, view))


class _Sparse(logging.Filter):
    """aiokafka repeats itself forty times a second while a broker is away: each of its messages once in ten seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._due: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("aiokafka"):
            return True
        if record.created < self._due.get(record.msg, 0.0):
            return False
        self._due[record.msg] = record.created + 10.0
        return True


def _quiet() -> None:
    if log.getEffectiveLevel() < logging.INFO:
        return
    for name in ("faust", "mode", "aiokafka", "streams.monitor.transport"):  # every start and stop of every part
        logging.getLogger(name).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_Sparse())


async def _serve(settings: Settings, auth: Any, view: View) -> None:
    app = build(settings, auth, view)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        await app.start()
    except OSError as e:
        raise SettingsError("http.monitor_port", settings.http.monitor_port, f"cannot be listened on: {e}") from None
    log.info("monitor: http://%s:%d/", settings.http.host, settings.http.monitor_port)
    try:
        while not stopping.is_set():
            if app.crashed or app.should_stop:
                raise BrokerError(f"the monitor cannot go on: {app.crash_reason!r}")
            await asyncio.wait([asyncio.ensure_future(stopping.wait())], timeout=0.5)
    finally:
        try:
            await asyncio.wait_for(app.stop(), settings.loop.shutdown_deadline_s)
        except TimeoutError:
            log.warning("monitor: not stopped inside the deadline; what was not stored is read again")


def build(settings: Settings, auth: Any, view: View) -> faust.App:
    kafka = settings.kafka
    folder = settings.store.dir / "monitor"  # Faust wants one, though its tables are in memory
    folder.mkdir(parents=True, exist_ok=True)
    session_s = settings.loop.session_timeout_ms / 1000
    app = faust.App(
        group_name(kafka, "monitor"),
        broker=broker_urls(kafka.bootstrap),
        broker_credentials=auth,
        broker_session_timeout=session_s,
        broker_heartbeat_interval=session_s / 5,
        broker_request_timeout=max(90.0, session_s + 30.0),
        consumer_auto_offset_reset="earliest",
        store="memory://",
        datadir=str(folder),
        Table=OnePartition,
        topic_partitions=1,
        topic_replication_factor=kafka.replication,
        topic_disable_leader=True,
        reply_create_topic=False,
        stream_wait_empty=False,
        web_bind=settings.http.host,
        web_host=settings.http.host,
        web_port=settings.http.monitor_port,
    )
    app.transport = Transport(app.conf.broker_consumer, app)
    app.transport.bundled = {kafka.topic(name) for name in TOPICS}
    # Faust's own pages show tables, assignments and settings; only the views below are served.
    app.web.blueprints = BlueprintManager()
    retention = {"retention.ms": 2 * settings.monitor.keep_ms, "segment.ms": settings.monitor.keep_ms}
    blocks = app.Table("blocks", partitions=1, extra_topic_configs=retention).tumbling(BLOCK_MS / 1000)
    rows = app.Table("processes", partitions=1, extra_topic_configs=retention).tumbling(BLOCK_MS / 1000)
    topics = {name: app.topic(kafka.topic(name), key_serializer="raw", value_serializer="raw") for name in TOPICS}

    unbundler = Unbundler()

    def records(event: Any) -> list[tuple[int, bytes | None]]:
        m = event.message
        return unbundler.records(m.topic, m.partition, m.value)

    @app.agent(topics["stats"], name="stats")
    async def stats(stream: Any) -> None:
        async for event in stream.events():
            for ts_ms, value in records(event):
                view.processes.stats(ts_ms, value)

    @app.agent(topics["ranked-ads"], name="ranked")
    async def ranked(stream: Any) -> None:
        async for event in stream.events():
            now_ms = _now_ms()
            for ts_ms, value in records(event):
                view.blocks.ranked(event.message.partition, ts_ms, value, now_ms)

    @app.agent(topics["feedback"], name="feedback")
    async def feedback(stream: Any) -> None:
        async for event in stream.events():
            now_ms = _now_ms()
            for ts_ms, value in records(event):
                view.blocks.feedback(event.message.partition, ts_ms, value, now_ms)

    @app.task
    async def recovered() -> None:
        for (key, (start, _)), value in list(blocks.table.items()):
            view.blocks.load((int(key), round(start * 1000)), value)
        for _, value in list(rows.table.items()):
            view.processes.load(value)
        view.ready = True

    @app.timer(STORE_EVERY_S)
    async def store() -> None:
        now_ms = _now_ms()
        for (partition, start), value in view.blocks.changed():
            blocks.table._set_windowed(str(partition), value, start / 1000)
        for process, start, value in view.processes.changed():
            rows.table._set_windowed(process, value, start / 1000)
        # Windows that were recovered are forgotten here too: Faust's own expiry does not know of them.
        for table, gone in ((blocks, view.blocks.expire(now_ms)), (rows, view.processes.expire(now_ms))):
            for key, start in gone:
                for window in table.table.window.ranges(start / 1000):
                    table.table.pop((str(key), window), None)

    @app.task
    async def lag() -> None:
        while not app.should_stop:
            try:
                found = [
                    p.lag for topic in await asyncio.to_thread(describe, kafka, None, False) for p in topic.partitions
                ]
                view.lag = {role: sum(p.get(role, 0) for p in found) for role in ROLES if any(role in p for p in found)}
            except SolarisError as e:
                log.warning("lag not known: %s", e)
            except Exception:  # a task that ends unseen would leave its last figures standing for ever
                log.exception("lag not known")
            await app.sleep(LAG_EVERY_S)

    add_views(app, view)
    return app


def _now_ms() -> int:
    return int(time.time() * 1000)
