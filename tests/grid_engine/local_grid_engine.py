"""A Grid Engine of one host on this machine: its master and its execution daemon, with all files in one folder."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.ports import free_port

PROGRAMS = Path("/usr/lib/gridengine")
_PACKAGED = Path("/var/lib/gridengine")
_SECONDS = 60.0
_SLOTS = 8
_HOST = """\
hostname localhost
load_scaling NONE
complex_values h_rss=8G,whole=true
user_lists NONE
xuser_lists NONE
projects NONE
xprojects NONE
usage_scaling NONE
report_variables NONE
"""
_PARALLEL = """\
pe_name mpi
slots 99
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule $fill_up
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""


def obstacle() -> str | None:
    """Why no Grid Engine can be started here; None if it can."""
    needed = [PROGRAMS / name for name in ("sge_qmaster", "sge_execd", "qsub")]
    if not all(path.exists() for path in needed):
        return "missing for a local Grid Engine: apt-get install gridengine-master gridengine-exec gridengine-client"
    return "a local Grid Engine can be started by root alone" if os.geteuid() != 0 else None


@contextlib.contextmanager
def local_grid_engine() -> Iterator[dict[str, str]]:
    """The variables by which clients find it. Its daemons and their jobs' processes have ended afterwards."""
    folder = Path(tempfile.gettempdir(), f"hpctrain-ge-{secrets.token_hex(4)}")
    variables = {
        "SGE_ROOT": str(folder),
        "SGE_CELL": "default",
        "SGE_QMASTER_PORT": str(free_port()),
        "SGE_EXECD_PORT": str(free_port()),
        "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
    }
    environment = {**os.environ, **variables}
    daemons: list[subprocess.Popen[bytes]] = []

    def run(*command: str) -> str:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False, cwd=folder
        )
        return done.stdout + done.stderr

    def start(daemon: str) -> None:
        with (folder / f"{daemon}.log").open("wb") as log:
            daemons.append(
                subprocess.Popen(
                    [PROGRAMS / daemon], env={**environment, "SGE_ND": "1"}, stdout=log, stderr=log, cwd=folder
                )
            )

    def written(name: str, text: str) -> str:
        (folder / name).write_text(text)
        return str(folder / name)

    try:
        _write(folder, run)
        start("sge_qmaster")
        _wait(lambda: "global" in run("qhost"), "qmaster answers", folder)
        run("qconf", "-Mc", written("complex", _sited(run("qconf", "-sc"))))
        run("qconf", "-as", "localhost")
        run("qconf", "-Ae", written("host", _HOST))
        run("qconf", "-Ap", written("pe", _PARALLEL))
        queue = {"qname": "all.q", "hostlist": "localhost", "load_thresholds": "NONE", "slots": str(_SLOTS)}
        queue |= {"rerun": "TRUE", "shell": "/bin/bash", "pe_list": "mpi", "notify": "00:00:10"}
        run("qconf", "-Aq", written("queue", _changed(run("qconf", "-sq"), queue)))
        soon = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
        run("qconf", "-Msconf", written("schedule", _changed(run("qconf", "-ssconf"), soon)))
        # It looks for its host at its start alone.
        start("sge_execd")
        _wait(lambda: bool(re.search(r"^all.q@localhost .*lx-\S+ *$", run("qstat", "-f"), re.M)), "execd", folder)
        yield variables
    finally:
        run("qdel", "-f", "-u", "*")
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder)


def _write(folder: Path, run: Callable[..., str]) -> None:
    """The folder of a cell with its first configuration, as the Debian package's own installation makes it."""
    for part in ("default/common", "spool/qmaster", "spool/execd", "local_conf"):
        (folder / part).mkdir(parents=True)
    for part in ("bin", "lib", "util", "utilbin"):
        (folder / part).symlink_to(_PACKAGED / part)
    common, spool = folder / "default" / "common", folder / "spool"
    (common / "act_qmaster").write_text("localhost\n")
    (common / "host_aliases").write_text(f"localhost {socket.gethostname()}\n")
    parameters = f"{common};{spool / 'qmaster'}"
    bootstrap = {
        "admin_user": "none",
        "default_domain": "none",
        "ignore_fqdn": "true",
        "spooling_method": "classic",
        "spooling_lib": "libspoolc",
        "spooling_params": parameters,
        "binary_path": "/usr/sbin",
        "qmaster_spool_dir": str(spool / "qmaster"),
        "security_mode": "none",
        "listener_threads": "2",
        "worker_threads": "2",
        "scheduler_threads": "1",
    }
    (common / "bootstrap").write_text("".join(f"{name} {value}\n" for name, value in bootstrap.items()))
    defaults = Path("/usr/share/gridengine/default-configuration").read_text()
    ours = {"execd_spool_dir": str(spool / "execd"), "min_uid": "0", "min_gid": "0", "load_report_time": "00:00:02"}
    (folder / "configuration").write_text(_changed(defaults, ours))
    resources = "/usr/share/gridengine/util/resources"
    run(str(PROGRAMS / "spoolinit"), "classic", "libspoolc", parameters, "init")
    for kind, source in (
        ("configuration", str(folder / "configuration")),
        ("complexes", f"{resources}/centry"),
        ("usersets", f"{resources}/usersets"),
        ("managers", "root"),
    ):
        run(str(PROGRAMS / "spooldefaults"), kind, source)


def _sited(resources: str) -> str:
    """The resources of a site that counts the memory of each slot, and lets a job have whole hosts."""
    counted = re.sub(r"^(h_rss .*YES +)NO ", r"\1YES ", resources, flags=re.MULTILINE)
    return f"{counted.rstrip()}\nwhole w BOOL EXCL YES YES 0 0\n"


def _changed(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = re.sub(rf"^{name}\s.*$", lambda _, line=f"{name} {value}": line, text, flags=re.MULTILINE)
    return text


def _wait(condition: Callable[[], bool], name: str, folder: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        logs = "".join(path.read_text() for path in folder.glob("*.log"))
        assert time.monotonic() < deadline, f"{name}: not within {_SECONDS:g} s; {logs}"
        time.sleep(0.2)
