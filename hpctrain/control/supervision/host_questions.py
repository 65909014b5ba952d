"""Asks the hosts of a run by ssh, before mpirun starts ranks there, about anything that would prevent their start."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hpctrain
from hpctrain.common.cluster.interfaces import Interface
from hpctrain.common.cluster.machine import same_host
from hpctrain.common.run.plan import Plan
from hpctrain.control.launchers.command import TRAIN
from hpctrain.control.supervision.reachability import listening
from hpctrain.control.supervision.silent_hosts import ssh_command

# A host that does not answer ssh in this time counts as lost.
_CONNECT_SECONDS = 8
# A host that is lost during the question is noticed, and no background connection outlives the question.
_SSH_OPTIONS = (
    *("-x", "-o", "ControlMaster=no"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2"),
)
# Includes the look-up of the host's name and the start of its login shell.
_REACH_SECONDS = 15.0
# Loading Python from a shared file system can be slow the first time.
_ANSWER_SECONDS = 90.0
_AT_ONCE = 64
# ssh's exit status if it has an error of its own, such as a connection that was lost.
_SSH_FAILED = 255
# Ranks of a failed attempt may need this long to end.
_BUSY_SECONDS = 8.0
# Marks the lines of an answer among whatever a login shell prints.
_MARK = "hpctrain-answer:"

_PROGRAM = f"""\
import json, sys, time
import hpctrain
answer = {{"version": hpctrain.__version__}}
if hpctrain.__version__ == {hpctrain.__version__!r}:
    from dataclasses import asdict
    from hpctrain.common.cluster.interfaces import read_interfaces
    from hpctrain.control.supervision.reachability import reaches
    from hpctrain.common.cluster.machine import versions
    from hpctrain.common.run.processes import processes_with
    answer.update(interfaces=[asdict(one) for one in read_interfaces()], versions=versions())
    end = time.monotonic() + {_BUSY_SECONDS}
    while (busy := processes_with({TRAIN!r}, sys.argv[1]) if sys.argv[1] else []) and time.monotonic() < end:
        time.sleep(0.2)
    answer.update(busy=busy)
    ways = [way.rsplit(":", 1) for way in sys.argv[2:]]
    answer.update(cut_off=bool(ways) and not any(reaches(address, int(port)) for address, port in ways))
print({_MARK!r} + json.dumps(answer))
"""


@dataclass(frozen=True, kw_only=True)
class Answer:
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
    versions: Mapping[str, str] = field(default_factory=dict)
    interfaces: tuple[Interface, ...] | None = None
    cut_off: bool = False
    busy: tuple[int, ...] = ()


class Questions:
    """The questions under way, which another thread can end; a host whose question was ended counts as not reached."""

    def __init__(self) -> None:
        # Holds no process that was waited for, because its number may belong to another one by then.
        self._asked: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Register the ssh process of a question."""
        with self._lock:
            self._asked.add(process)
            if self._ended:
                _kill(process)

    def answered(self, process: subprocess.Popen[bytes]) -> None:
        """End what is left of a question."""
        with self._lock:
            self._asked.discard(process)
            _kill(process)
        with contextlib.suppress(OSError), process:
            # Leaving the context waits for the process and closes its pipes.
            pass

    def end(self) -> None:
        """End the questions that are under way, and all later ones at once."""
        with self._lock:
            self._ended = True
            for process in self._asked:
                _kill(process)


