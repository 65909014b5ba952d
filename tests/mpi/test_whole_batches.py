"""Small programs as people write them train on ranks as on one process, to the last digits but few."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.imported_programs import imported
from support.refusals import codes

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "whole_batches.py"
OF_EACH_RANK = "optimizer_of_plateau_of_each_rank"
PARTED = {OF_EACH_RANK: "HT-parameters-differ"}
# What would need whole parameters or another division of them; and a pass that an error ended.
DIVIDED = {
    **PARTED,
    "called_by_parameters": "explained",
    "errors_within_backward": "HT-backward-ended-early",
    "optimizers_made_anew": "HT-gradients-reduced-twice",
}
# Each layer is gathered by itself.
UNITS = {**DIVIDED, "gradients_asked_for": "explained"}
# LBFGS flattens parameters, whose rows three ranks do not divide evenly.
UNEVEN = {**UNITS, "optimizer_of_line_search": "explained"}
THOROUGH = pytest.mark.thorough
# How many scripts are composed at random.
SEEDS = int(os.environ.get("COMPOSED", "8"))


ALL = "scripts,draws,calls,updates"
# Those that a mesh may divide too.
SOME = "draws,calls,updates"
SCHEDULES = ("1f1b", "interleaved_1f1b")


@pytest.fixture(scope="module")
def alone(mpirun, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What programs of these pools, all or some, compute on one process."""

    @functools.cache
    def values(pools: str, names: tuple[str, ...]) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("alone") / "one"
        mpirun(PROGRAM, 1, str(out), pools, *names)
        found: dict[str, Any] = json.loads(Path(f"{out}-0.json").read_text())
        assert not [name for name, each in found.items() if each["refused"]]
        return found

    return values


@pytest.fixture
def equal(mpirun, alone: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., None]:
    """``equal(ranks, backend, pools, names, refused, **variables)`` compares programs on ranks with one process."""

    def compare(
        ranks: int, backend: str, pools: str, names: tuple[str, ...], refused: dict[str, str], **variables: str
    ) -> None:
        variables |= {"HPCTRAIN_TIMEOUT": "120", "HPCTRAIN_BACKEND": backend}
        mpirun(PROGRAM, ranks, str(tmp_path / "out"), pools, *names, timeout=500, **variables)
        expected = alone(ALL if pools == SOME else pools, names)
        for rank in range(ranks):
            found = json.loads((tmp_path / f"out-{rank}.json").read_text())
            said = {name: each["refused"] for name, each in found.items() if each["refused"]}
            others = {name: found[name].get("trace") for name in said if said[name] != refused.get(name)}
            assert said == refused, others
            for name in found.keys() - refused:
                assert found[name]["values"] == pytest.approx(expected[name]["values"], rel=1e-9, abs=1e-9), name

    return compare


def composed(first: int, last: int) -> tuple[str, ...]:
    return tuple(f"composed_{seed}" for seed in range(first, last))


def pipelines(*schedules: str) -> tuple[str, ...]:
    imported(PROGRAM)  # in place of the benchmark of this name
    shapes = imported(PROGRAM.with_name("whole_batch_pipelines.py")).SHAPES
    return tuple(f"pipeline_{schedule}_{shape}" for schedule in schedules for shape in shapes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "backend", "mesh", "pools", "names", "refused"),
    [
        (3, "gloo", "", ALL, (), PARTED),
        (3, "mpi", "dp_shard=-1,units", SOME, (), UNEVEN),
        (2, "mpi", "", "composed", composed(0, SEEDS), {}),
        (4, "gloo", "", "composed", composed(20, 23), {}),
        pytest.param(2, "mpi", "", ALL, (), PARTED, marks=THOROUGH),
        pytest.param(2, "horovod", "", ALL, (), PARTED, marks=THOROUGH),
        pytest.param(2, "gloo", "dp_shard=-1,zero=1", SOME, (), PARTED, marks=THOROUGH),
        pytest.param(2, "gloo", "dp_shard=-1", SOME, (), DIVIDED, marks=THOROUGH),
        pytest.param(4, "gloo", "dp_shard=2,dp_replicate=2,units", SOME, (), UNITS, marks=THOROUGH),
        pytest.param(3, "gloo", "", "composed", composed(23, 60), {}, marks=THOROUGH),
        pytest.param(4, "mpi", "", "composed", composed(60, 100), {}, marks=THOROUGH),
    ],
)
def test_each_program_equals_one_process(
    equal, ranks: int, backend: str, mesh: str, pools: str, names: tuple[str, ...], refused: dict[str, str]
) -> None:
    equal(ranks, backend, pools, names, refused, MESH=mesh)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "backend", "schedules"),
    [
        (2, "mpi", SCHEDULES),
        pytest.param(2, "gloo", ("gpipe", *SCHEDULES), marks=THOROUGH),
        pytest.param(4, "gloo", SCHEDULES, marks=THOROUGH),
    ],
)
def test_pipelines_whose_batches_change_equal_one_process(
    equal, ranks: int, backend: str, schedules: tuple[str, ...]
) -> None:
    equal(ranks, backend, "pipelines", pipelines(*schedules), {})


def test_what_one_rank_alone_computes_of_a_batch_is_named_with_both_lines(mpirun) -> None:
    program = PROGRAM.with_name("whole_batch_on_one_rank.py")
    lines = program.read_text().splitlines()
    # An error that came by the limit of waits would not come before the test's own.
    result = mpirun(program, 2, check=False, HPCTRAIN_TIMEOUT="400", timeout=100)
    assert result.returncode != 0
    assert set(codes(result.stdout)) == {"HT-ranks-in-different-calls"}
    assert result.stdout.count("loss ") == 2  # what is computed by all may be shown by one
    for text in ("out.median()", "out.mean()"):
        (number,) = (number for number, line in enumerate(lines, 1) if text in line)
        assert f"{program.name}:{number}" in result.stdout
    assert "take it out of the condition" in result.stdout
