"""The Java Kafka as a process: start, crash, restart on the same data, stop."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from topics import admin as topic_admin
from topics.brokers import Broker, JavaCluster, JavaKafka, wait_ready
from topics.errors import BrokerError
from topics.kafka import KafkaSettings, admin, consumer, producer

pytestmark = [pytest.mark.broker, pytest.mark.java]


def write(kafka: KafkaSettings, topic: str, values: list[bytes], transactional_id: str | None = None) -> None:
    failed: list[str] = []
    out = producer(kafka, transactional_id)
    if transactional_id:
        out.init_transactions(30)
        out.begin_transaction()
    for value in values:
        out.produce(topic, value=value, on_delivery=lambda e, _: failed.append(str(e)) if e else None)
    assert out.flush(120) == 0
    assert failed == []
    if transactional_id:
        out.commit_transaction(30)


def read(kafka: KafkaSettings, topic: str, count: int) -> list[bytes]:
    from confluent_kafka import TopicPartition

    reader = consumer(kafka, "reader")
    reader.assign([TopicPartition(topic, 0, 0)])
    got: list[bytes] = []
    try:
        for _ in range(300):
            message = reader.poll(0.1)
            if message is not None and message.error() is None:
                got.append(message.value())
                if len(got) == count:
                    break
    finally:
        reader.close()
    return got


def make_topic(kafka: KafkaSettings, name: str, replication: int = 1) -> str:
    from confluent_kafka.admin import NewTopic

    topic = kafka.topic(name)
    control = admin(kafka)
    control.create_topics([NewTopic(topic, 1, replication)])[topic].result(20)
    return topic


def test_committed_records_survive_kill_9(java_broker: JavaKafka) -> None:
    assert isinstance(java_broker, Broker)
    kafka = KafkaSettings(bootstrap=java_broker.bootstrap, prefix="kill.")
    topic = make_topic(kafka, "log")
    write(kafka, topic, [b"1", b"2"], transactional_id="kill-tx")
    before = java_broker.pid
    java_broker.kill()
    assert not java_broker.running
    java_broker.restart()
    assert java_broker.pid != before
    assert java_broker.bootstrap == kafka.bootstrap
    write(kafka, topic, [b"3"], transactional_id="kill-tx")
    assert read(kafka, topic, 3) == [b"1", b"2", b"3"]


def test_stop_ends_the_process_and_start_comes_back_on_the_same_port(java_broker: JavaKafka) -> None:
    pid = java_broker.pid
    assert pid is not None
    java_broker.stop()
    assert not psutil.pid_exists(pid)
    again = JavaKafka(java_broker.data_dir, tied=True)
    assert again.port == java_broker.port
    with again:
        assert again.running
    assert not again.running


def test_two_objects_on_one_folder_are_one_broker(java_broker: JavaKafka) -> None:
    second = JavaKafka(java_broker.data_dir)
    second.start()
    assert second.pid == java_broker.pid
    second.stop()
    assert not java_broker.running


def test_a_taken_port_is_named(java_broker: JavaKafka, tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=f"port {java_broker.port} .* taken"):
        JavaKafka(tmp_path / "other", port=java_broker.port).start()


def test_a_broker_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    broken = JavaKafka(tmp_path / "broken", tied=True, properties={"log.retention.bytes": "many"})
    with pytest.raises(BrokerError, match=r"log\.retention\.bytes"):
        broken.start(30)
    assert not broken.running


def test_not_ready_in_time_names_the_address() -> None:
    with pytest.raises(BrokerError, match=r"127\.0\.0\.1:9 was not ready in 1 s"):
        wait_ready(KafkaSettings(bootstrap="127.0.0.1:9"), timeout_s=1)


def test_the_leader_of_a_partition_moves_when_its_node_is_killed(tmp_path: Path) -> None:
    with JavaCluster(tmp_path / "cluster", nodes=3, heap_mb=256, tied=True) as cluster:
        kafka = KafkaSettings(bootstrap=cluster.bootstrap, prefix="three.", replication=3)
        topic = make_topic(kafka, "log", replication=3)
        write(kafka, topic, [b"1"])
        leader = admin(kafka).list_topics(topic, timeout=300).topics[topic].partitions[0].leader
        cluster.node(leader).kill()
        write(kafka, topic, [b"2"])
        assert read(kafka, topic, 2) == [b"1", b"2"]
        moved = admin(kafka).list_topics(topic, timeout=300).topics[topic].partitions[0].leader
        assert moved != leader
        # With one node gone: what two copies confirm is still taken, and the topics we make ask for as much.
        topic_admin.create(kafka, ["dlq", "stats"])
        assert topic_admin.check(kafka, ["dlq", "stats"]) == []
        (dlq,) = topic_admin.describe(kafka, ["dlq"])
        assert dlq.config["min.insync.replicas"] == "2"
    assert not cluster.running
    assert all(node.pid is None for node in cluster.nodes)


def test_tied_broker_dies_with_its_starter(tmp_path: Path) -> None:
    import subprocess
    import sys
    import time

    code = (
        "import os, sys; from topics.brokers import JavaKafka; "
        "b = JavaKafka(sys.argv[1], tied=True); b.start(); print(b.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(2_400):
        if not psutil.pid_exists(pid):
            break
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
    assert os.path.exists(tmp_path / "kafka.pid")
    assert JavaKafka(tmp_path).pid is None
