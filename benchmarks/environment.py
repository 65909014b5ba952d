"""From the start of a job to its first step, by the number of hosts, with the environment on a file server and packed:
``python benchmarks/environment.py --hosts 2 4 8 16``.

Each host has a name, network, mounts and a disk folder of its own (Linux namespaces), and a slurmd of a real Slurm. One
more is the file server: its folder is mounted on all others with sshfs, over its own link of 0.2 Gbit/s (``--server``);
those of the hosts have 1 Gbit/s (``--rate``). Nothing is in any host's caches before. A job is a step of PyTorch on one
rank a host over the engine ``mpi``, submitted three times for each number of hosts:

    shared    Python, PyTorch and hpctrain are imported from the file server
    packed    ``--pack``: the archive is read from the file server once, sent with sbcast, and unpacked on each host
    again     the same, where the hosts have the environment

All hosts share this machine's cores and its disk, so that what each of them does for itself (unpack, import) takes the
longer the more there are; on real hosts that is side by side. The third job shows what imports take of it. Making the
archive, once for all of them, is not in these times. Needs root, a local Slurm, and sshfs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Where the hosts and their Slurm are made.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.environments import linked_environment
from support.hosts.local_hosts import LocalHosts, Settings, obstacle
from support.hosts.slurm_on_hosts import SlurmOnHosts
from support.launching import AS_ROOT
from support.slurm import local_slurm

_STEP = """\
import pathlib, time
import torch
import hpctrain as ht

comm = ht.init()
model = torch.nn.Linear(64, 10)
model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
torch.nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.zeros(8, dtype=torch.long)).backward()
optimizer.step()
if comm.rank == 0:
    pathlib.Path("first-step").write_text(str(time.time()))
"""
# Close-to-open, as NFS has it: what is cached is good while the file's time stays the same.
_MOUNT = "auto_cache,dcache_timeout=600,no_contain_symlinks,sftp_server=/usr/lib/openssh/sftp-server"
_LIMIT_SECONDS = 1200.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """Seconds of one job from its start, and the bytes that the file server sent meanwhile."""

    first_step: float
    served: int
    sent: float | None = None
    unpacked: float | None = None


def make_served(folder: Path) -> Path:
    """The file server's folder, with the environment unpacked and as an archive; returns the Python that packs it."""
    served = folder / "served"
    python = linked_environment(folder / "environment", "hpctrain[torch,mpi]")
    variables = {**os.environ, "PYTHONPATH": "", "XDG_CACHE_HOME": str(served / "cache")}
    code = "from hpctrain.control.packing.pack import find_pack; find_pack().write(print)"
    subprocess.run([str(python), "-c", code], env=variables, check=True, stdout=sys.stderr)
    (archive,) = served.glob("cache/hpctrain/environments/*.tar.gz")
    (served / "environment").mkdir()
    with tarfile.open(archive) as tar:
        tar.extractall(served / "environment", filter="data")
    with (served / "environment" / "pyvenv.cfg").open("a") as file:
        file.write(f"home = {folder}/net/environment/base/bin\n")
    profile = "name: {0}\nsource: the benchmark\nnode_storage: {1}\nsetup: {2}\n"
    # Where each host mounts what is its own.
    for own in ("net", "disk"):
        (folder / own).mkdir()
    setup = f'["export PATH={folder}/net/environment/bin:$PATH"]'
    (folder / "shared.yaml").write_text(profile.format("shared", folder / "disk", setup))
    (folder / "packed.yaml").write_text(profile.format("packed", folder / "disk", "[]"))
    (folder / "step.py").write_text(_STEP)
    return python


@contextmanager
def mounted(hosts: LocalHosts, folder: Path) -> Iterator[None]:
    """The last host's folder on all others, each with an empty cache and a disk folder."""
    *clients, server = hosts.names
    for host in clients:
        disk = folder / f"disk-{host}"
        disk.mkdir()
        hosts.run(host, "mount", "--bind", str(disk), str(folder / "disk"))
        hosts.run(host, "sshfs", "-o", _MOUNT, f"{server}:{folder}/served", str(folder / "net"))
    try:
        yield
    finally:
        for host in clients:
            shutil.rmtree(folder / f"disk-{host}")


def served_bytes(hosts: LocalHosts) -> int:
    """What the file server has sent."""
    return int(hosts.run(hosts.names[-1], "cat", "/sys/class/net/eth0/statistics/tx_bytes").stdout)


