"""Jobs of a Slurm whose nodes are hosts of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RUNS
from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import EndEvent, EpochEvent, RunEvent
from support.comers import cells
from support.environments import linked_environment
from support.hosts.local_hosts import LocalHosts
from support.hosts.slurm_on_hosts import SlurmOnHosts
from support.pages import scripts
from support.slurm import local_slurm


@pytest.fixture(scope="module")
def slurm(started_hosts: LocalHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmOnHosts]:
    if reason := local_slurm.obstacle():
        pytest.skip(reason)
    with SlurmOnHosts(started_hosts, tmp_path_factory.getbasetemp() / "slurm") as cluster:
        yield cluster


def test_each_node_is_a_host_of_its_own(slurm: SlurmOnHosts):
    everywhere = ("srun", "--nodes=4")
    assert sorted(slurm.run(*everywhere, "hostname").split()) == sorted(slurm.settings.nodes)
    addresses = slurm.run(*everywhere, "ip", "-4", "-o", "address")
    assert all(addresses.count(f" {address}/24 ") == 1 for address in slurm.settings.addresses)
    for folder in ("/dev/shm", "/tmp"):
        slurm.run("srun", "--nodes=1", "--nodelist=h2", "touch", f"{folder}/of-h2")
        assert slurm.run(*everywhere, "ls", folder).split().count("of-h2") == 1


@pytest.mark.long
def test_a_job_trains_over_all_nodes(slurm: SlurmOnHosts, tmp_path: Path):
    pytest.importorskip("torch")
    size = ("--nodes=4", "--ntasks-per-node=1", f"--cpus-per-task={slurm.settings.cpus}", "--wait")
    command = "hpctrain run digits --backend mpi --set epochs=2 --run-dir run"
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
        status, output = cells.in_slurm(slurm)([cells.HPCTRAIN, *words], tmp_path, {})
        assert status == 0, output
        logs = [path.read_text() for path in (tmp_path / RUNS).rglob("rank-0.log")]
        assert sorted(text.splitlines()[-1] for text in logs) == [f"trained with {10.0**-task:g}" for task in (2, 1, 0)]
    else:
        cells.execute(words, cells.in_slurm(slurm), tmp_path)


# It says where it runs from. The first time it then waits, to be told to start again.
WHERE = """\
import json, pathlib, sys, time
import torch
import hpctrain as ht

comm = ht.init()
paths = comm.allgather_object([sys.prefix, sys.base_prefix, torch.__file__, ht.__file__])
if comm.rank == 0:
    print("where", json.dumps(paths))
    again = pathlib.Path("again")
    if not again.exists():
        again.touch()
        time.sleep(100)
"""
PROFILE = "name: mine\nsource: the tests\nnode_storage: /tmp\nrequeue: true\n"


@pytest.mark.thorough
def test_jobs_start_from_a_packed_environment(slurm: SlurmOnHosts, hosts: LocalHosts, tmp_path: Path):
    """A recipe that trains, then a script that is requeued; the nodes have the environment after the first of them."""
    pytest.importorskip("torch")
    python = linked_environment(tmp_path / "environment", "hpctrain[torch,mpi]")
    (tmp_path / "mine.yaml").write_text(PROFILE)
    (tmp_path / "where.py").write_text(WHERE)
    # Nothing is found in the checkout by its path.
    variables = {**slurm.environment, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": ""}

    def submit(work: str, run: str, *options: str) -> str:
        size = ("--cluster", "mine.yaml", "--nodes", "2", "--time", "10", "--backend", "mpi", "--run-dir", run)
        command = (str(python), "-m", "hpctrain", "submit", work, *size, "--pack", *options)
        return hosts.run("h1", *command, cwd=tmp_path, timeout=240, check=False, **variables).stdout

    def log(run: str) -> str:
        return "".join(path.read_text() for path in (tmp_path / run / "logs").glob("*.log"))

    said = submit("digits", "first", "--set", "epochs=1", "--wait")
    summary = tmp_path / "first" / "summary.json"
    assert summary.exists(), said + log("first")
    assert json.loads(summary.read_text())["status"] == "done"
    assert "the environment was sent to each node" in log("first")
    (archive,) = (tmp_path / "cache" / "hpctrain" / "environments").glob("*.tar.gz")
    said = submit("where.py", "second")
    assert "packing" not in said
    # stderr is with it: "job N; …".
    job = said.partition("job ")[2].partition(";")[0]
    deadline = time.monotonic() + 60
    while not (tmp_path / "again").exists():
        assert time.monotonic() < deadline, said + log("second")
        time.sleep(0.1)
    slurm.run("scontrol", "requeue", job)
    assert slurm.wait_for(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", log("second")
    assert log("second").count("each node has the environment already") == 2
    place = f"/tmp/hpctrain-environments-0/{archive.name.removesuffix('.tar.gz')}"
    found = [json.loads(line.partition("where ")[2]) for line in log("second").splitlines() if "where [" in line]
    assert len(found) >= 2
    assert {path.startswith(place) for each in found for rank in each for path in rank} == {True}, found
    # Nobody gets in the way of what comes next.
    slurm.run("srun", "--nodes=4", "rm", "-r", "-f", "/tmp/hpctrain-environments-0")
