"""Jobs of a Slurm whose nodes are hosts of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RUNS
from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import EndEvent, EpochEvent, RunEvent
from support.comers import cells
from support.hosts.local_hosts import LocalHosts
from support.pages import scripts
from support.slurm import local_slurm
from support.slurm.local_slurm import LocalSlurm, SlurmError
from support.slurm.slurm_conf import Settings


class SlurmOnHosts(LocalSlurm):
    """slurmctld runs on the first host, where commands are entered, and a slurmd on each host, which is a node.

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


@pytest.fixture(scope="module")
def slurm(started_hosts: LocalHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmOnHosts]:
    if reason := local_slurm.obstacle():
        pytest.skip(reason)
    with SlurmOnHosts(started_hosts, tmp_path_factory.getbasetemp() / "slurm") as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.parametrize(
    "start",
    ["--backend mpi", pytest.param("--backend gloo --launcher srun-none", marks=pytest.mark.thorough)],
    ids=["mpi", "srun-none"],
)
def test_a_job_trains_over_all_nodes(slurm: SlurmOnHosts, tmp_path: Path, start: str):
    pytest.importorskip("torch")
    size = ("--nodes=4", "--ntasks-per-node=1", f"--cpus-per-task={slurm.settings.cpus}", "--wait")
    command = f"hpctrain run digits {start} --set epochs=2 --run-dir run"
    printed = tmp_path / "printed"
    slurm.run(
        "sbatch", *size, f"--chdir={tmp_path}", f"--output={printed}", "--wrap", command, timeout=240, check=False
    )
    path = tmp_path / "run" / "events.jsonl"
    assert path.exists(), printed.read_text()
    events = list(read_events(path))
    assert [event.hosts for event in events if isinstance(event, RunEvent)] == [slurm.settings.nodes]
    assert [event.status for event in events if isinstance(event, EndEvent)] == ["done"], printed.read_text()
    assert [event.test_accuracy for event in events if isinstance(event, EpochEvent)][-1] > 0.9


@pytest.mark.long
@pytest.mark.parametrize("words", cells.printed("submit"), ids=lambda words: words[1])
def test_what_comers_submit_has_the_losses_of_one_process(slurm: SlurmOnHosts, tmp_path: Path, words: list[str]):
    cells.require(words[1])
    if words[1] == "sweep.py":
        (tmp_path / "sweep.py").write_text(scripts()["sweep.py"])
        # The page's loop has a variable there.
        status, output = cells.in_slurm(slurm)([cells.HPCTRAIN, *words[:-2], "--wait", "--", "2"], tmp_path, {})
        assert status == 0, output
        (log,) = (tmp_path / RUNS).rglob("rank-0.log")
        assert log.read_text().splitlines()[-1] == "trained with 0.01"
    else:
        cells.execute(words, cells.in_slurm(slurm), tmp_path)