def start(slurm: SlurmOnHosts, hosts: LocalHosts, folder: Path, way: str, python: Sequence[str]) -> Start:
    """Submit a job and wait for its end."""
    clients = hosts.names[:-1]
    size = ("--nodes", str(len(clients)), "--sbatch", f"exclude={hosts.names[-1]}", "--time", "30")
    options = ("--backend", "mpi", "--launcher", "mpirun", "--run-dir", f"run-{way}", *size)
    pack = () if way == "shared" else ("--pack",)
    profile = folder / ("packed.yaml" if pack else "shared.yaml")
    variables = {**slurm.environment, "PYTHONPATH": "", "XDG_CACHE_HOME": str(folder / "net" / "cache")}
    command = (*python, "-m", "hpctrain", "submit", str(folder / "step.py"), "--cluster", str(profile), *options, *pack)
    before = served_bytes(hosts)
    where = folder / f"{way}-{len(clients)}"
    where.mkdir()
    said = hosts.run("h1", *command, cwd=where, timeout=_LIMIT_SECONDS, **variables).stdout
    job = said.partition("job ")[2].partition(";")[0]
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", timeout=_LIMIT_SECONDS)
    log = "".join(path.read_text() for path in where.glob("run-*/logs/job-*.log"))
    if ended["JobState"] != "COMPLETED":
        sys.exit(log)
    begun = time.mktime(time.strptime(ended["StartTime"], "%Y-%m-%dT%H:%M:%S"))
    took = re.search(r"sent to each node in (\d+) s, and unpacked in (\d+) s", log)
    return Start(
        first_step=float((where / "first-step").read_text()) - begun,
        served=served_bytes(hosts) - before,
        sent=float(took[1]) if took else None,
        unpacked=float(took[2]) if took else None,
    )


def measure(number: int, folder: Path, python: Path, options: argparse.Namespace) -> dict[str, Start]:
    """The three starts on so many hosts."""
    place = folder.parent / f"hpctrain-hosts-{secrets.token_hex(4)}"
    settings = Settings(hosts=number + 1, rate=options.rate)
    shared = [folder, Path(sys.prefix).resolve(), Path(__file__).parents[1]]
    with LocalHosts(place, settings, shared=shared, variables=AS_ROOT) as hosts:
        hosts.rate(hosts.names[-1], options.server)
        with mounted(hosts, folder), SlurmOnHosts(hosts, folder / f"s{number}") as slurm:
            remote = (str(folder / "net" / "environment" / "bin" / "python"),)
            return {
                "shared": start(slurm, hosts, folder, "shared", remote),
                "packed": start(slurm, hosts, folder, "packed", (str(python),)),
                "again": start(slurm, hosts, folder, "again", (str(python),)),
            }


def table(results: Mapping[int, Mapping[str, Start]], title: str) -> Table:
    """A column for each number of hosts."""
    found = Table("", *(f"{number} hosts" for number in results), title=title)
    for way, name in (("shared", "shared"), ("packed", "packed"), ("again", "packed, there already")):
        found.add_row(f"{name}: s to the first step", *(f"{each[way].first_step:.0f}" for each in results.values()))
        found.add_row("  GB from the file server", *(f"{each[way].served / 1e9:.2f}" for each in results.values()))
        if way == "packed":
            found.add_row("  s to send", *(f"{each[way].sent:.0f}" for each in results.values()))
            found.add_row("  s to unpack", *(f"{each[way].unpacked:.0f}" for each in results.values()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rate", default="1gbit", help="of each host's link, in tc's words")
    parser.add_argument("--server", default="200mbit", help="of the file server's link")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := obstacle() or local_slurm.obstacle():
        parser.error(reason)
    if shutil.which("sshfs") is None:
        parser.error("apt-get install sshfs")
    results: dict[int, dict[str, Start]] = {}
    with tempfile.TemporaryDirectory(prefix="hpctrain-environment-") as name:
        folder = Path(name)
        python = make_served(folder)
        for number in options.hosts:
            results[number] = measure(number, folder, python, options)
            print(f"{number} hosts: {results[number]}", file=sys.stderr)
            if options.json:
                known = {
                    str(each): {way: vars(start) for way, start in found.items()} for each, found in results.items()
                }
                options.json.write_text(json.dumps({"rate": options.rate, "server": options.server, "starts": known}))
    results = dict(sorted(results.items()))
    Console(width=100).print(table(results, f"links of {options.rate}, the file server's {options.server}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
