"""A GPT divided over meshes has the losses of a plain PyTorch loop in one process, also where its mesh changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.checkpoints.find import verify
from hpctrain.common.run.events import kept, read_events
from support.imported_programs import imported

pytest.importorskip("torch")

FOLDER = Path(__file__).parent / "programs"
PROGRAM = FOLDER / "gpt_on_meshes.py"
ALL, HALF, LATER = 12, 5, 8
MESHES = {
    2: ["dp_shard=2", "tp=2", "pp=2"],
    4: ["dp_replicate=2,dp_shard=2", "tp=2,dp_shard=2", "pp=2,dp_shard=2", "tp=2,pp=2", "dp_replicate=4"],
}
# Of 14 windows two ranks have 7 and four have 4, 4, 3 and 3.
CHANGES = {
    2: {
        "zero1": ("dp_shard=2", ["sharding.zero=1"]),
        "zero2": ("dp_shard=2", ["sharding.zero=2", "sharding.recompute=true"]),
        "parts": ("dp_shard=2", ["batch.micro_batch=2"]),
        "interleaved": (
            "pp=2",
            ["model.layers=4", "pipeline.schedule=interleaved_1f1b", "pipeline.micro_batches=4"],
        ),
        "bf16": ("tp=2", ["precision=bf16"]),
    },
    4: {"fp16": ("pp=2,dp_shard=2", ["precision=fp16"])},
}


@pytest.fixture(scope="module")
def plain():
    """What one process does, by the parts of a recipe that a case changes."""
    return imported(FOLDER / "gpt.py")


def _losses(tmp_path: Path, name: str) -> list[float]:
    return [each.loss for each in kept(read_events(tmp_path / f"out-{name}.jsonl")) if each.event == "step"]


def _test_loss(tmp_path: Path, name: str) -> float:
    return [each.test_loss for each in kept(read_events(tmp_path / f"out-{name}.jsonl")) if each.event == "epoch"][-1]


def _same_where_held_twice(tmp_path: Path, name: str, ranks: int) -> int:
    """How many pieces several ranks have, which are bitwise equal."""
    held: dict[str, bytes] = {}
    count = 0
    for rank in range(ranks):
        with np.load(tmp_path / f"out-{name}-{rank}.npz") as pieces:
            for key, value in pieces.items():
                piece = f"{key} {value.shape}"
                count += piece in held
                assert held.setdefault(piece, value.tobytes()) == value.tobytes(), f"{name}: {piece}"
    return count


@pytest.mark.parametrize(
    ("ranks", "backend", "changed"),
    [
        pytest.param(2, "mpi", {}, id="2-mpi-some"),
        *(
            pytest.param(ranks, backend, changed, id=f"{ranks}-{backend}", marks=pytest.mark.thorough)
            for ranks, changed in CHANGES.items()
            for backend in ("gloo", "mpi")
        ),
    ],
)
@pytest.mark.long
def test_every_mesh_has_the_losses_of_one_process(plain, mpirun, tmp_path, ranks, backend, changed):
    meshes = MESHES[ranks]
    cases = [f"{number}:{mesh}:{ALL}" for number, mesh in enumerate(meshes)]
    cases += [":".join((name, mesh, *changes, str(ALL))) for name, (mesh, changes) in changed.items()]
    mpirun(PROGRAM, ranks, str(tmp_path / "out"), *cases, HPCTRAIN_BACKEND=backend)
    _, losses, test_loss = plain.reference("uneven")
    for number, mesh in enumerate(meshes):
        np.testing.assert_allclose(_losses(tmp_path, str(number)), losses, rtol=0, atol=1e-5, err_msg=mesh)
        assert _test_loss(tmp_path, str(number)) == pytest.approx(test_loss, abs=1e-5)
        _same_where_held_twice(tmp_path, str(number), ranks)
    for name, (_, changes) in changed.items():
        network = [change for change in changes if change.startswith("model.")]
        wanted = plain.reference("uneven", *network)[1] if network else losses
        bound = {"bf16": 0.02, "fp16": 0.005}.get(name, 1e-5)
        np.testing.assert_allclose(_losses(tmp_path, name), wanted, rtol=0, atol=bound, err_msg=name)


@pytest.mark.long
def test_replicas_equal_a_plain_loop_and_resume_with_the_same_bits(plain, mpirun, tmp_path):
    mesh = "dp_replicate=2"
    cases = [f"{case}:{mesh}:{ALL}" for case in plain.CASES]
    cases += [f"micro-resumed:{mesh}:{steps}" for steps in (LATER, ALL)]
    mpirun(PROGRAM, 2, str(tmp_path / "out"), *cases)
    for case in plain.CASES:
        _, losses, test_loss = plain.reference(case)
        # bf16 keeps 8 bits of what is between the layers.
        bound = 0.02 if case == "bf16" else 1e-5
        found = _losses(tmp_path, case)
        np.testing.assert_allclose(found, losses, rtol=0, atol=bound, err_msg=case)
        assert found[-1] < found[0] - 0.1
        assert _same_where_held_twice(tmp_path, case, 2) > 0
        last = [event for event in read_events(tmp_path / f"out-{case}.jsonl") if event.event == "epoch"][-1]
        assert last.test_loss == pytest.approx(test_loss, abs=bound) and 0 < last.test_accuracy < 1
        # Of a processor nobody states a peak.
        assert last.tokens_per_s == pytest.approx(last.samples_per_s * 24) and last.flops_utilisation is None
    with np.load(tmp_path / "out-micro-0.npz") as whole, np.load(tmp_path / "out-micro-resumed-0.npz") as again:
        for name in whole.files:
            np.testing.assert_array_equal(again[name], whole[name], err_msg=f"resumed: {name}")


@pytest.mark.long
def test_a_run_goes_on_under_other_meshes_and_on_other_ranks(plain, mpirun, tmp_path):
    """4 = tp 2 x dp_shard 2, then 3 = dp_shard 3, then pp 2 x dp_replicate 2, then one."""
    out = str(tmp_path / "out")
    mpirun(PROGRAM, 4, out, f"run:tp=2,dp_shard=2:{HALF}", HPCTRAIN_BACKEND="gloo")
    mpirun(PROGRAM, 3, out, f"run:dp_shard=3:{HALF + 2}", HPCTRAIN_BACKEND="mpi")
    mpirun(PROGRAM, 4, out, f"run:pp=2,dp_replicate=2:{LATER + 1}", HPCTRAIN_BACKEND="mpi")
    mpirun(PROGRAM, 1, out, f"run:dp_replicate=1:{ALL}", HPCTRAIN_BACKEND="single")
    parameters, losses, test_loss = plain.reference("uneven")
    np.testing.assert_allclose(_losses(tmp_path, "run"), losses, rtol=0, atol=1e-5)
    assert _test_loss(tmp_path, "run") == pytest.approx(test_loss, abs=1e-5)
    with np.load(tmp_path / "out-run-0.npz") as found:
        assert len(found.files) == len(parameters)
    checkpoints = sorted((tmp_path / "out-run").glob("step-*"))
    assert [verify(checkpoint) for checkpoint in checkpoints] == [[]] * len(checkpoints)
    # Where elements are on two ranks, each of four writes about a quarter.
    sizes = [file.stat().st_size for file in checkpoints[0].glob("*.safetensors")]
    assert len(sizes) == 4 and max(sizes) < 1.5 * min(sizes)
