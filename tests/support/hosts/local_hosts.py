"""Hosts on this machine, each with a network, a name, processes and temporary files of its own, for the tests and for
a person to try. Links between them are cables to one switch, whose rate is set both ways.

with LocalHosts(folder, shared=[run_directory]) as hosts:
    hosts.run("h1", "mpirun", "-H", "h1,h2", "hostname")

python tests/support/hosts/local_hosts.py start|stop|on|rate|cut|deafen|silence|split|mend|kill|boot

Made of Linux namespaces (https://man7.org/linux/man-pages/man7/namespaces.7.html), which end with their processes:
nothing is left when those are gone. /tmp, /run and /dev/shm are each host's own; everything else is shared, as by NFS.
The superuser's home is one for all hosts, and empty: a login there neither reads nor writes what is in the real one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NETWORK = "10.77.0"
_SWITCH = "switch"
_BRIDGE, _OTHER_BRIDGE = "br0", "br1"
# A link holds what it sends in this time, and what is more is lost, as in a switch with small buffers.
_QUEUE = "10ms"
_BURST = "128kb"
_LOSES_ALL = ("pfifo", "limit", "0")
# A shell's start-up files may take locks in the home, which a host that is killed in the middle leaves for ever.
_HOME = "/run/home"
_INSIDE = ("--mount", "--uts", "--ipc", "--net", "--pid")


class HostsError(Exception):
    """The hosts do not do what they should; the message says what."""


def obstacle() -> str | None:
    """Why no hosts can be started here, with the Debian packages to install; None if they can."""
    path = f"{os.environ.get('PATH', '')}{os.pathsep}{_PATH}"
    missing = {package for program, package in _PACKAGES.items() if shutil.which(program, path=path) is None}
    if missing:
        return f"missing for hosts on this machine: apt-get install {' '.join(sorted(missing))}"
    if os.geteuid() != 0:
        return "hosts on this machine can be started by root alone"
    tried = subprocess.run(["unshare", *_INSIDE, "--fork", "true"], capture_output=True, text=True, check=False)
    return f"this machine allows no namespaces: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the hosts look like.

    Attributes:
        hosts: how many: h1, h2 …, with the addresses 10.77.0.1, 10.77.0.2 …
        rate: of each link in either direction, in tc's words: ``1gbit``, ``100mbit``; ``none`` for no limit.
    """

    hosts: int = 4
    rate: str = "1gbit"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"h{number}" for number in range(1, self.hosts + 1))


