"""Ranks that make steps by themselves, simulated in one process of plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.worker import models
from hpctrain.worker.data.sampling import epoch_order
from support.imported_programs import imported

torch = pytest.importorskip("torch")

# As the ranks: which of several equal numbers is the largest depends on the last bits of sums.
torch.set_num_threads(1)

PROGRAM = Path(__file__).parents[1] / "mpi" / "programs" / "local_steps.py"


program = imported(PROGRAM)


class Simulation:
    """As many copies of a model as there are ranks, and what is done with their mean: written out by hand."""

    def __init__(self, recipe, begun, ranks, framework):
        self.recipe, self.ranks, self.framework, self.steps = recipe, ranks, framework, 0
        model = models.build(ModelSettings(name="digits_cnn"), "torch")
        torch.nn.utils.vector_to_parameters(torch.from_numpy(begun), model.parameters())
        self.models = [copy.deepcopy(model) for _ in range(ranks)]
        settings = recipe.optimizer
        keys = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.SGD
        if kind is torch.optim.SGD:
            keys |= {"momentum": settings.momentum, "nesterov": settings.nesterov}
        else:
            keys["eps"] = settings.epsilon
        # As the ranks, for the same reason: kernels of PyTorch's differ in their rounding.
        keys["fused"] = True
        self.optimizers = [kind(each.parameters(), **keys) for each in self.models]
        self.before, self.velocity = begun.astype(np.float64), np.zeros(len(begun))

    def gradients(self, images, labels):
        """Each rank's, of a loss whose mean over the ranks is the mean over the samples; and all losses."""
        losses = []
        for model, own, of in zip(
            self.models, np.array_split(images, self.ranks), np.array_split(labels, self.ranks), strict=True
        ):
            model.zero_grad()
            logits = model(torch.from_numpy(own if len(own) else images[:1]).permute(0, 3, 1, 2))
            wanted = torch.from_numpy(of) if len(of) else torch.tensor([-1])
            loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum", ignore_index=-1)
            loss = loss * self.ranks / len(labels)
            loss.backward()
            losses.append(loss.item())
        return losses

    def step(self):
        self.steps += 1
        if self.framework == "keras" and self.recipe.optimizer.name == "adamw":
            # Keras adds epsilon to what is not corrected for its bias yet (Kingma and Ba 2015, end of section 2).
            for optimizer in self.optimizers:
                beta = optimizer.param_groups[0]["betas"][1]
                optimizer.param_groups[0]["eps"] = self.recipe.optimizer.epsilon / np.sqrt(1 - beta**self.steps)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if self.recipe.optimizer.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.recipe.optimizer.clip_norm)
            optimizer.step()

    def average_gradients(self):
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([each.grad for each in parameters]).mean(0)
            for each in parameters:
                each.grad = mean.clone()

    def average_parameters(self):
        mean = np.mean([self.vector(rank).astype(np.float64) for rank in range(self.ranks)], axis=0)
        outer = self.recipe.sync.outer
        if outer.optimizer == "nesterov":
            difference = self.before - mean
            self.velocity = outer.momentum * self.velocity + difference
            mean = self.before - outer.learning_rate * (difference + outer.momentum * self.velocity)
        self.before = mean
        for model in self.models:
            torch.nn.utils.vector_to_parameters(torch.from_numpy(mean.astype(np.float32)).clone(), model.parameters())

    def vector(self, rank=0):
        return torch.nn.utils.parameters_to_vector(self.models[rank].parameters()).detach().numpy()


def simulated(case: str, begun: np.ndarray, ranks: int, framework: str = "torch") -> tuple[np.ndarray, list[float]]:
    """The parameters after the run, and rank 0's loss or the mean loss of each step."""
    recipe = program.recipe(**program.CASES[case])
    (train, _), noted = program.data(), []
    simulation, sync = Simulation(recipe, begun, ranks, framework), recipe.sync
    steps = -(-program.SAMPLES // program.SIZE)
    for epoch in range(program.EPOCHS):
        alone = epoch >= sync.after_epochs
        for step in range(steps):
            batch = epoch_order(program.SAMPLES, seed=3, epoch=epoch)[step * program.SIZE :][: program.SIZE]
            losses = simulation.gradients(train.images[batch], train.labels[batch])
            if not alone:
                simulation.average_gradients()
            simulation.step()
            meet = not alone or (step + 1) % sync.every == 0 or step + 1 == steps
            if alone and meet:
                simulation.average_parameters()
            elif not alone:
                simulation.before = simulation.vector().astype(np.float64)
            noted.append(np.mean(losses) if meet else losses[0])
    return simulation.vector(), noted
