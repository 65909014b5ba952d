"""Scripts composed at random: the numbers of one process, or a refusal before a wrong update."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from support.imported_programs import imported
from support.refusals import codes

pytest.importorskip("torch")

program = imported(Path(__file__).parent / "programs" / "composed_scripts.py")

# From campaigns, such that every choice is among them. python composed_scripts.py --seed SEED says what one is.
EQUAL = (
    *(23, 808, 841, 417, 505),  # 2 ranks, mpi
    536,  # 1 rank
    502,  # an evaluation with fewer samples than ranks
    363,  # a sum as a loss
    *(216, 260, 763, 1461),  # 3 ranks, gloo
    626,  # 4 ranks, gloo
)
MORE = (
    *(210, 843, 1440, 437, 179, 27, 318, 490, 12, 154, 764),  # 2 ranks, mpi
    199,  # 1 rank
    *(28, 789, 320, 736),  # 3 ranks, gloo
    *(895, 352, 308),  # 4 ranks, gloo
)
REFUSED = {
    248: "HT-pipeline-loss-not-mean",
}


def test_every_choice_is_among_the_scripts():
    chosen = [dataclasses.asdict(program.drawn(seed)) for seed in (*EQUAL, *REFUSED)]
    for name, choices in program.CHOICES.items():
        assert {each[name] for each in chosen} == set(choices), name


@pytest.mark.parametrize(
    ("equal", "refused"),
    [(EQUAL, REFUSED), pytest.param(MORE, {}, marks=pytest.mark.thorough)],
    ids=["all choices", "more"],
)
@pytest.mark.slow
def test_scripts_equal_one_process_or_are_refused(equal, refused):
    found = {result.composition.seed: result for result in program.results((*equal, *refused))}
    for seed in equal:
        assert found[seed].outcome == "equal", str(found[seed])
    for seed, code in refused.items():
        assert (found[seed].outcome, codes(found[seed].message)) == ("refused", [code]), str(found[seed])
