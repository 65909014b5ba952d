"""Jobs of a Slurm whose nodes are hosts of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RUNS
from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import EndEvent, EpochEvent, RunEvent
from support.comers import cells
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
        # The page's loop has a variable there.
        status, output = cells.in_slurm(slurm)([cells.HPCTRAIN, *words[:-2], "--wait", "--", "2"], tmp_path, {})
        assert status == 0, output
        (log,) = (tmp_path / RUNS).rglob("rank-0.log")
        assert log.read_text().splitlines()[-1] == "trained with 0.01"
    else:
        cells.execute(words, cells.in_slurm(slurm), tmp_path)
