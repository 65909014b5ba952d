"""Data and random numbers of the ranks: the numbers of one process, or a refusal before a wrong update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.refusals import check

PROGRAM = Path(__file__).parent / "programs" / "same_data.py"
# Of what ht.shard found different: the end of where that is, and the beginnings of both values. One word is a code.
REFUSED = {
    "lengths": ("the number of samples", "24", "21"),
    "an_unseeded_split": ("the indices of Subset", "hash ", "hash "),
    "files_in_the_order_of_the_directory": ("", "str '", "str '"),
    "files_that_differ_in_worker_processes": ("sample 14 at ['y']", "14", "28"),
    "batch_sizes": ("batch_size", "8", "6"),
    "a_look_of_rank_0_alone": ("HT-ranks-in-different-calls",),
    "an_epoch_of_each_rank": ("HT-ranks-in-different-calls",),
}


KERAS_REFUSED = {
    "lengths_of_arrays": ("the number of samples", "16", "13"),
    "an_unseeded_split_as_slices": (
        "of step 1 of the dataset at [0]",
        "float64 (4,) of means",
        "float64 (4,) of means",
    ),
    "an_unseeded_shuffle": ("HT-shard-wrong-data",),
    "shuffles_that_are_seeded_apart": ("", "", ""),
    "ranks_that_are_seeded_apart": ("seed of step 2 of the dataset, ShuffleDataset", "0", "1"),
    "a_shard_of_each_rank": ("index of step 2 of the dataset, ShardDataset", "0", "1"),
    "files_in_the_order_of_the_directory": ("", "bytes b'", "bytes b'"),
}
RANKS = [
    (2, "mpi"),
    pytest.param(3, "mpi", marks=pytest.mark.thorough),
    pytest.param(2, "gloo", marks=pytest.mark.thorough),
    pytest.param(3, "gloo", marks=pytest.mark.thorough),
]
KERAS_RANKS = [(2, "mpi"), pytest.param(3, "mpi", marks=pytest.mark.thorough)]


@pytest.mark.parametrize(("ranks", "backend"), RANKS)
def test_ranks_have_the_same_data_and_random_numbers(mpirun, tmp_path, ranks, backend):
    pytest.importorskip("torch")
    mpirun(PROGRAM, ranks, backend, str(tmp_path / "out"), timeout=300)
    _check(tmp_path, ranks, REFUSED)


@pytest.mark.parametrize(("ranks", "backend"), KERAS_RANKS)
@pytest.mark.long
def test_ranks_have_the_same_data_and_seeds_of_their_own_in_keras(mpirun, tmp_path, ranks, backend):
    pytest.importorskip("keras")
    mpirun(PROGRAM.with_name("keras_same_data.py"), ranks, backend, str(tmp_path / "out"), timeout=400)
    _check(tmp_path, ranks, KERAS_REFUSED)


def _check(folder, ranks, refused):
    for rank in range(ranks):
        found = json.loads((folder / f"out-{rank}.json").read_text())
        assert {name for name, value in found.items() if isinstance(value, dict) and "code" in value} == refused.keys()
        for name, value in found.items():
            if name in refused:
                _check_refusal(value, *refused[name])
            elif isinstance(value, dict):
                _check_draws(value, ranks)
            else:
                assert abs(value) < 1e-10, name


def _check_refusal(record, *wanted):
    if len(wanted) == 1:
        check(record, wanted[0])
        return
    check(record, "HT-shard-different-data", rank=1)
    where, first, other = (record["values"][name] for name in ("where", "first", "other"))
    assert where.endswith(wanted[0]) and first.startswith(wanted[1]) and other.startswith(wanted[2]), record


def _check_draws(found, ranks):
    for what, draws in found.items():
        if what.startswith(("equal", "apart")):
            assert len({str(each) for each in draws}) == (1 if what.startswith("equal") else ranks), (what, draws)
    assert found.get("own", found.get("apart")) == found.get("apart")
