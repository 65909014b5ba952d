"""Steps on meshes whose gradients have a norm that only all ranks together cannot express: ``clipped_meshes.py MESH…``

Each rank's part has a norm whose square is finite in float32.
"""

from __future__ import annotations

import sys

import gpt
import numpy as np
import torch

import hpctrain as ht
from hpctrain.common.recipes.load import mesh_overrides, override_recipe
from hpctrain.worker.adapters.data_ranks import set_mesh
from hpctrain.worker.adapters.torch.tensor_pieces import local_tensor
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data import open_sources
from hpctrain.worker.train.recipe import torch_trainer

OWN_NORM = 1.5e19


def clip(comm: Communicator, mesh: str) -> None:
    recipe = override_recipe(gpt.recipe("uneven"), [*mesh_overrides(mesh), "optimizer.clip_norm=0.5"])
    set_mesh(comm, recipe.mesh)
    trainer = torch_trainer(recipe, comm)(recipe, comm)
    (samples,) = open_sources(recipe)[0].stream([np.arange(4)], 0)
    backward = trainer._backward

    def large(*arguments: object) -> torch.Tensor:
        loss = backward(*arguments)
        gradients = [local_tensor(each.grad) for _, each in trainer._parameters() if each.grad is not None]
        for each in gradients:
            each.fill_(OWN_NORM / sum(one.numel() for one in gradients) ** 0.5)
        assert torch.nn.utils.get_total_norm(gradients).isfinite()
        return loss

    def weights() -> list[torch.Tensor]:
        return [local_tensor(each).detach().clone() for _, each in trainer._parameters()]

    def step() -> tuple[bool, bool]:
        """Whether the step was left out, and whether it changed a weight."""
        before = weights()
        trainer.step([samples], 1, 1 / 4, 0.01, 1.0)
        return trainer.faulty, not all(map(torch.equal, before, weights()))

    found = [step()]
    trainer._backward = large  # type: ignore[method-assign]
    found.append(step())
    trainer._backward = backward  # type: ignore[method-assign]
    found.append(step())
    assert found == [(False, True), (True, False), (False, True)], f"{mesh}: {found}"
    assert all(each.isfinite().all() for each in weights())


comm = ht.init()
for mesh in sys.argv[1:]:
    clip(comm, mesh)
print(f"rank {comm.rank} is through", flush=True)