def ask_hosts(
    plan: Plan,
    hosts: Mapping[str, bool],
    folder: Path,
    paths: Sequence[Path],
    own: Sequence[str],
    questions: Questions | None = None,
) -> dict[str, Answer]:
    """The answers of hosts, all asked at once.

    Args:
        hosts: those to ask, and whether each is this machine, which needs no ssh.
        paths: absolute paths that all of them have to see.
        own: the addresses of this host, of which the others are to reach one; empty if they need not try.
        questions: can be ended from another thread.
    """
    asked = questions or Questions()

    def ask(host: str) -> Answer:
        # This host is not asked for busy ranks: they are seen without a question, and its launcher may be among them.
        script = _script(plan, "" if hosts[host] else str(folder.absolute()), paths, () if hosts[host] else ways)
        command = ["sh"] if hosts[host] else [*ssh_command(plan, _CONNECT_SECONDS), *_SSH_OPTIONS, "--", host, "sh"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        asked.add(process)
        try:
            streams = _read_streams(process, script.encode())
            return _parse_answer(*streams, paths, ended=process.returncode != _SSH_FAILED)
        finally:
            asked.answered(process)

    with contextlib.ExitStack() as opened, ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        ways = [f"{address}:{opened.enter_context(listening(address))}" for address in own]
        try:
            return dict(zip(hosts, pool.map(ask, hosts), strict=True))
        except BaseException:
            # Mostly a signal to this process, after which the answers are not needed.
            pool.shutdown(wait=False, cancel_futures=True)
            asked.end()
            raise


def addresses_of(hosts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The addresses that the names of hosts have here; none where a name is not known, which ssh will say."""

    def look_up(host: str) -> tuple[str, ...]:
        with contextlib.suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
        return ()

    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(look_up, hosts), strict=True))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End ssh with the programs that it started, which would keep its output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def is_here(host: str, addresses: Sequence[str], own: Container[str]) -> bool:
    """Whether a name is this machine's, so that mpirun starts its ranks without ssh.

    Args:
        own: all addresses of this machine's own interfaces.
    """
    if same_host(host, socket.gethostname()):
        return True
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in addresses)


def resolves_to_loopback(host: str, addresses: Sequence[str]) -> bool:
    """Whether another host's name resolves to the loopback, so that its ranks would start on this host."""
    if same_host(host, socket.gethostname()) or host.startswith("localhost") or host in addresses:
        return False
    # In /etc/hosts the aliases stand in the same line as the name of this machine.
    loops = any(ipaddress.ip_address(address).is_loopback for address in addresses)
    return loops and not same_host(_canonical(host), socket.gethostname())


def _canonical(host: str) -> str:
    with contextlib.suppress(OSError, UnicodeError):
        return socket.gethostbyname_ex(host)[0]
    return host


def _script(plan: Plan, folder: str, paths: Sequence[Path], ways: Sequence[str]) -> str:
    """The question as a script for a POSIX shell, which reads it from stdin, so that no login shell has to parse it.

    Args:
        folder: of the run whose ranks are looked for; empty for none.
    """
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
        words = shlex.join([program, "-P", "-c", _PROGRAM, folder, *ways])
        lines += [f"exec {words} < /dev/null"]
    return "\n".join([*lines, ""])


def _read_streams(process: subprocess.Popen[bytes], script: bytes) -> tuple[str, str]:
    """Both streams of a host's answer, as far as they came in time."""
    try:
        streams = process.communicate(script, timeout=_REACH_SECONDS)
    except subprocess.TimeoutExpired as late:
        if f"{_MARK}reached".encode() not in (late.output or b""):
            return "", f"no answer within {_REACH_SECONDS:g} s"
        try:
            streams = process.communicate(timeout=_ANSWER_SECONDS)
        except subprocess.TimeoutExpired as later:
            return (later.output or b"").decode(errors="replace"), f"no answer within {_ANSWER_SECONDS:g} s"
    output, errors = streams
    return output.decode(errors="replace"), errors.decode(errors="replace")


def _parse_answer(output: str, errors: str, paths: Sequence[Path], *, ended: bool) -> Answer:
    """The answer in a host's output; not ``reached`` if its connection was lost before the program ``ended``."""
    words = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    printed = [line.strip() for line in errors.splitlines() if line.strip()]
    reported: dict[str, Any] = {}
    # A host that was lost may have sent half a line.
    with contextlib.suppress(ValueError):
        reported = next((json.loads(word) for word in words if word.startswith("{")), reported)
    interfaces = (
        Interface(**{**one, "addresses": tuple(one["addresses"]), "networks": tuple(one["networks"])})
        for one in reported.get("interfaces", ())
    )
    return Answer(
        reached="reached" in words and (ended or bool(reported)),
        missing=tuple(str(path) for number, path in enumerate(paths) if f"sees-{number}" not in words),
        program="program" in words,
        error=printed[-1] if printed else "",
        version=reported.get("version"),
        versions=reported.get("versions", {}),
        interfaces=tuple(interfaces) if "interfaces" in reported else None,
        cut_off=bool(reported.get("cut_off")),
        busy=tuple(reported.get("busy", ())),
    )