class LocalHosts:
    """Hosts h1 … hN and the switch between them.

    Args:
        folder: made for what the hosts know of each other, and removed with them.
        settings: what they look like.
        shared: folders below /tmp or /run that all hosts see, beside everything that is not below them.
        variables: the environment of what is run on a host, by ssh too.
        stay: they go on when the process that started them ends.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings = Settings(),
        *,
        shared: Sequence[Path] = (),
        variables: Mapping[str, str] | None = None,
        stay: bool = False,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self._shared = [str(path) for path in shared]
        # Each host believes in cores of its own, and all have the same ones: a rank that waits must leave its core.
        self._variables = {"OMPI_MCA_mpi_yield_when_idle": "1", **(variables or {})}
        self._stay = stay
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._remover: subprocess.Popen[bytes] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.settings.names

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"{_NETWORK}.{number}" for number, _ in enumerate(self.names, 1))

    @property
    def alive(self) -> bool:
        """Whether they were started and not stopped, by whichever process."""
        return self._pid(_SWITCH) is not None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all.

        Raises:
            HostsError: one does not come up; with what it said.
        """
        self.folder.mkdir(mode=0o700)
        try:
            self._write_files()
            self._hold(_SWITCH, "unshare", "--net", "--fork", "--kill-child=KILL", "sleep", "infinity")
            for bridge in (_BRIDGE, _OTHER_BRIDGE):
                self._ip(_SWITCH, f"link add {bridge} type bridge", f"link set {bridge} up")
            for name in self.names:
                self._boot(name)
            for name in self.names:
                self._finish_boot(name)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of the hosts, then remove the folder. Does nothing the second time."""
        for name in (*self.names, _SWITCH):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._remover is not None:
            self._remover.communicate()

    def command(self, host: str, *command: str, cwd: Path | None = None, **variables: str) -> list[str]:
        """The command line that runs ``command`` on a host, as its superuser with a new environment.

        Raises:
            HostsError: the host is down.
        """
        environment = {
            "HOME": _HOME,
            "LANG": "C.UTF-8",
            "PATH": f"{Path(sys.executable).parent}:{_PATH}",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self._variables,
            **variables,
        }
        words = [f"{name}={value}" for name, value in environment.items()]
        inside = ["env", "-i", f"--chdir={cwd or Path.cwd()}", *words]
        return [*self._enter(host, *_INSIDE), *inside, *command]

    def run(
        self,
        host: str,
        *command: str,
        cwd: Path | None = None,
        check: bool = True,
        timeout: float = 120,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; ``stdout`` of the result holds both streams.

        Raises:
            HostsError: it failed, and ``check``.
        """
        words = self.command(host, *command, cwd=cwd, **variables)
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                said, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                # What enters a host waits for a child of its own there.
                _kill(psutil.Process(process.pid))
                said, _ = process.communicate()
                raise HostsError(f"{' '.join(command)} on {host} took more than {timeout:g} s:\n{said}") from None
        if check and process.returncode != 0:
            raise HostsError(f"{' '.join(command)} on {host} exited {process.returncode}:\n{said}")
        return subprocess.CompletedProcess(command, process.returncode, said)

    def rate(self, host: str, rate: str, direction: str = "both") -> None:
        """Set what a host's cable carries, in tc's words.

        Args:
            direction: ``to`` the host, ``from`` it, or ``both``.
        """
        if rate == "none":
            for tc, device in self._ends(host, direction):
                subprocess.run([*tc, "del", "dev", device, "root"], capture_output=True, check=False)
        else:
            self._queue(host, direction, "tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE)

    def cut(self, host: str) -> None:
        """Take a host's cable out of the switch: nothing comes through, and nobody is told."""
        self._ip(_SWITCH, f"link set {host} down")

    def deafen(self, host: str) -> None:
        """Lose all that is sent to a host; what it sends arrives."""
        self._queue(host, "to", *_LOSES_ALL)

    def silence(self, host: str) -> None:
        """Lose all that a host sends; it hears the others."""
        self._queue(host, "from", *_LOSES_ALL)

    def split(self, *hosts: str) -> None:
        """Put the cables of some hosts in a switch of their own: they reach each other, and none of the others."""
        self._ip(_SWITCH, *(f"link set {host} master {_OTHER_BRIDGE}" for host in hosts))

    def mend(self, host: str) -> None:
        """Have a host's cable whole in both directions, at the rate of the start, and in the switch of the others."""
        self._ip(_SWITCH, f"link set {host} master {_BRIDGE}", f"link set {host} up")
        self.rate(host, self.settings.rate)

    def kill(self, host: str) -> None:
        """End all processes of a host at once. Its kernel says goodbye for them, unless its cable is cut before."""
        pid = self._pid(host)
        if pid is not None:
            _kill(psutil.Process(pid))
            _wait(f"{host} is gone", lambda: self._pid(host) is None)
        if child := self._children.pop(host, None):
            child.wait(timeout=60)
        if host != _SWITCH and self._pid(_SWITCH) is not None:
            # Connections that nobody could say goodbye on keep the network of a dead host for minutes.
            _done([*self._enter(_SWITCH, "--net"), "ip", "link", "delete", host])
        (self.folder / f"{host}.pid").unlink(missing_ok=True)

    def boot(self, host: str) -> None:
        """Start a host again.

        Raises:
            HostsError: it is up, or does not come up.
        """
        if self._pid(host) is not None:
            raise HostsError(f"{host} is up")
        self._boot(host)
        self._finish_boot(host)

    def repair(self) -> None:
        """Have all hosts up and connected, at their rate; what runs on them goes on."""
        for host in self.names:
            if self._pid(host) is None:
                self.boot(host)
            else:
                self.mend(host)

    def restore(self) -> None:
        """Make all hosts as they were at the start: up, connected, at their rate, without what was run on them."""
        self.repair()
        left = self.processes(*self.names)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # A process that was killed is there until the kernel has taken it down.
        psutil.wait_procs(left, timeout=60)

    def processes(self, *hosts: str) -> list[psutil.Process]:
        """All that live on some hosts, but sshd, which began before anything that was run."""
        firsts = {pid for host in hosts if (pid := self._pid(host)) is not None}
        found = []
        with contextlib.suppress(OSError):
            # Of a host that went down just now there is nothing to be found.
            inside = {Path(f"/proc/{pid}/ns/pid").readlink() for pid in firsts}
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    if process.pid not in firsts and Path(f"/proc/{process.pid}/ns/pid").readlink() in inside:
                        found.append(process)
        return found

    # How it is done.

    def _ends(self, host: str, direction: str) -> list[tuple[list[str], str]]:
        """Where a direction of a cable begins: the command that sets its queue there, and the device."""
        ends = {"to": [(_SWITCH, host)], "from": [(host, "eth0")]}
        chosen = ends.get(direction) or [*ends["to"], *ends["from"]]
        return [([*self._enter(where, "--net"), "tc", "qdisc"], device) for where, device in chosen]

    def _queue(self, host: str, direction: str, *queue: str) -> None:
        for tc, device in self._ends(host, direction):
            _do([*tc, "replace", "dev", device, "root", *queue])

    def _boot(self, host: str) -> None:
        program = Path(__file__).with_name("host.sh")
        unshare = ["unshare", *_INSIDE, "--fork", "--kill-child=KILL", "--propagation=private"]
        self._hold(host, *unshare, "bash", str(program), host, str(self.folder), *self._shared)
        # The kernel removes the cable of a host that went down, in its own time.
        number = self.names.index(host) + 1
        # The same each time it boots: others remember it.
        adapter = ["name", "eth0", "netns", str(self._pid(host)), "address", f"02:00:00:00:00:{number:02x}"]
        cable = [*self._enter(_SWITCH, "--net"), "ip", "link", "add", host, "type", "veth", "peer", *adapter]
        _do(cable)
        self._ip(_SWITCH, f"link set {host} master {_BRIDGE} up")
        address = self.addresses[number - 1]
        self._ip(host, "link set lo up", f"address add {address}/24 dev eth0", "link set eth0 up")
        self.rate(host, self.settings.rate)

    def _finish_boot(self, host: str) -> None:
        listens = Path(f"/proc/{self._pid(host)}/net/tcp")
        # The state 0A is LISTEN, and 0016 the port of ssh.
        _wait(
            f"sshd of {host} listens",
            lambda: any(line.split()[1:4:2] == ["00000000:0016", "0A"] for line in listens.read_text().splitlines()),
            lambda: (self.folder / f"{host}.log").read_text(),
        )

    def _hold(self, name: str, *unshare: str) -> None:
        """Start what holds the namespaces of a host, and remember the first process inside."""
        tied = () if self._stay else ("setpriv", "--pdeathsig", "KILL")
        with (self.folder / f"{name}.log").open("wb") as log:
            outer = subprocess.Popen(
                [*tied, *unshare], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._children[name] = outer
        found: list[psutil.Process] = []

        def inside() -> bool:
            found[:] = psutil.Process(outer.pid).children()
            return bool(found)

        _wait(f"{name} has namespaces", inside, lambda: (self.folder / f"{name}.log").read_text())
        (self.folder / f"{name}.pid").write_text(json.dumps([found[0].pid, found[0].create_time()]))

    def _pid(self, name: str) -> int | None:
        """Of the first process inside, if it lives."""
        try:
            pid, created = json.loads((self.folder / f"{name}.pid").read_text())
            process = psutil.Process(pid)
            lives = process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
        except (FileNotFoundError, psutil.NoSuchProcess):
            return None
        return int(pid) if lives else None

    def _enter(self, name: str, *namespaces: str) -> list[str]:
        pid = self._pid(name)
        if pid is None:
            raise HostsError(f"{name} is down")
        return ["nsenter", "--target", str(pid), *namespaces]

    def _ip(self, name: str, *commands: str) -> None:
        _do([*self._enter(name, "--net"), "ip", "-batch", "-"], "\n".join(commands))

    def _write_files(self) -> None:
        if not self._stay:
            # Its input ends with this process, however that ends.
            remove = ["sh", "-c", 'read -r _; rm -rf "$0"', str(self.folder)]
            self._remover = subprocess.Popen(remove, stdin=subprocess.PIPE, start_new_session=True)
        ssh, etc = self.folder / "ssh", self.folder / "etc"
        for made in (ssh, etc, self.folder / "home"):
            made.mkdir()
        for name in ("host", "id"):
            _do(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "hosts", "-f", str(ssh / name)])
        addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(self.names, 1)}
        hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        users = "".join(
            f"{user.pw_name}:x:{user.pw_uid}:{user.pw_gid}:{user.pw_gecos}:"
            f"{user.pw_dir if user.pw_uid else _HOME}:{user.pw_shell}\n"
            for user in pwd.getpwall()
        )
        (etc / "passwd").write_text(users)
        kind, key, *_ = (ssh / "host.pub").read_text().split()
        known = (f"{name},{address} {kind} {key}\n" for name, address in addresses.items())
        (ssh / "known_hosts").write_text("".join(known))
        shutil.copy(ssh / "id.pub", ssh / "authorized_keys")
        variables = " ".join(f'"{name}={value}"' for name, value in self._variables.items())
        (ssh / "sshd_config").write_text(f"{_SSHD}SetEnv {variables}\n")
        (ssh / "ssh_config").write_text(_SSH)


