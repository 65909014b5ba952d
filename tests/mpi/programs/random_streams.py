"""Each rank's random numbers: the situations of same_data.py whose result says whether ranks draw alike.

Each returns the first draw of every rank at some places of a script, in rank order.
"""

from __future__ import annotations

import torch
from situations import Named
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

import hpctrain as ht
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.worker.adapters.data_ranks import set_mesh
from hpctrain.worker.comm import current

STREAMS = stream = Named()


def of_all(own: torch.Tensor) -> list[list[float]]:
    return [each.tolist() for each in current().allgather_object(own.numpy())]


def drawn() -> list[list[float]]:
    """What each rank draws next outside of models."""
    return of_all(torch.rand(4))


# What the noise of a model drew last. Kept outside of it: a model that keeps tensors of its own computes whole batches.
_last: list[torch.Tensor] = []


class Noise(nn.Module):
    """Draws as dropout does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _last[:] = [torch.rand(4)]
        return x


def distributed(**settings):
    model = nn.Sequential(nn.Linear(4, 18), Noise(), nn.Linear(18, 4))
    return ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)[0]


def sharded():
    """Batches of which no rank of a few has as many rows as a layer has units: such a model is called twice."""
    return ht.shard(DataLoader(TensorDataset(torch.arange(96.0).view(24, 4)), batch_size=24))


def drawn_in(model: nn.Module) -> dict[str, list[list[float]]]:
    """What ranks draw in two calls of a model, and outside of it before and after."""
    before, (batch,) = drawn(), next(iter(sharded()))
    model(batch)
    first = of_all(_last[0])
    model(batch)
    return {"equal": before, "in": first, "in, later": of_all(_last[0]), "equal, later": drawn()}


def apart(found: dict[str, list[list[float]]]) -> dict[str, object]:
    assert found["in"][0] not in (found["in, later"][0], found["equal"][0])
    return {name.replace("in", "apart"): each for name, each in found.items()}


@stream
def replicas(comm):
    return apart(drawn_in(distributed()))


@stream
def ranks_draw_as_one_process_outside(comm):
    kept = torch.get_rng_state()
    nn.Sequential(nn.Linear(4, 18), Noise(), nn.Linear(18, 4))
    alone = torch.rand(4).tolist()
    torch.set_rng_state(kept)
    distributed()
    sharded()
    found = drawn()
    assert found[0] == alone
    return {"equal": found}


@stream
def a_model_without_random_numbers_leaves_the_stream(comm):
    model = nn.Linear(4, 4)
    model, _ = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (batch,) = next(iter(sharded()))
    kept = torch.get_rng_state()
    model(batch)
    assert torch.equal(kept, torch.get_rng_state())
    return {"equal": drawn()}


@stream
def ranks_that_the_script_seeded_apart(comm):
    distributed()
    torch.manual_seed(40 + comm.rank)
    sharded()
    own = [torch.rand(4, generator=torch.Generator().manual_seed(40 + rank)).tolist() for rank in range(comm.size)]
    return {"apart": drawn(), "own": own}


# Meshes, which stay for what comes after.


@stream
def over_shards(comm):
    return apart(drawn_in(distributed(mesh=ht.mesh(dp_shard=-1))))


@stream
def over_tensor_parallel_ranks(comm):
    plan = ht.ParallelPlan(tensor={"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = drawn_in(distributed(mesh=ht.mesh(tp=-1), plan=plan))
    return {name.replace("in", "equal in"): each for name, each in found.items()}


def as_of_a_new_run(comm) -> None:
    set_mesh(comm, Mesh())
