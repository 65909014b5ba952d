"""The mesh that the ranks of a run form, and which part of each batch is a rank's own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.common.recipes.mesh import Mesh, parse_mesh
from hpctrain.common.settings import MESH
from hpctrain.worker.comm.base import Communicator


class DataPlace(NamedTuple):
    """Which of the parts of each batch a rank computes; ranks of one tp, cp or pp group compute the same."""

    rank: int
    ranks: int


def set_mesh(comm: Communicator, mesh: Mesh) -> None:
    """Set the mesh that these ranks form from now on."""
    comm.mesh = mesh


def mesh_of(comm: Communicator) -> Mesh:
    """The mesh of a communicator's ranks: what was set, else the launch's, else all replicate."""
    return _given_to(comm).at(comm.size)


def data_place(comm: Communicator) -> DataPlace:
    """This rank's place among those that divide the samples."""
    return _place(_given_to(comm), comm.rank, comm.size)


def is_first_of_data(comm: Communicator) -> bool:
    """Whether this rank counts for all that compute the same samples: the first of each tp, cp and pp group."""
    at = mesh_of(comm).coordinates(comm.rank)
    return not any(at[axis] for axis in ("tp", "cp", "pp"))


def stream_of(comm: Communicator) -> int:
    """The number of this rank's stream of random numbers, 0 on rank 0.

    Ranks of one tp or cp group share it: they draw for the same samples in the same layers.
    """
    mesh = mesh_of(comm)
    return _data_rank(mesh, comm.rank) * mesh.sizes["pp"] + mesh.coordinates(comm.rank)["pp"]


def first_of_each(comm: Communicator, have: Sequence[bool]) -> list[bool]:
    """Which ranks' values count: of the ranks that computed the same samples, only the first that has a value."""
    mesh, seen, found = mesh_of(comm), set[int](), []
    for rank, has in enumerate(have):
        part = _data_rank(mesh, rank)
        found.append(has and part not in seen)
        if has:
            seen.add(part)
    return found


def _given_to(comm: Communicator) -> Mesh:
    if comm.mesh is not None:
        return comm.mesh
    text = MESH.read()
    return parse_mesh(text, MESH.name) if text else Mesh()


# Cached because each step asks several times.
@functools.lru_cache(maxsize=8)
def _place(given: Mesh, rank: int, ranks: int) -> DataPlace:
    mesh = given.at(ranks)
    return DataPlace(_data_rank(mesh, rank), mesh.data_ranks)


def _data_rank(mesh: Mesh, rank: int) -> int:
    at = mesh.coordinates(rank)
    return at["dp_replicate"] * mesh.sizes["dp_shard"] + at["dp_shard"]
