"""A short campaign: one case of each important kind. ``make faults`` has all.

A rank that is killed between checkpoints is in tests/mpi/test_resume.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_campaign import campaign
from fault_campaign.cases import KINDS, Case
from fault_campaign.oracle import kept_steps, read_lines
from fault_campaign.references import EPOCHS, Library, Setting

pytestmark = pytest.mark.thorough

# Digits without the fifth that is tested with.
SAMPLES = 1437
CASES = (
    ("a checkpoint's share with a flipped bit", "torch", "mpi"),
    ("kill -9 while a checkpoint is written", "keras", "mpi"),
    ("a disk too full for a checkpoint", "torch", "mpi"),
    ("a sample that is not a number, rule skip", "torch", "mpi"),
    ("4, 2 and then 3 ranks", "torch", "mpi"),
    ("mesh: kill -9 while a checkpoint is written", "torch", "gloo", "dp_shard=2"),
)


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    # Sockets are in it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="hpctrain-faults-") as folder:
        library = Library(folder=Path(folder) / "whole", limit=180)
        with library.held:
            yield library


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(case) for case in CASES])
def test_it_ends_as_promised(library: Library, number: int) -> None:
    name, framework, backend, *mesh = CASES[number]
    pytest.importorskip(framework)
    case = Case(kind=KINDS[name], seed=0, framework=framework, backend=backend, mesh="".join(mesh))
    result = campaign.run(case, library.folder.with_name(f"case-{number}"), library)
    if result.verdict.outcome == "not here":
        pytest.skip(result.verdict.faults[0])
    assert result.verdict.outcome in ("recovered", "resumed"), (result.verdict.faults, result.printed)


def test_the_runs_that_others_are_compared_with_have_all_samples(library: Library) -> None:
    pytest.importorskip("torch")
    whole = library.whole(Setting(framework="torch", backend="mpi", ranks=2))
    epochs = [step["samples"] for step in kept_steps(read_lines(whole / "events.jsonl"))]
    assert sum(epochs) == EPOCHS * SAMPLES
