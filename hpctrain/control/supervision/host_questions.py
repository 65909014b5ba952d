"""Asks the hosts of a run, all at once: by ssh what would prevent the start of ranks, by srun whether they answer."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import Field

import hpctrain
from hpctrain.common.cluster.interfaces import Interface
from hpctrain.common.cluster.machine import HOST_KILLS, Machine, kills_in, same_host
from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.run.plan import Plan
from hpctrain.control.launchers.command import Launcher, Torchrun
from hpctrain.control.launchers.command_line import JOB_SETTINGS, TRAIN
from hpctrain.control.launchers.launcher_choice import in_allocation

# A host that does not answer ssh in this time counts as lost.
_CONNECT_SECONDS = 8
# It never prompts. A host that is lost during the question is noticed, and no background connection outlives it.
_SSH_OPTIONS = (
    *("-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", "-o", "ControlMaster=no"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2", "--"),
)
# One task beside the ranks' own, wherever it may run, that needs no MPI (https://slurm.schedmd.com/srun.html).
_SRUN = ("srun", "--overlap", "--overcommit", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none", "--quiet")
# How long a host may take that is only asked whether it answers.
_SECONDS = 10.0
# Loading Python from a shared file system can be slow the first time.
_ANSWER_SECONDS = 90.0
_AT_ONCE = 64
# ssh's exit status if it has an error of its own, such as a connection that was lost.
_SSH_FAILED = 255
# Marks the lines of an answer among whatever a login shell prints.
_MARK = "hpctrain-answer:"
# Where mpirun reaches the hosts by another program than ssh, ssh cannot tell whether they answer.
_OTHER_AGENT = re.compile(r"(?i)agent|bootstrap|launcher")
_OTHER_AGENT_VARIABLE = re.compile(r"(PRTE|OMPI)_MCA_plm_\w+_agent|(I_MPI_)?HYDRA_(LAUNCHER|BOOTSTRAP)\w*")

# Ranks of a failed attempt may need eight seconds to end. Connections are tried at each address that this host has.
_PROGRAM = f"""\
import json, socket, sys, time
import hpctrain
answer = {{"version": hpctrain.__version__}}
def reaches(way):
    address, _, port = way.rpartition(":")
    try:
        socket.create_connection((address, int(port)), timeout=3).close()
        return True
    except OSError:
        return False
if hpctrain.__version__ == {hpctrain.__version__!r}:
    from dataclasses import asdict
    from hpctrain.common.cluster.interfaces import read_interfaces
    from hpctrain.common.cluster.machine import versions
    from hpctrain.common.run.records import processes_with
    answer.update(interfaces=[asdict(one) for one in read_interfaces()], versions=versions())
    end = time.monotonic() + 8
    while (busy := processes_with({TRAIN!r}, sys.argv[1]) if sys.argv[1] else []) and time.monotonic() < end:
        time.sleep(0.2)
    answer.update(busy=busy, cut_off=bool(sys.argv[2:]) and not any(map(reaches, sys.argv[2:])))
print({_MARK!r} + json.dumps(answer))
"""


class Answer(FrozenModel):
    """The answer of one host.

    Attributes:
        reached: its shell ran, and the connection lasted until it had answered.
        missing: paths that it does not see.
        program: whether it has the program that each rank executes.
        error: the last line of what was printed about what went wrong.
        version: of its hpctrain; None where that cannot be imported, or is in a container.
        versions: the versions of packages that affect the results.
        interfaces: None where the host could not list them.
        cut_off: it cannot connect to this host, though this one reaches it by ssh.
        busy: processes there that are ranks of the run.
    """

    reached: bool = False
    missing: tuple[str, ...] = ()
    program: bool = False
    error: str = ""
    version: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    interfaces: tuple[Interface, ...] | None = None
    cut_off: bool = False
    busy: tuple[int, ...] = ()


def ask_hosts(
    plan: Plan,
    hosts: Mapping[str, bool],
    folder: Path,
    paths: Sequence[Path],
    own: Sequence[str],
) -> dict[str, Answer]:
    """The answers of hosts, all asked at once.

    Args:
        hosts: those to ask, and whether each is this machine, which needs no ssh.
        paths: absolute paths that all of them have to see.
        own: the addresses of this host, of which the others are to reach one; empty if they need not try.
    """
    running: list[subprocess.Popen[bytes]] = []
    given_up = threading.Event()

    def ask(host: str) -> Answer:
        # This host is not asked for busy ranks: they are seen without a question, and its launcher may be among them.
        words = [""] if hosts[host] else [str(folder.absolute()), *ways]
        command = ["sh"] if hosts[host] else ["ssh", *_SSH_OPTIONS, host, "sh"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        running.append(process)
        if given_up.is_set():
            _kill(process)
        try:
            output, errors = process.communicate(_script(plan, paths, words).encode(), timeout=_ANSWER_SECONDS)
        except subprocess.TimeoutExpired as late:
            output, errors = late.output or b"", f"no answer within {_ANSWER_SECONDS:g} s".encode()
        finally:
            _kill(process)
            with contextlib.suppress(OSError), process:
                # Leaving the context waits for the process and closes its pipes.
                pass
        ended = process.returncode != _SSH_FAILED
        return _parse_answer(output.decode(errors="replace"), errors.decode(errors="replace"), paths, ended=ended)

    with contextlib.ExitStack() as opened:
        # The kernel itself answers connections that nobody accepts.
        listeners = [opened.enter_context(_listener(address)) for address in own]
        ways = [f"{address}:{one.getsockname()[1]}" for address, one in zip(own, listeners, strict=True)]
        pool = opened.enter_context(ThreadPoolExecutor(min(_AT_ONCE, len(hosts))))
        try:
            return dict(zip(hosts, pool.map(ask, hosts), strict=True))
        except BaseException:
            # Mostly a signal to this process, after which the answers are not needed.
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                if process.returncode is None:
                    _kill(process)
            raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with the programs that ssh started, which would keep its output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=4096)


def silent_hosts(
    plan: Plan,
    launcher: Launcher | None,
    machine: Machine,
    environment: Mapping[str, str] = os.environ,
    *,
    lost: Sequence[str] = (),
) -> tuple[str, ...]:
    """The plan's hosts that do not answer within ten seconds; empty if they cannot be asked.

    If no host answers at all, the question is taken to be at fault, unless some hosts are known to be lost.

    Args:
        launcher: what starts its ranks; None where this machine does.
        machine: this one, which is not asked.
        lost: hosts that the launcher lost.
    """
    by_srun = in_allocation(environment)
    others = [host.host for host in plan.hosts if not same_host(host.host, machine.host)]
    # Each host's torchrun is started on that host, so this one has no way to ask.
    if not others or launcher is None or isinstance(launcher, Torchrun):
        return ()
    if (not by_srun and other_agent(plan, environment)) or shutil.which("srun" if by_srun else "ssh") is None:
        return ()

    def answers(host: str) -> bool:
        try:
            return _run_on(host, "true", environment=environment).returncode == 0
        except HpctrainError:
            return False

    with ThreadPoolExecutor(min(_AT_ONCE, len(others))) as pool:
        silent = tuple(host for host, answered in zip(others, pool.map(answers, others), strict=True) if not answered)
    return silent if lost or len(silent) < len(others) else ()


def killed_for_memory(hosts: Sequence[str]) -> list[int]:
    """How many processes the kernel of each host has killed for want of memory; 0 of a host that does not answer."""

    def kills(host: str) -> int:
        with contextlib.suppress(HpctrainError):
            return kills_in(_run_on(host, "cat", str(HOST_KILLS), environment=os.environ).stdout)
        return 0

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(kills, hosts))


def _run_on(host: str, *command: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command of plain words on another host, in a job of Slurm by srun, else by ssh."""
    way = (*_SRUN, f"--nodelist={host}") if in_allocation(environment) else ("ssh", *_SSH_OPTIONS, host)
    inherited = {name: value for name, value in environment.items() if name not in JOB_SETTINGS}
    return run_program(*way, *command, seconds=_SECONDS, environment=inherited)


