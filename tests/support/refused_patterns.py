"""Which patterns of tests/mpi/programs are refused on a mesh that divides the model; replicas refuse none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# What would need whole parameters or another division of them; and a pass that an error ended.
REFUSED_ON_A_MESH = {
    "an_error_within_backward",
    "copies_of_the_model",
    "gradients_asked_for",
    "optimizer_made_anew",
    "parameters_used_directly",
    "parameters_used_directly_on_listed_batches",
}
# The model's own parameters stay gathered from the forward to the backward pass.
REFUSED_WITHOUT_UNITS = REFUSED_ON_A_MESH - {"gradients_asked_for"}


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
