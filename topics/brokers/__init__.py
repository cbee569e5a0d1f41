"""Ways to have a broker: Apache Kafka on Java, a broker from a wheel, Docker Compose, or somebody's own cluster."""

from topics.brokers.api import Broker
from topics.brokers.embedded import EmbeddedBroker
from topics.brokers.java import JavaCluster, JavaKafka, Secured
from topics.brokers.wait import wait_ready

__all__ = ["Broker", "EmbeddedBroker", "JavaCluster", "JavaKafka", "Secured", "wait_ready"]