def other_agent(plan: Plan, environment: Mapping[str, str]) -> bool:
    """Whether options or variables make mpirun reach the hosts by another program than ssh."""
    return any(map(_OTHER_AGENT.search, plan.start.arguments)) or any(map(_OTHER_AGENT_VARIABLE.fullmatch, environment))


def own_addresses(interfaces: Iterable[Interface]) -> tuple[str, ...]:
    """The addresses of a host at which others may reach it, of which mpirun's daemons try one after the other."""
    usable = (address for one in interfaces if one.up and not one.host_only for address in one.addresses)
    return tuple(address for address in usable if not ipaddress.ip_address(address).is_link_local)


def addresses_of(hosts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The addresses that the names of hosts have here; none where a name is not known, which ssh will say."""

    def look_up(host: str) -> tuple[str, ...]:
        with contextlib.suppress(OSError, UnicodeError):
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))
        return ()

    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(look_up, hosts), strict=True))


def is_here(host: str, addresses: Sequence[str], own: Container[str]) -> bool:
    """Whether a name is this machine's, so that mpirun starts its ranks without ssh.

    Args:
        own: all addresses of this machine's own interfaces.
    """
    if same_host(host, socket.gethostname()):
        return True
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in addresses)


def _script(plan: Plan, paths: Sequence[Path], words: Sequence[str]) -> str:
    """The question as a script for a POSIX shell, which reads it from stdin, so that no login shell has to parse it."""
    container = plan.start.container
    program = "apptainer" if container else plan.start.python or sys.executable
    lines = [f"echo {_MARK}reached"]
    for number, path in enumerate(paths):
        # A network file system may show a new file to other hosts a moment later.
        look = f"ls -d {shlex.quote(str(path))}"
        lines += [f"{{ {look} || {{ sleep 1; {look}; }}; }} && echo {_MARK}sees-{number}"]
    # The program may be named relative to this folder.
    lines += [f"cd {shlex.quote(os.getcwd())}"]  # noqa: PTH109
    lines += [f"command -v {shlex.quote(program)} && echo {_MARK}program"]
    if container is None:
        if python_path := os.environ.get("PYTHONPATH"):
            lines += [f"PYTHONPATH={shlex.quote(python_path)}; export PYTHONPATH"]
        lines += [f"exec {shlex.join([program, '-P', '-c', _PROGRAM, *words])} < /dev/null"]
    return "\n".join([*lines, ""])


def _parse_answer(output: str, errors: str, paths: Sequence[Path], *, ended: bool) -> Answer:
    """The answer in a host's output; not ``reached`` if its connection was lost before the program ``ended``."""
    words = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    printed = [line.strip() for line in errors.splitlines() if line.strip()]
    reported: dict[str, Any] = {}
    # A host that was lost may have sent half a line.
    with contextlib.suppress(ValueError):
        reported = next((json.loads(word) for word in words if word.startswith("{")), reported)
    return Answer(
        reached="reached" in words and (ended or bool(reported)),
        missing=tuple(str(path) for number, path in enumerate(paths) if f"sees-{number}" not in words),
        program="program" in words,
        error=printed[-1] if printed else "",
        **reported,
    )
