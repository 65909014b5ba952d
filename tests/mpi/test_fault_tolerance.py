"""Ranks that are killed in the middle of a training: the others go on, and nothing is lost or done twice."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hpctrain.common.checkpoints.find import Newest, newest_whole
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, EventWriter, read_events
from hpctrain.common.run.records import read_records
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import InMemory
from hpctrain.worker.data.sampling import epoch_order, share
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.loop import Loop
from support.imported_programs import imported
from support.launching import Launch
from support.refusals import codes

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "fault_tolerance.py"
ULFM = ("--with-ft", "ulfm")
STEPS = 4  # of an epoch: 61 samples in batches of 20


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return imported(PROGRAM)


@pytest.fixture(scope="module")
def folder(mpirun: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings one after the other, of 7 ranks at the begin and 1 at the end."""
    folder = tmp_path_factory.mktemp("recovered")
    limits = {"HPCTRAIN_TIMEOUT": "60"}
    result = mpirun(PROGRAM, 7, str(folder), "torch", "keep", "few", options=ULFM, check=False, **limits)
    assert "few stopped" in result.stdout, result.stdout
    return folder


def whole_run(program: ModuleType, framework: str, tmp_path: Path) -> tuple[np.ndarray, list[Event]]:
    """The same without any death, in one process: parameters and events."""
    comm, settings = SingleCommunicator("test"), program.recipe("keep")
    trainer = program.new_trainer(framework, settings, comm)
    train, test = (InMemory(samples=each) for each in program.data())
    with EventWriter(tmp_path / "events.jsonl") as events:
        checkpoints = Checkpoints(tmp_path, comm, events)
        Loop(settings, comm, trainer, train, test, events, checkpoints=checkpoints).run()
    return program.parameters(trainer), list(read_events(tmp_path / "events.jsonl"))


def ends(run: Path) -> dict[int, np.ndarray]:
    return {int(path.stem.partition("-")[2]): np.load(path)["parameters"] for path in run.glob("end-*.npz")}


def of_kind(run: Path, kind: str) -> list[Any]:
    return [event for event in read_events(run / "events.jsonl") if event.event == kind]


def trained(run: Path) -> dict[int, list[int]]:
    """The samples of each step: what the ranks that made it trained on, those that died later included."""
    lines: list[dict[str, Any]] = []
    for path in run.glob("trained-*.jsonl"):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    return {
        step: sorted(sample for line in lines if line["step"] == step for sample in line["samples"])
        for step in sorted({line["step"] for line in lines})
    }


@pytest.mark.long
def test_a_run_of_which_four_ranks_died_is_the_uninterrupted_one(
    program: ModuleType, folder: Path, tmp_path: Path
) -> None:
    """A death before the reduction, one of rank 0 after it that another rank learns of late, one in the recovery
    from that, and one in an evaluation."""
    run = folder / "keep"
    found = ends(run)
    assert sorted(found) == [1, 3, 6]
    for parameters in found.values():
        np.testing.assert_array_equal(parameters, found[1])
    expected, events = whole_run(program, "torch", tmp_path)
    np.testing.assert_allclose(found[1], expected, rtol=0, atol=2e-5)
    steps = of_kind(run, "step")
    assert [step.iteration for step in steps] == list(range(1, 3 * STEPS + 1))
    wanted = [event for event in events if event.event == "step"]
    for step, other in zip(steps, wanted, strict=True):
        assert (step.epoch, step.learning_rate, step.samples) == (other.epoch, other.learning_rate, other.samples)
        # The loss of step 6 is of a part of its samples.
        assert step.loss == pytest.approx(other.loss, abs=1e-4) or step.iteration == 6
    last, other = of_kind(run, "epoch")[-1], [event for event in events if event.event == "epoch"][-1]
    assert (last.epoch, last.test_accuracy) == (other.epoch, other.test_accuracy)
    kinds = [event.event for event in read_events(run / "events.jsonl")]
    assert [kinds.count(kind) for kind in ("run", "checkpoint", "epoch", "end")] == [1, 3, 3, 1]


def test_deaths_are_recorded(folder: Path) -> None:
    run = folder / "keep"
    faults = of_kind(run, "fault")
    assert [[getattr(fault, key) for key in ("rank", "iteration", "ranks")] for fault in faults] == [
        [4, 3, 6],
        [0, 6, 4],
        [2, 6, 4],
        [5, 9, 3],
    ]
    # Of the step that rank 0 died after, on 6 ranks, the 2 that died and the late one could not tell their losses.
    counts = [share(np.arange(20), rank, 6).count for rank in range(6)]
    first_ranks = [0, 1, 2, 3, 5, 6]
    lost = sum(counts[first_ranks.index(rank)] for rank in (0, 2, 3))
    assert [fault.samples_affected for fault in faults] == [0, lost, 0, 0]
    assert all(0 < fault.recovery_seconds < 30 for fault in faults)
    statuses = {rank: record.status for rank, record in read_records(RunDirectory(run)).items()}
    assert {rank for rank, status in statuses.items() if status == "lost"} == {0, 2, 4, 5}


def test_every_sample_is_seen_once_an_epoch(folder: Path) -> None:
    sizes = [step.samples for step in of_kind(folder / "keep", "step")]
    epochs = [step.epoch for step in of_kind(folder / "keep", "step")]
    batches = trained(folder / "keep")
    assert sorted(batches) == list(range(1, len(sizes) + 1))
    for epoch in (1, 2, 3):
        order = epoch_order(61, seed=3, epoch=epoch - 1)
        begin = 0
        for step in (number for number in batches if epochs[number - 1] == epoch):
            assert batches[step] == sorted(order[begin : begin + sizes[step - 1]].tolist())
            begin += sizes[step - 1]
        assert begin == 61


def test_too_few_ranks_save_their_state_and_stop(folder: Path) -> None:
    run = folder / "few"
    *_, last = read_events(run / "events.jsonl")
    assert (last.event, last.iteration) == ("stopped", 6)
    assert "min_ranks=2" in last.reason
    assert newest_whole(run / "checkpoints") == Newest(iteration=6)


def test_without_fault_tolerance_of_mpi_it_is_refused(mpirun: Launch, tmp_path: Path) -> None:
    result = mpirun(PROGRAM, 2, str(tmp_path), "torch", "keep", check=False, timeout=200)
    assert result.returncode != 0
    assert "HT-shrink-not-possible" in codes(result.stdout) and "--with-ft ulfm" in result.stdout


@pytest.mark.thorough
def test_keras(program: ModuleType, mpirun: Launch, tmp_path: Path) -> None:
    pytest.importorskip("keras")
    result = mpirun(PROGRAM, 3, str(tmp_path), "keras", "keras", options=ULFM, check=False, HPCTRAIN_TIMEOUT="100")
    assert result.stdout.count("keras done") == 2, result.stdout
    run = tmp_path / "keras"
    found = ends(run)
    np.testing.assert_array_equal(found[1], found[2])
    expected, _ = whole_run(program, "keras", tmp_path)
    np.testing.assert_allclose(found[1], expected, rtol=0, atol=5e-5)
    assert [step.iteration for step in of_kind(run, "step")] == list(range(1, 3 * STEPS + 1))
    assert trained(run)[3] == sorted(epoch_order(61, seed=3, epoch=0)[40:60].tolist())