_SSHD = """\
HostKey /etc/ssh/host
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
MaxStartups 100
PidFile none
"""
_SSH = """\
IdentityFile /etc/ssh/id
GlobalKnownHostsFile /etc/ssh/known_hosts
UserKnownHostsFile /dev/null
StrictHostKeyChecking yes
LogLevel ERROR
"""


def _do(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip()}")


def _done(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _wait(what: str, condition: Callable[[], bool], log: Callable[[], str] = str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise HostsError(f"waited {seconds:g} s until {what}, in vain: {log()}")
        time.sleep(0.01)


def _kill(process: psutil.Process) -> None:
    """End a process and its children; of a first one in its namespace the kernel ends all the others."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


_TRY = """\
# python tests/support/hosts/local_hosts.py on h1 .venv/bin/hpctrain doctor -H {hosts}
# python tests/support/hosts/local_hosts.py on h1 .venv/bin/hpctrain run digits -H {hosts} --run-dir on-hosts
# python tests/support/hosts/local_hosts.py cut h3
# make hosts-stop
"""


# What may be said of hosts that are up; with the names of hosts after it, and more for ``rate``.
_ACTIONS = ("rate", "cut", "deafen", "silence", "split", "mend", "kill", "boot")


def main() -> int:
    """Hosts that stay up until they are stopped; ``start`` and ``stop`` may be said twice."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("action", choices=("start", "stop", "on", *_ACTIONS), help="a method of LocalHosts, or run on")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="its arguments: on HOST COMMAND, rate HOST 100mbit to")
    given = parser.parse_args()
    if reason := obstacle():
        sys.exit(reason)
    folder = Path("/run/hpctrain-hosts")
    variables = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    hosts = LocalHosts(folder, shared=[Path.cwd()], variables=variables, stay=True)
    try:
        _act(hosts, given.action, given.words)
    except HostsError as error:
        sys.exit(str(error))
    return 0


def _act(hosts: LocalHosts, action: str, words: Sequence[str]) -> None:
    match action:
        case "start":
            if not hosts.alive:
                hosts.stop()
                hosts.start()
            sys.stdout.write(_TRY.format(hosts=",".join(hosts.names)))
        case "on":
            command = hosts.command(*words)
            os.execvp(command[0], command)
        case _:
            getattr(hosts, action)(*words)


if __name__ == "__main__":
    sys.exit(main())
