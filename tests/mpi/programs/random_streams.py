"""Each rank's random numbers: the situations of same_data.py whose result says whether ranks draw alike.

Each returns the first draw of every rank at some places of a script, in rank order.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from situations import Named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_loop import recipe

import hpctrain as ht
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.worker.adapters.data_ranks import set_mesh
from hpctrain.worker.comm import current
from hpctrain.worker.train.torch_trainer import TorchTrainer

STREAMS = stream = Named()


def drawn() -> list[list[float]]:
    """What each rank draws next."""
    own = [*torch.rand(4).tolist(), random.random(), float(np.random.rand())]
    return current().allgather_object(own)


def distributed():
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    return ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def sharded():
    return ht.shard(DataLoader(TensorDataset(torch.arange(28.0).view(7, 4)), batch_size=3, shuffle=True))


@stream
def one_stream_of_a_script(comm):
    distributed()
    loader = sharded()
    for _ in loader:
        pass
    return {"equal": drawn()}


@stream
def samples_that_draw_by_themselves(comm):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            return torch.rand(2) + random.random() + np.random.rand()

    for _ in ht.shard(DataLoader(Noisy(), batch_size=3)):
        pass
    return {"equal": drawn()}


@stream
def ranks_that_the_script_seeded_apart(comm):
    distributed()
    torch.manual_seed(40 + comm.rank)
    sharded()
    own = [torch.rand(4, generator=torch.Generator().manual_seed(40 + rank)).tolist() for rank in range(comm.size)]
    return {"apart": [each[:4] for each in drawn()], "own": own}


@stream
def a_recipe(comm):
    trainer = TorchTrainer(recipe("uneven"), comm)
    return {"apart": drawn(), "alive": [trainer.updates]}


def as_of_a_new_run(comm) -> None:
    set_mesh(comm, Mesh())
