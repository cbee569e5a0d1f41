"""Apache Kafka's jars: fetched once with Maven, kept in a cache that checkouts share.

The cache is `$SOLARIS_CACHE`, by default `~/.cache/solaris`; a folder in it is named by the hash of the pom, so a new
Kafka version is a new folder and a half-fetched one is never used.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from topics.errors import BrokerError

log = logging.getLogger(__name__)

KAFKA_FILES = Path(__file__).resolve().with_name("kafka")
LEAST_JAVA = 17


def cache_dir() -> Path:
    return Path(os.environ.get("SOLARIS_CACHE") or Path.home() / ".cache" / "solaris")


def find_java() -> str:
    """Path of a `java` of version 17 or newer, from JAVA_HOME or PATH; `BrokerError` says what is missing."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        raise BrokerError(f"Java {LEAST_JAVA} or newer is needed for Apache Kafka: no `java` on PATH or in JAVA_HOME")
    shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', shown)
    if found is None or int(found.group(1)) < LEAST_JAVA:
        first = (shown.splitlines() or ["no version shown"])[0]
        raise BrokerError(f"Java {LEAST_JAVA} or newer is needed for Apache Kafka; {java} is: {first}")
    return java


def java_available() -> bool:
    """Whether the Java Kafka can be had here: Java, and the jars or Maven to fetch them."""
    try:
        find_java()
    except BrokerError:
        return False
    return jar_dir().is_dir() or shutil.which("mvn") is not None


def jar_dir() -> Path:
    pom = (KAFKA_FILES / "pom.xml").read_bytes()
    return cache_dir() / f"kafka-jars-{hashlib.sha256(pom).hexdigest()[:12]}"


def fetch_jars() -> Path:
    """Folder with the broker's jars (44 MB), fetched with `mvn` when it is not there yet."""
    target = jar_dir()
    if target.is_dir():
        return target
    mvn = shutil.which("mvn")
    if mvn is None:
        raise BrokerError("Maven is needed once to fetch Apache Kafka: no `mvn` on PATH (install maven, or use Docker)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "jars.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        log.info("fetching Apache Kafka's jars with mvn into %s (44 MB, once)", target)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            jars = Path(temporary) / "jars"
            command = [mvn, "-B", "-q", "-f", str(KAFKA_FILES / "pom.xml"), "dependency:copy-dependencies"]
            command += [f"-DoutputDirectory={jars}", "-DincludeScope=runtime"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=temporary)
            if done.returncode != 0 or not any(jars.glob("kafka_*.jar")):
                tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
                raise BrokerError(f"mvn could not fetch Apache Kafka (exit {done.returncode}):\n{tail}")
            jars.rename(target)
    return target
