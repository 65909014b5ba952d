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
        "zbv": ("pp=2", ["model.layers=4", "pipeline.schedule=zbv", "pipeline.micro_batches=4"]),
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


def _bytes(tmp_path: Path, name: str) -> list[int | None]:
    events = kept(read_events(tmp_path / f"out-{name}.jsonl"))
    return [each.communication_bytes for each in events if each.event == "step"]


def _same_where_held_twice(tmp_path: Path, name: str, ranks: int) -> int:
    """How many pieces several ranks have, which are bitwise equal."""
    held: dict[str, bytes] = {}
    count = 0
    for rank in range(ranks):
        with np.load(tmp_path / f"out-{name}-{rank}.npz") as pieces:
            for key, value in pieces.items():
                count += key in held
                assert held.setdefault(f"{key} {value.shape}", value.tobytes()) == value.tobytes(), f"{name}: {key}"
    return count


# Each axis of a mesh once; another two axes together are the changed case's.
SOME = ["tp=2,dp_shard=2", "dp_replicate=4"]


@pytest.mark.parametrize(
    ("ranks", "backend", "meshes"),
    [
        pytest.param(4, "mpi", SOME, id="4-mpi-some"),
        *(
            pytest.param(ranks, backend, MESHES[ranks], id=f"{ranks}-{backend}", marks=pytest.mark.thorough)
            for ranks in (2, 4)
            for backend in ("gloo", "mpi")
        ),
    ],
)
@pytest.mark.long
def test_every_mesh_has_the_losses_of_one_process(plain, mpirun, tmp_path, ranks, backend, meshes):
    cases = [f"{number}:{mesh}:{ALL}" for number, mesh in enumerate(meshes)]
    changed = CHANGES[ranks]
    cases += [":".join((name, mesh, *changes, str(ALL))) for name, (mesh, changes) in changed.items()]
    mpirun(PROGRAM, ranks, str(tmp_path / "out"), *cases, HPCTRAIN_BACKEND=backend)
    _, losses, test_loss = plain.reference("uneven")
    for number, mesh in enumerate(meshes):
        np.testing.assert_allclose(_losses(tmp_path, str(number)), losses, rtol=0, atol=1e-5, err_msg=mesh)
        assert _test_loss(tmp_path, str(number)) == pytest.approx(test_loss, abs=1e-5)
        _same_where_held_twice(tmp_path, str(number), ranks)
        # What PyTorch moves between divided parts is counted by nobody, and is not the size of the whole gradients.
        assert {each is None for each in _bytes(tmp_path, str(number))} == {mesh != "dp_replicate=4"}
    for name in changed:
        if name == "zbv":
            continue
        bound = {"bf16": 0.02, "fp16": 0.005}.get(name, 1e-5)
        np.testing.assert_allclose(_losses(tmp_path, name), losses, rtol=0, atol=bound, err_msg=name)


@pytest.mark.thorough
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
    for checkpoint in (tmp_path / "out-run").glob("step-*"):
        assert verify(checkpoint) == []


@pytest.mark.thorough
def test_compiled_meshes_have_the_losses_of_one_process_and_each_others_checkpoints(plain, mpirun, tmp_path):
    shards, stages = (f"{mesh}=2:compile=on:sharding.recompute=true" for mesh in ("dp_shard", "pp"))
    # Of what is compiled once more, only the losses of other steps would be new.
    whole = f"replicas:dp_replicate=2:compile=on:{ALL}"
    parts = [f"run:{shards}:{HALF}", f"run:dp_replicate=2:compile=off:{LATER}", f"run:{stages}:{ALL}"]
    # Both ranks find what an earlier test has compiled, if it has.
    folder = tmp_path.parent / "compiled"
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "HPCTRAIN_BACKEND": "gloo"}
    mpirun(PROGRAM, 2, str(tmp_path / "out"), whole, *parts, timeout=900, **variables)
    _, losses, test_loss = plain.reference("uneven")
    for name in ("replicas", "run"):
        np.testing.assert_allclose(_losses(tmp_path, name), losses, rtol=0, atol=1e-5, err_msg=name)
        assert _test_loss(tmp_path, name) == pytest.approx(test_loss, abs=1e-5)
        _same_where_held_twice(tmp_path, name, 2)
    assert any(folder.rglob("*.so"))


@pytest.mark.long
def test_a_norm_that_overflows_over_all_ranks_is_not_clipped_by(mpirun):
    done = mpirun(FOLDER / "clipped_meshes.py", 2, "dp_shard=2", "tp=2", HPCTRAIN_BACKEND="gloo")
    assert done.stdout.count("is through") == 2
