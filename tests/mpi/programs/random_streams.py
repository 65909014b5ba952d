"""Each rank's random numbers: the situations of same_data.py whose result says whether ranks draw alike.

Each returns the first draw of every rank at some places of a script, in rank order.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from situations import Named
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset
from train_loop import recipe

import hpctrain as ht
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.worker.adapters.data_ranks import set_mesh
from hpctrain.worker.adapters.torch.random_streams import _done
from hpctrain.worker.comm import current
from hpctrain.worker.train.torch_trainer import TorchTrainer

STREAMS = stream = Named()


def drawn() -> list[list[float]]:
    """What each rank draws next, as dropout does."""
    return [each.tolist() for each in current().allgather_object(torch.rand(4).numpy())]


def distributed(**settings):
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    return ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def sharded():
    return ht.shard(DataLoader(TensorDataset(torch.arange(24.0).view(6, 4)), batch_size=3))


@stream
def masks_of_the_printed_order(comm):
    distributed()
    between = drawn()
    sharded()
    return {"equal": between, "apart": drawn()}


@stream
def masks_where_data_come_first(comm):
    sharded()
    between = drawn()
    distributed()
    return {"equal": between, "apart": drawn()}


@stream
def rank_0_draws_as_one_process(comm):
    kept = torch.get_rng_state()
    nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    alone = torch.rand(4).tolist()
    torch.set_rng_state(kept)
    distributed()
    sharded()
    return {"apart": drawn(), "alone": alone}


@stream
def evaluation_alone(comm):
    distributed()
    ht.shard(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=3), evaluation=True)
    return {"equal": drawn()}


@stream
def ranks_that_the_script_seeded_apart(comm):
    distributed()
    torch.manual_seed(40 + comm.rank)
    sharded()
    own = [torch.rand(4, generator=torch.Generator().manual_seed(40 + rank)).tolist() for rank in range(comm.size)]
    return {"apart": drawn(), "own": own}


@stream
def ranks_that_nobody_seeded(comm):
    torch.seed()
    distributed()
    sharded()
    return {"apart": drawn()}


@stream
def a_second_model(comm):
    distributed()
    sharded()
    first = drawn()
    distributed()
    sharded()
    return {"apart": first, "apart, later": drawn(), "new": [first[0] != drawn()[0]]}


@stream
def a_seed_in_each_epoch_before_its_loader(comm):
    distributed()
    sharded()
    found = []
    for epoch in range(2):
        torch.manual_seed(epoch)
        sharded()
        found.append(drawn())
    return {"apart": found[0], "apart, later": found[1]}


@stream
def a_seed_of_the_scripts_own_after_that(comm):
    distributed()
    sharded()
    torch.manual_seed(7)
    return {"equal": drawn()}


@stream
def generators_of_python_and_numpy(comm):
    distributed()
    sharded()
    return {"equal": comm.allgather_object([random.random(), float(np.random.rand())])}


@stream
def a_recipe(comm):
    trainer = TorchTrainer(recipe("uneven"), comm)
    return {"apart": drawn(), "alive": [trainer.updates]}


# Meshes, which stay for what comes after.


@stream
def over_shards(comm):
    distributed(mesh=ht.mesh(dp_shard=-1))
    sharded()
    return {"apart": drawn()}


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(count)})

    def forward(self, x):
        for block in self.blocks.values():
            x = x if block is None else block(x)
        return x


@stream
def over_stages(comm):
    mesh = ht.mesh(pp=-1)
    model = Blocks(comm.size)
    plan = ht.ParallelPlan(shard=["blocks.*"])
    ht.Pipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, mesh=mesh, plan=plan)
    sharded()
    return {"apart": drawn()}


@stream
def over_tensor_parallel_ranks_that_nobody_seeded(comm):
    torch.seed()
    plan = ht.ParallelPlan(tensor={"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=ht.mesh(tp=-1), plan=plan)
    sharded()
    return {"equal": drawn()}


def as_of_a_new_run(comm) -> None:
    _done.pop(comm, None)
    set_mesh(comm, Mesh())
