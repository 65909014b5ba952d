"""A cluster of Spark on this machine: a master and two workers of one core each, ended with all that they started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import psutil

from support.ports import free_port

_CHECKOUT = Path(__file__).parents[2]
# `make test` puts pyspark beside the environment.
_BESIDE = _CHECKOUT / ".pyspark"
_SETTINGS = """\
spark.master {master}
spark.driver.host 127.0.0.1
spark.driver.memory 512m
spark.executor.memory 512m
spark.ui.enabled false
"""


def obstacle() -> str | None:
    """Why no cluster can be started here; None if it can."""
    if shutil.which("java") is None:
        return "no Java: apt-get install openjdk-17-jre-headless"
    if _home() is None:
        return "no pyspark: make .pyspark/installed.stamp"
    return None


def _home() -> Path | None:
    if _BESIDE.exists():
        return _BESIDE / "pyspark"
    found = importlib.util.find_spec("pyspark")
    return Path(found.origin).parent if found and found.origin else None


class LocalSpark:
    """The cluster, all of its files in one folder.

    Attributes:
        environment: what a driver needs beside its own variables.
    """

    def __init__(self, workers: int = 2) -> None:
        home = _home()
        assert home is not None
        self._home = home
        self._workers = workers
        self._folder = Path(tempfile.mkdtemp(prefix="hpctrain-spark-"))
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._port = free_port()
        self.master = f"spark://127.0.0.1:{self._port}"
        path = [str(home.parent), str(_CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {
            "PYTHONPATH": os.pathsep.join(path),
            "SPARK_CONF_DIR": str(self._folder / "conf"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_DIRS": str(self._folder),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "HPCTRAIN_TIMEOUT": "120",
        }

    def __enter__(self) -> Self:
        try:
            (self._folder / "conf").mkdir()
            (self._folder / "conf" / "spark-defaults.conf").write_text(_SETTINGS.format(master=self.master))
            self._start("master", "--host", "127.0.0.1", "--port", str(self._port))
            self._wait_for("master", "I have been elected leader")
            for number in range(self._workers):
                name = f"worker-{number}"
                size = ("--cores", "1", "--memory", "512m", "--work-dir", str(self._folder / name))
                self._start(name, "--host", "127.0.0.1", *size, self.master)
            for number in range(self._workers):
                self._wait_for(f"worker-{number}", "Successfully registered with master")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def executors(self) -> list[psutil.Process]:
        """Those that run now."""
        found = []
        for child in (child for daemon in self._daemons for child in psutil.Process(daemon.pid).children()):
            # One may end meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("CoarseGrainedExecutorBackend" in word for word in child.cmdline()):
                    found.append(child)
        return found

    def stop(self) -> None:
        """End every process, then remove the folder."""
        processes: list[psutil.Process] = []
        for daemon in self._daemons:
            if daemon.poll() is None:
                processes += [psutil.Process(daemon.pid), *psutil.Process(daemon.pid).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=100)
        for daemon in self._daemons:
            daemon.wait(20)
        shutil.rmtree(self._folder)

    def _start(self, name: str, *arguments: str) -> None:
        kind = name.partition("-")[0]
        words = [str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}.{kind.title()}"]
        with (self._folder / f"{name}.log").open("wb") as log:
            daemon = subprocess.Popen(
                [*words, "--webui-port", "0", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self._daemons.append(daemon)

    def _wait_for(self, name: str, words: str, seconds: float = 60) -> None:
        log = self._folder / f"{name}.log"
        until = time.monotonic() + seconds
        while words not in log.read_text(errors="replace"):
            assert time.monotonic() < until, f"waited {seconds:g} s for {words!r} of {name}:\n{log.read_text()[-3000:]}"
            time.sleep(0.1)
