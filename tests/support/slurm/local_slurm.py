"""A Slurm of several nodes on this machine, for the tests and for a person to try.

with LocalSlurm() as cluster:
    cluster.run("sbatch", "--wait", "job.sh")

python tests/support/slurm/local_slurm.py start|stop
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

import psutil

# It is a program too.
sys.path.append(str(Path(__file__).parents[2]))

from support.slurm import slurm_conf
from support.slurm.slurm_conf import Settings

_PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
}
_PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/sbin"


class SlurmError(Exception):
    """The cluster does not do what it should; the message says what, with the end of the daemon's log."""


def obstacle() -> str | None:
    """Why no cluster can be started here, with the Debian packages to install; None if it can."""
    missing = {package for program, package in _PACKAGES.items() if shutil.which(program, path=_PATH) is None}
    # slurmd loads it by this name, which only the development package has.
    if not any(Path("/usr/lib").glob("*-linux-gnu/libpmix.so")):
        missing.add("libpmix-dev")
    if missing:
        return f"missing for a local Slurm: apt-get install {' '.join(sorted(missing))}"
    return "a local Slurm can be started by root alone" if os.geteuid() != 0 else None


class LocalSlurm:
    """munged, slurmctld and one slurmd a node, all of their files in one folder.

    Args:
        settings: what the cluster looks like.
        folder: made for it and removed with it; a new one by default. Its path must be short: sockets are in it.
    """

    def __init__(self, settings: Settings = Settings(), folder: Path | None = None) -> None:  # noqa: B008
        self.settings = settings
        self.folder = folder or Path(tempfile.gettempdir(), f"hpctrain-slurm-{secrets.token_hex(4)}")
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs beside its own variables. Jobs inherit it, and leave their temporary files there."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "TMPDIR": str(self.folder / "tmp")}

    @property
    def alive(self) -> bool:
        """Whether slurmctld runs, whoever started it."""
        return "slurmctld" in self._daemons()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all, and wait until all nodes are idle.

        Raises:
            SlurmError: a daemon ended, or something took too long.
        """
        self.folder.mkdir(mode=0o700)
        try:
            slurm_conf.write(self.settings, self.folder)
            self._start_munged()
            self._start("slurmctld", "slurmctld", "-D", "-i")
            self._wait("slurmctld answers", lambda: "is UP" in self.run("scontrol", "ping", check=False))
            for node in self.settings.nodes:
                self.start_slurmd(node)
            self.wait_idle()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of the cluster and of its jobs, then remove the folder. Does nothing the second time."""
        # slurmctld first: it would requeue what it sees ending.
        daemons = self._daemons()
        _kill(daemons[name] for name in sorted(daemons, key=lambda name: name != "slurmctld"))
        self._kill_jobs()
        for child in self._children:
            child.wait(timeout=60)
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def run(self, *command: str, check: bool = True, timeout: float = 60, **variables: str) -> str:
        """What a client prints, both streams.

        Raises:
            SlurmError: it failed, and ``check``.
        """
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            raise SlurmError(f"{' '.join(command)} exited {done.returncode}: {done.stdout}")
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """``scontrol show job``: ``JobState``, ``Restarts``, ``ExitCode``, ``NodeList`` …"""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    def wait_for(self, job: str, *states: str, timeout: float = 120) -> dict[str, str]:
        """The job once its state is one of ``states``.

        Raises:
            SlurmError: it is not within ``timeout`` seconds.
        """
        self._wait(f"job {job} is {' or '.join(states)}", lambda: self.job(job)["JobState"] in states, timeout)
        return self.job(job)

    def wait_idle(self, timeout: float = 60) -> None:
        """Until every node is idle.

        Raises:
            SlurmError: one is not within ``timeout`` seconds.
        """
        states = ("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%T")
        self._wait("all nodes are idle", lambda: set(self.run(*states).split()) == {"idle"}, timeout)

    def start_slurmd(self, node: str) -> None:
        """Start a node's daemon, for the first time or again."""
        # slurmstepd inherits the name, which is how its node is known.
        self._start(f"slurmd-{node}", "slurmd", "-D", "-N", node, SLURMD_NODENAME=node)

    def kill_slurmd(self, node: str) -> None:
        """End a node's daemon; steps on it go on, and Slurm misses the node after ``lost_seconds``."""
        _kill([self._daemons()[f"slurmd-{node}"]])

    def lose_node(self, node: str) -> None:
        """As if a node lost its power: its daemon, its steps and all that they run end at once."""
        self.kill_slurmd(node)
        self._kill_jobs(SLURMD_NODENAME=node)

    def _start_munged(self) -> None:
        files = {"key": "munge.key", "seed": "munge.seed", "log": "munged.log", "pid": "munged.pid"}
        options = [f"--{kind}-file={self.folder / name}" for kind, name in files.items()]
        # --force: munged wants a folder that other users can enter, and there are none here.
        socket = self.folder / "munge.socket"
        self._start("munged", "munged", "--foreground", "--force", f"--socket={socket}", *options)
        self._wait("munged has its socket", socket.is_socket)

    def _start(self, name: str, *command: str, **variables: str) -> None:
        environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf"), **variables}
        with (self.folder / f"{name}.out").open("ab") as output:
            child = subprocess.Popen(
                command,
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._children.append(child)
        started = {name: (process.pid, process.create_time()) for name, process in self._daemons().items()}
        started[name] = (child.pid, psutil.Process(child.pid).create_time())
        (self.folder / "processes.json").write_text(json.dumps(started))

    def _daemons(self) -> dict[str, psutil.Process]:
        """Those that run, by name, also if another process started them."""
        record = self.folder / "processes.json"
        running = {}
        for name, (pid, created) in json.loads(record.read_text()).items() if record.exists() else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == created and _runs(process):
                    running[name] = process
        return running

    def _wait(self, what: str, condition: Callable[[], bool], timeout: float = 100) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline or any((child.poll() or 0) > 0 for child in self._children):
                outputs = sorted(self.folder.glob("*.out"))
                logs = "".join(f"\n{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in outputs)
                raise SlurmError(f"waited {timeout:g} s until {what}, in vain; the daemons said:{logs}")
            time.sleep(0.05)

    def _job_processes(self, **variables: str) -> Iterator[psutil.Process]:
        """Those that jobs started, with their slurmstepd, whose environment has these variables."""
        wanted = {"SLURM_CONF": self.environment["SLURM_CONF"], **variables}.items()
        for process in psutil.process_iter():
            environment = environment_of(process.pid)
            if "SLURMD_NODENAME" in environment and wanted <= environment.items():
                yield process

    def _kill_jobs(self, **variables: str) -> None:
        # Again until there are none: they may start others meanwhile.
        deadline = time.monotonic() + 600
        while processes := list(self._job_processes(**variables)):
            if time.monotonic() > deadline:
                raise SlurmError(f"killed for 100 s, and jobs still start processes: {processes}")
            _kill(processes)


def environment_of(pid: int) -> dict[str, str]:
    """Of a running process; psutil's own stops at the title that slurmstepd writes over its first variables."""
    try:
        block = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(variable.split("=", 1) for variable in block.split("\0") if "=" in variable)


def _kill(processes: Iterable[psutil.Process]) -> None:
    """End them and their children at once, and wait until they are gone."""
    family = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family |= {process, *process.children(recursive=True)}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + 60
    while left := [process for process in family if _runs(process)]:
        if time.monotonic() > deadline:
            raise SlurmError(f"killed 60 s ago, and still there: {left}")
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


_TRY = """\
export SLURM_CONF={conf}
# sinfo; scontrol show topology
# srun --nodes 4 hostname
# .venv/bin/hpctrain submit digits --nodes 2 --time 10 --wait
# make cluster-stop
"""


def main() -> int:
    """``start`` a cluster that stays up, or ``stop`` it; either may be said twice."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("action", choices=("start", "stop"))
    action = parser.parse_args().action
    if reason := obstacle():
        sys.exit(reason)
    folder = Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp"), "hpctrain-cluster")
    # In /tmp anybody can make it, and what it records is killed.
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.geteuid()):
        sys.exit(f"{folder} belongs to somebody else: set XDG_RUNTIME_DIR to a folder of your own")
    cluster = LocalSlurm(folder=folder)
    if action == "stop" and cluster.alive:
        _cancel_jobs(cluster)
    if action == "stop" or not cluster.alive:
        cluster.stop()
    if action == "start" and not cluster.alive:
        cluster.start()
    if action == "start":
        sys.stdout.write(_TRY.format(conf=shlex.quote(cluster.environment["SLURM_CONF"])))
    return 0


def _cancel_jobs(cluster: LocalSlurm) -> None:
    """So that mpirun and the steps can remove their temporary files; what does not end is killed afterwards."""
    with contextlib.suppress(SlurmError):
        cluster.run("scancel", "--user=root")
        cluster.wait_idle(timeout=10)


if __name__ == "__main__":
    sys.exit(main())
