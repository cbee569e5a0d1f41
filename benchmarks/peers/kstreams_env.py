"""Builds the Kafka Streams peer once, with Maven, into the benchmark's cache folder; the checkout stays as it is.

A folder is named by the hash of pom and sources, so a change is a new folder and a half-made one is never used.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.harness.bundle import cache_folder
from benchmarks.harness.cluster import NotMeasured
from topics.brokers.jars import find_java
from topics.errors import BrokerError

PROJECT = Path(__file__).parent / "kstreams"
JAR = "kstreams-ranker.jar"
HEAP = "1g"
# The collector with the cheapest barriers: pauses are not what is measured.
JVM = (f"-Xms{HEAP}", f"-Xmx{HEAP}", "-XX:+UseParallelGC", "-XX:+AlwaysPreTouch")
LOGGING = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


def kstreams_command() -> list[str]:
    """The command that runs it, but for its configuration file. Raises `NotMeasured` without Java or Maven."""
    try:
        java = find_java()
    except BrokerError as e:
        raise NotMeasured(str(e)) from None
    folder = build_folder()
    if not folder.is_dir():
        _build(folder)
    return [java, *JVM, LOGGING, "-cp", f"{folder}/*", "solaris.peers.RankerApp"]


def build_folder() -> Path:
    digest = hashlib.sha256()
    for path in sorted([PROJECT / "pom.xml", *PROJECT.glob("src/**/*.java")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return cache_folder() / f"kstreams-{digest.hexdigest()[:12]}"


def _build(folder: Path) -> None:
    mvn = shutil.which("mvn")
    if mvn is None or shutil.which("javac") is None:
        raise NotMeasured("Maven and a JDK are needed once to build it: no `mvn` or `javac` on PATH")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        target, jars = Path(temporary) / "target", Path(temporary) / "jars"
        command = [mvn, "-B", "-q", "-f", str(PROJECT / "pom.xml"), f"-Dtarget={target}", "package"]
        command += ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={jars}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=temporary)
        if done.returncode != 0 or not (target / JAR).exists():
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise NotMeasured(f"mvn could not build the Kafka Streams peer (exit {done.returncode}):\n{tail}")
        shutil.move(target / JAR, jars / JAR)
        jars.rename(folder)
