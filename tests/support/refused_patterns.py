"""Which patterns of tests/mpi/programs are refused where a batch does not divide evenly over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# What cannot be told, or has another meaning on ranks than in one process, where a batch does not divide evenly.
REFUSED = {
    "micro_batches",
    "copied_micro_batches",
    "two_views_joined",
    "data_of_its_own",
    "compiled_function_of_listed_batches",
    "parameters_used_directly_on_listed_batches",
    "sum_of_two_batches",
    "training_on_an_evaluation",
}
# On a mesh, what would need whole parameters or another division, too; and a pass that an error ended.
REFUSED_ON_A_MESH = REFUSED - {"compiled_function_of_listed_batches"} | {
    "a_penalty_of_weights",
    "a_penalty_of_weights_first",
    "an_error_within_backward",
    "copies_of_the_model",
    "gradients_asked_for",
    "lbfgs",
    "optimizer_made_anew",
    "parameters_used_directly",
}
# Copies of batches that were not drawn just before: over 3 ranks a rank has as many samples of either batch size.
REFUSED_OVER_3 = REFUSED | {
    "prefetched_copies",
    "copied_by_a_thread",
    "adversarial_pair",
}
# The model's own parameters stay gathered from the forward to the backward pass.
REFUSED_WITHOUT_UNITS = REFUSED_ON_A_MESH - {"a_penalty_of_weights", "gradients_asked_for"}
REFUSED_ON_A_MESH_OVER_3 = REFUSED_ON_A_MESH | REFUSED_OVER_3 - {"compiled_function_of_listed_batches"}
# Some rank has no sample of some batches of their evaluations.
REFUSED_ON_A_MESH_OVER_4 = REFUSED_ON_A_MESH_OVER_3 | {"order_of_nanogpt", "input_gradients_of_an_evaluation"}


def wrong_patterns(results: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The patterns, each with the division of its batches, whose numbers or updates are wrong.

    Args:
        results: of each rank, what tests/mpi/programs/torch_patterns.py wrote.
    """
    return {
        f"{name}, {division}": each
        for result in results
        for name, divisions in result.items()
        for division, each in divisions.items()
        if not each["error"] < 1e-10 or not (each["refused"] or each["updates"] == each["expected"] > 0)
    }
