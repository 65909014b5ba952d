"""Runs that are hurt on purpose end as promised: one case of each important kind, or with ``FAULTS=all`` every one.

``FAULTS_SEED`` draws other ranks, steps and moments. A rank that is killed between checkpoints is in
tests/mpi/test_resume.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_campaign import kinds_of_hosts, kinds_of_meshes  # noqa: F401 - they add their cases
from fault_campaign.cases import CASES, carry_out
from fault_campaign.faulted_run import Place
from fault_campaign.oracle import kept_steps, read_lines
from fault_campaign.references import EPOCHS, Library, Setting

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(3600)]

# Digits without the fifth that is tested with.
_SAMPLES = 1437
_LIMIT_SECONDS = 180
_SHORT = (
    "a checkpoint's share with a flipped bit, torch mpi",
    "kill -9 while a checkpoint is written, keras mpi",
    "a disk too full for a checkpoint, torch mpi",
    "a sample that is not a number, rule skip, torch mpi",
    "4, 2 and then 3 ranks, torch mpi",
    "mesh: kill -9 while a checkpoint is written, torch gloo dp_shard=2",
)


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    # Sockets are in it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="hpctrain-faults-") as folder:
        library = Library(folder=Path(folder) / "whole", limit=_LIMIT_SECONDS)
        with library.held:
            yield library


@pytest.mark.parametrize("name", CASES if os.environ.get("FAULTS") == "all" else _SHORT)
def test_it_ends_as_promised(library: Library, name: str) -> None:
    case = CASES[name]
    pytest.importorskip(case.framework)
    place = Place(folder=library.folder.with_name(f"case-{[*CASES].index(name)}"), limit=library.limit)
    place.folder.mkdir()
    draw = random.Random(f"{os.environ.get('FAULTS_SEED', '0')} {name}")
    with contextlib.closing(place):
        faults, ends = carry_out(case, place, library, draw)
    assert not faults, "\n".join([*faults, *(f"--- printed:\n{end.printed}" for end in ends)])


def test_the_runs_that_others_are_compared_with_have_all_samples(library: Library) -> None:
    pytest.importorskip("torch")
    whole = library.whole(Setting(framework="torch", backend="mpi", ranks=2))
    epochs = [step["samples"] for step in kept_steps(read_lines(whole / "events.jsonl"))]
    assert sum(epochs) == EPOCHS * _SAMPLES
