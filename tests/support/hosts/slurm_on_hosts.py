"""A Slurm whose nodes are hosts of their own: each with its name, network, processes, /tmp and /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path

from support.hosts.local_hosts import LocalHosts
from support.slurm.local_slurm import LocalSlurm, SlurmError
from support.slurm.slurm_conf import Settings


class SlurmOnHosts(LocalSlurm):
    """slurmctld runs on the first host, where commands are entered, and a slurmd on each.

    Args:
        hosts: started.
        folder: made for it and removed with it, where all hosts see it. Its path must be short: sockets are in it.
    """

    def __init__(self, hosts: LocalHosts, folder: Path) -> None:
        names = hosts.names
        leaves = [f"SwitchName=s{leaf + 1} Nodes={','.join(names[leaf::2])}\n" for leaf in range(2)]
        topology = "".join([*leaves, "SwitchName=core Switches=s1,s2\n"])
        cpus = len(os.sched_getaffinity(0))
        super().__init__(Settings(nodes=names, addresses=hosts.addresses, cpus=cpus, gpus=0, topology=topology), folder)
        self._hosts = hosts

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, check: bool = True, timeout: float = 60, **variables: str) -> str:
        host = self.settings.nodes[0]
        done = self._hosts.run(host, *command, check=False, timeout=timeout, **self.environment, **variables)
        if check and done.returncode != 0:
            raise SlurmError(f"{' '.join(command)} exited {done.returncode}: {done.stdout}")
        return done.stdout

    def _start(self, name: str, *command: str, **variables: str) -> None:
        if name == "munged":
            # Its socket is a file, which all hosts see.
            super()._start(name, *command, **variables)
            return
        host = self.settings.nodes[0] if name == "slurmctld" else name.removeprefix("slurmd-")
        inside = self._hosts.command(host, *command, cwd=self.folder, **self.environment, **variables)
        super()._start(name, *inside)
