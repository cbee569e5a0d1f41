"""Apache Kafka (KRaft) from its Maven jars on Java 17+: one node, or several on loopback.

data_dir/node.json           ports, node id, cluster id: what makes a restart the same broker
data_dir/server.properties   written at every start, mode 0600
data_dir/log/                Kafka's data
data_dir/server.log, kafka.pid, kafka.out
"""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Literal, Self

from topics.brokers.jars import KAFKA_FILES, fetch_jars, find_java
from topics.brokers.ports import free_port, is_free
from topics.brokers.process import BackgroundProcess, tail
from topics.brokers.wait import wait_ready
from topics.errors import BrokerError
from topics.kafka import KafkaSettings

log = logging.getLogger(__name__)

# For a broker that lives seconds: start in 3 s instead of 5 and leave the cores to the tests.
QUICK_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")
SERVER_JVM = ("-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")


@dataclass(frozen=True, slots=True)
class Secured:
    """A SASL_SSL client listener: server key and certificate chain in one PEM file, users with their passwords."""

    keystore_pem: Path
    users: Mapping[str, str] = field(repr=False)
    mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"


class JavaKafka:
    """One KRaft node on loopback. `port` 0: that of the last start on this folder, else a free one.

    With `secured`, `bootstrap` is the SASL_SSL listener; a plain loopback listener, `inner_bootstrap`, stays for
    the broker itself and the readiness check. `tied`: the broker dies with the process that started it.
    """

    def __init__(
        self,
        data_dir: Path | str,
        port: int = 0,
        *,
        properties: Mapping[str, str | int] | None = None,
        secured: Secured | None = None,
        heap_mb: int = 512,
        jvm: Sequence[str] = QUICK_JVM,
        tied: bool = False,
    ) -> None:
        self.data_dir = Path(data_dir).resolve()
        self.properties = dict(properties or {})
        self.secured = secured
        self.heap_mb = heap_mb
        self.jvm = tuple(jvm)
        self.tied = tied
        self.node_id = 1
        self._process = BackgroundProcess("kafka", self.data_dir)
        remembered = self._remembered()
        self.port = port or remembered.port or free_port()
        self.controller_port = remembered.controller_port or free_port()
        self.inner_port = (remembered.inner_port or free_port()) if secured else self.port
        self.cluster_id: str = remembered.cluster_id or _new_cluster_id()
        self.peers: tuple[tuple[int, int], ...] = ((self.node_id, self.controller_port),)
        """(node id, controller port) of every node of the cluster"""

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def inner_bootstrap(self) -> str:
        return f"127.0.0.1:{self.inner_port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.find() is not None

    def start(self, timeout_s: float = 240.0) -> None:
        self.launch()
        try:
            kafka = KafkaSettings(bootstrap=self.inner_bootstrap, prefix="solaris-broker.")
            took = wait_ready(kafka, timeout_s, self.log_tail, lambda: self.running)
        except BrokerError:
            self.kill()
            raise
        log.info("Apache Kafka is ready at %s after %.1f s (process %s)", self.bootstrap, took, self.pid)

    def launch(self) -> None:
        """Formats if needed and starts the process, without waiting until it is ready."""
        if self.running:
            return
        java, jars = find_java(), fetch_jars()
        for port in {self.port, self.inner_port, self.controller_port}:
            if not is_free(port):
                raise BrokerError(f"port {port} on 127.0.0.1 is taken by another process: stop it or give another port")
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._remember()
        self._write_properties()
        if not (self.data_dir / "log" / "meta.properties").exists():
            self._format(java, jars)
        self._process.spawn([*self._java(java, jars), "kafka.Kafka", str(self._config)], tied=self.tied)

    def stop(self, deadline_s: float = 20.0) -> None:
        if not self._process.stop(deadline_s):
            log.warning("Apache Kafka did not stop in %g s and was killed", deadline_s)

    def kill(self) -> None:
        self._process.kill()

    def restart(self, timeout_s: float = 240.0) -> None:
        self.stop()
        self.start(timeout_s)

    def log_tail(self, lines: int = 40) -> str:
        written = tail(self.data_dir / "server.log", lines)
        printed = self._process.output_tail(10)
        return f"{written}\n{printed}" if printed else written

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # What is written to disk

    @property
    def _config(self) -> Path:
        return self.data_dir / "server.properties"

    def _remembered(self) -> _Node:
        try:
            return _Node(**json.loads((self.data_dir / "node.json").read_text()))
        except FileNotFoundError:
            return _Node()
        except (ValueError, TypeError) as e:
            raise BrokerError(
                f"{self.data_dir / 'node.json'} is not readable ({e}): remove the folder to begin anew"
            ) from e

    def _remember(self) -> None:
        node = _Node(self.port, self.inner_port, self.controller_port, self.cluster_id)
        (self.data_dir / "node.json").write_text(json.dumps(asdict(node)))

    def _write_properties(self) -> None:
        many = len(self.peers)
        copies = min(3, many)
        listeners = {"CLIENT": self.port, "CONTROLLER": self.controller_port}
        protocols = {"CLIENT": "SASL_SSL" if self.secured else "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
        if self.secured:
            listeners["INNER"], protocols["INNER"] = self.inner_port, "PLAINTEXT"
        lines: dict[str, object] = {
            "process.roles": "broker,controller",
            "node.id": self.node_id,
            "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{p}" for n, p in self.peers),
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in listeners.items()),
            "listener.security.protocol.map": ",".join(f"{name}:{how}" for name, how in protocols.items()),
            "inter.broker.listener.name": "INNER" if self.secured else "CLIENT",
            "log.dirs": self.data_dir / "log",
            "offsets.topic.replication.factor": copies,
            "offsets.topic.num.partitions": 4,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": max(1, copies - 1),
            "transaction.state.log.num.partitions": 4,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": max(1, copies - 1),
            "default.replication.factor": copies,
            "min.insync.replicas": max(1, copies - 1),
            "group.initial.rebalance.delay.ms": 0,
            # After kill -9 the next start is let in only when the controller has given up the old one (Kafka: 9 s).
            "broker.session.timeout.ms": 3000,
            "broker.heartbeat.interval.ms": 500,
            "auto.create.topics.enable": "false",
            "message.max.bytes": 16 << 20,
            "replica.fetch.max.bytes": 16 << 20,
            # Fewer threads wake each other less often: on two cores that the clients need too, ranked ads come sooner.
            "num.network.threads": 1 if (os.cpu_count() or 1) <= 2 else 2,
            "num.io.threads": min(4, max(2, os.cpu_count() or 1)),
            **(self._security() if self.secured else {}),
            **self.properties,
        }
        text = "".join(f"{key}={value}\n" for key, value in lines.items())
        with open(os.open(self._config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
            f.write(text)

    def _security(self) -> dict[str, object]:
        assert self.secured is not None
        how = self.secured.mechanism
        prefix = f"listener.name.client.{how.lower()}"
        if how == "PLAIN":
            users = " ".join(f'user_{name}="{password}"' for name, password in self.secured.users.items())
            jaas = f"org.apache.kafka.common.security.plain.PlainLoginModule required {users};"
        else:
            jaas = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        return {
            "listener.name.client.ssl.keystore.type": "PEM",
            "listener.name.client.ssl.keystore.location": self.secured.keystore_pem,
            "listener.name.client.sasl.enabled.mechanisms": how,
            f"{prefix}.sasl.jaas.config": jaas,
        }

    def _format(self, java: str, jars: Path) -> None:
        arguments = ["format", "--cluster-id", self.cluster_id, "--config", str(self._config)]
        if self.secured and self.secured.mechanism != "PLAIN":
            for name, password in self.secured.users.items():
                arguments += ["--add-scram", f"{self.secured.mechanism}=[name={name},password={password}]"]
        command = [*self._java(java, jars), "kafka.tools.StorageTool", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode != 0:
            printed = (done.stdout + done.stderr).splitlines()
            shown = "\n".join([line for line in printed if not line.startswith("\tat ")][-10:])
            raise BrokerError(f"formatting {self.data_dir / 'log'} failed (exit {done.returncode}):\n{shown}")

    def _java(self, java: str, jars: Path) -> list[str]:
        return [
            java,
            f"-Xmx{self.heap_mb}m",
            *self.jvm,
            f"-Dlog4j2.configurationFile={KAFKA_FILES / 'log4j2.properties'}",
            f"-Dkafka.log.file={self.data_dir / 'server.log'}",
            "-cp",
            f"{jars}/*",
        ]


class JavaCluster:
    """`nodes` KRaft nodes on loopback, each a `JavaKafka` in `data_dir/<id>`; topics get up to 3 copies by default."""

    def __init__(self, data_dir: Path | str, nodes: int = 3, **options: Any) -> None:
        root = Path(data_dir).resolve()
        self.nodes = [JavaKafka(root / str(i + 1), **options) for i in range(nodes)]
        for i, node in enumerate(self.nodes):
            node.node_id = i + 1
            node.cluster_id = self.nodes[0].cluster_id
        peers = tuple((node.node_id, node.controller_port) for node in self.nodes)
        for node in self.nodes:
            node.peers = peers

    @property
    def bootstrap(self) -> str:
        return ",".join(node.bootstrap for node in self.nodes)

    @property
    def running(self) -> bool:
        return all(node.running for node in self.nodes)

    def node(self, node_id: int) -> JavaKafka:
        """By Kafka's broker id, as in a partition's leader."""
        return self.nodes[node_id - 1]

    def start(self, timeout_s: float = 300.0) -> None:
        for node in self.nodes:
            node.launch()
        inner = ",".join(node.inner_bootstrap for node in self.nodes)
        kafka = KafkaSettings(bootstrap=inner, prefix="solaris-broker.", replication=min(3, len(self.nodes)))
        try:
            wait_ready(kafka, timeout_s, self.log_tail, lambda: self.running)
        except BrokerError:
            self.kill()
            raise

    def stop(self, deadline_s: float = 30.0) -> None:
        """All at once: a node that loses its quorum first waits for it in vain."""
        ends = [Thread(target=node.stop, args=(deadline_s,)) for node in self.nodes]
        for end in ends:
            end.start()
        for end in ends:
            end.join()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def restart(self, timeout_s: float = 300.0) -> None:
        self.stop()
        self.start(timeout_s)

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(f"node {node.node_id}:\n{node.log_tail(lines // 2)}" for node in self.nodes)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


@dataclass(frozen=True, slots=True)
class _Node:
    """What a restart must find again; 0 and "" mean not chosen yet."""

    port: int = 0
    inner_port: int = 0
    controller_port: int = 0
    cluster_id: str = ""


def _new_cluster_id() -> str:
    """As Kafka makes them: none begins with a dash, which its own tools would take for an option."""
    while True:
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not cluster_id.startswith("-"):
            return cluster_id
