"""Runs that begin on several hosts: one set of settings, the right network, and faults that name their host."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hpctrain
from hpctrain.common.run.directory import RUNS
from hpctrain.common.run.events import read_events
from support.hosts.local_hosts import LocalHosts
from support.launching import Launch
from support.refusals import codes

# Until a user knows what is wrong.
LIMIT_SECONDS = 60
# No rank needs MPI, or another, to say what it was started with.
VARIABLES = """\
import json, os, pathlib, socket
pathlib.Path(f"said-{socket.gethostname()}.json").write_text(json.dumps(dict(os.environ)))
"""
TOGETHER = """\
import socket
import hpctrain as ht
print("together:", *ht.init("mpi").allgather_object(socket.gethostname()))
"""
# With the programs that started it, which a rank in a warm interpreter does not see: PyTorch is imported at its turn.
LISTENING = """\
import importlib, socket
import psutil
import hpctrain as ht
torch = importlib.import_module("torch")
comm = ht.init()
net, optimizer = ht.distribute(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), 0.1))
net(torch.ones(2)).backward()
optimizer.step()
own = psutil.Process()
each = [one for process in (own, *own.parents()) for one in process.net_connections("tcp") if one.status == "LISTEN"]
ports = {22}
print(socket.gethostname(), "listens at", *{one.laddr.ip for one in each if one.laddr.port not in ports}, flush=True)
comm.barrier()
"""


@pytest.fixture
def changed(hosts: LocalHosts) -> Iterator[LocalHosts]:
    """Hosts whose interfaces, mounts and temporary files the test may change: they are booted again."""
    yield hosts
    for host in hosts.names:
        hosts.kill(host)


def scripts(folder: Path) -> None:
    (folder / "variables.py").write_text(VARIABLES)
    (folder / "together.py").write_text(TOGETHER)


def mounted(hosts: LocalHosts, host: str, file: Path, over: str) -> None:
    """Let a host see ``file`` at another place."""
    hosts.run(host, "mount", "--bind", str(file), over)


def bridge(hosts: LocalHosts, host: str, name: str, address: str) -> None:
    hosts.run(host, "ip", "link", "add", name, "type", "bridge")
    hosts.run(host, "ip", "address", "add", address, "dev", name)
    hosts.run(host, "ip", "link", "set", name, "up")


def require_nothing_left(hosts: LocalHosts) -> None:
    """No rank, no launcher and no daemon of one, on any host that is up."""
    deadline = time.monotonic() + 60
    while True:
        ran = [hosts.run(host, "ps", "axo", "args=").stdout for host in hosts.names]
        left = [line for text in ran for line in text.splitlines() if "hpctrain" in line or "prte" in line]
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_settings_reach_the_ranks_of_all_hosts(hosts: LocalHosts, hosts_hpctrain: Launch, tmp_path: Path) -> None:
    scripts(tmp_path)
    settings = {"HPCTRAIN_STALL": "7", "HPCTRAIN_TIMEOUT": "99", "XLA_FLAGS": "--a=b;c 'd'\n--e", "NCCL_DEBUG": "WARN"}
    own = {"HPCTRAIN_API_KEY": "secret", "OF_THE_USER": "1"}
    result = hosts_hpctrain("run", "variables.py", "-H", "h1,h2", **settings, **own)
    assert result.returncode == 0, result.stdout
    first, second = (json.loads((tmp_path / f"said-{host}.json").read_text()) for host in ("h1", "h2"))
    for said in (first, second):
        assert settings.items() <= said.items()
        # Which hpctrain it is, and which modules of the user's.
        assert said["PYTHONPATH"] == first["PYTHONPATH"]
        assert said["HPCTRAIN_BACKEND"] == "mpi"
    assert own.items() <= first.items()
    assert not own.keys() & second.keys()


def test_a_bridge_with_one_address_on_all_hosts_is_passed_over(
    changed: LocalHosts, hosts_hpctrain: Launch, tmp_path: Path
) -> None:
    """Open MPI would connect a rank to its own host by it, and die or wait for ever."""
    scripts(tmp_path)
    for host in ("h1", "h2"):
        bridge(changed, host, "docker0", "172.17.0.1/16")
    result = hosts_hpctrain("run", "together.py", "-H", "h1,h2", timeout=60)
    assert result.returncode == 0, result.stdout
    assert re.search("eth0: docker0 ", result.stdout)
    assert "together: h1 h2" in result.stdout
    (directory,) = (tmp_path / RUNS).iterdir()
    assert json.loads((directory / "plan.json").read_text())["environment"]["GLOO_SOCKET_IFNAME"] == "eth0"


def debian(hosts: LocalHosts, folder: Path) -> None:
    """Let h1 and h2 take their own names for 127.0.1.1, as Debian writes /etc/hosts."""
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(hosts.names, 1)}
    for host in ("h1", "h2"):
        known = {**addresses, host: "127.0.1.1"}
        (folder / host).write_text("127.0.0.1 localhost\n" + "".join(f"{known[name]} {name}\n" for name in known))
        mounted(hosts, host, folder / host, "/etc/hosts")


def require_no_loopback(said: str) -> None:
    """No rank, and nothing that started it, listens at the address by which a host knows itself alone."""
    told = re.findall(r"^h[12] listens at (.*)$", said, re.M)
    assert len(told) == 2, said
    assert not any("127.0.1.1" in line.split() for line in told), said


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_hosts_whose_own_name_is_an_address_of_the_loopback(
    changed: LocalHosts, hosts_hpctrain: Launch, tmp_path: Path, backend: str
) -> None:
    (tmp_path / "listening.py").write_text(LISTENING)
    debian(changed, tmp_path)
    result = hosts_hpctrain("run", "listening.py", "-H", "h1,h2", "--backend", backend, "--run-dir", "run", timeout=60)
    assert result.returncode == 0, result.stdout
    require_no_loopback("".join((tmp_path / f"run/logs/rank-{rank}.log").read_text() for rank in (0, 1)))


def test_torchruns_of_hosts_whose_own_name_is_an_address_of_the_loopback(changed: LocalHosts, tmp_path: Path) -> None:
    (tmp_path / "listening.py").write_text(LISTENING)
    debian(changed, tmp_path)
    words = [sys.executable, "-m", "hpctrain.worker.programs.torchrun", "--rdzv-backend=one-address", "--nnodes=2"]
    words += ["--nproc-per-node=1", "--rdzv-endpoint=h1:29713", "--rdzv-id=one"]

    def start(number: int) -> subprocess.CompletedProcess[str]:
        command = (*words, f"--rdzv-conf=rank={number}", "listening.py")
        return changed.run(f"h{number + 1}", *command, cwd=tmp_path, timeout=60, HPCTRAIN_BACKEND="gloo")

    with ThreadPoolExecutor() as pool:
        said = [result.stdout for result in pool.map(start, (0, 1))]
    require_no_loopback("".join(said))


_RUN = ["variables.py", "-H", "h1,h2"]


def _private_run_directory(hosts: LocalHosts, folder: Path) -> list[str]:
    return [*_RUN, "--run-dir", "/tmp/run"]


def _interpreter(hosts: LocalHosts, folder: Path, host: str, before: str = "") -> None:
    """A Python at a place that each host has for itself."""
    (folder / host).write_text(f'#!/bin/sh\n{before}exec {sys.executable} "$@"\n')
    hosts.run(host, "install", str(folder / host), "/tmp/python")


def _other_version(hosts: LocalHosts, folder: Path) -> list[str]:
    (folder / "other" / "hpctrain").mkdir(parents=True)
    (folder / "other" / "hpctrain" / "__init__.py").write_text('__version__ = "0.0.1"\n')
    _interpreter(hosts, folder, "h1")
    _interpreter(hosts, folder, "h2", f"export PYTHONPATH={folder / 'other'}\n")
    return [*_RUN, "--python", "/tmp/python"]


def _firewall(hosts: LocalHosts, folder: Path) -> list[str]:
    """What h2 sends to h1 is lost, but for the answers of its sshd."""
    for words in (
        "link add lost0 type veth peer name lost1",
        "link set lost0 up",
        "link set lost1 up",
        "neighbour add 10.77.0.1 lladdr 02:00:00:00:00:99 dev lost0",
        "route add 10.77.0.1 dev lost0 table 100",
        "rule add pref 10 ipproto tcp sport 22 lookup main",
        "rule add pref 20 to 10.77.0.1 lookup 100",
    ):
        hosts.run("h2", "ip", *words.split())
    return _RUN


def _no_answer(hosts: LocalHosts, folder: Path) -> list[str]:
    hosts.cut("h2")
    return _RUN


FAULTS = {
    _private_run_directory: ("h2 does not see /tmp, ", "--run-dir"),
    _other_version: (f"h2 has no hpctrain {hpctrain.__version__} in /tmp/python: it is 0.0.1", "one environment"),
    _firewall: ("h2 cannot connect to h1, as mpirun needs it", "open all ports between the hosts"),
    _no_answer: ("h2 does not answer ssh: port 22: ", "no firewall in between?"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_host_that_cannot_take_part_is_named(fault, changed: LocalHosts, hosts_hpctrain: Launch, tmp_path: Path):
    scripts(tmp_path)
    words = fault(changed, tmp_path)
    text, remedy = FAULTS[fault]
    begin = time.monotonic()
    result = hosts_hpctrain("run", *words)
    assert time.monotonic() - begin < LIMIT_SECONDS
    assert result.returncode == 1, result.stdout
    said = result.stdout.splitlines()
    (number,) = [number for number, line in enumerate(said) if codes(line) and f"]: {text}" in line]
    assert remedy in "".join(said[number + 1 :])
    assert not list(tmp_path.glob("said-*")), "a rank was started"
    # The name is free for the next try, and no probe is left.
    assert not list(tmp_path.glob("hpctrain-runs/*")) and not list(tmp_path.glob(".hpctrain*"))
    require_nothing_left(changed)


@pytest.mark.long
def test_a_recipe_trains_on_four_hosts(hosts: LocalHosts, hosts_hpctrain: Launch, tmp_path: Path) -> None:
    everywhere = ("-H", "h1,h2,h3,h4", "--run-dir", "run", "--env", "OMP_NUM_THREADS=1")
    settings = ("--set", "epochs=6", "--set", "communication.bucket_mb=null")
    result = hosts_hpctrain("run", "digits", *everywhere, *settings, timeout=240)
    assert result.returncode == 0, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    # The floor that the recipe reports for 20 epochs.
    assert summary["metrics"]["test_accuracy"] >= 0.975
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "run" / "ranks").iterdir())]
    assert [record["host"] for record in records] == list(hosts.names)
    (trained,) = [each for each in read_events(tmp_path / "run" / "events.jsonl") if each.event == "run"]
    # Smaller ones than the 25 MB of a single host: they leave earlier.
    assert trained.bucket_mb == 4
    status = json.loads(hosts_hpctrain("status", "run", "--json").stdout)
    assert status["hosts"] == list(hosts.names)
