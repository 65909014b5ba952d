"""Trains a recipe's network that is divided over a mesh in PyTorch, and says how networks are divided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.common.checkpoints.layout import STATISTICS
from hpctrain.common.recipes.families import network
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.adapters.torch import distribute
from hpctrain.worker.adapters.torch.parallel import ParallelPlan, Pipeline, device_mesh
from hpctrain.worker.adapters.torch.parallel.sharding import reshard
from hpctrain.worker.adapters.torch.tensor_pieces import fill, local_tensor, tensor_of
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.models.torch_gpt import GPT, tensor_plan
from hpctrain.worker.train.torch_chunked_loss import chunked_score
from hpctrain.worker.train.torch_trainer import MODEL, TorchTrainer

# The encoder of benchmarks, which no recipe has.
_BENCHED = {"transformer": "TransformerEncoderLayer"}


def plan_of(model: str, *, zero: Literal[1, 2, 3] = 3, recompute: bool = False) -> ParallelPlan:
    """The plan for a network, by its name in recipes and benchmarks."""
    block = _BENCHED.get(model) or network(model).block
    blocks = [block] if block else []
    tensor = tensor_plan() if model == "gpt" else {}
    return ParallelPlan(shard=blocks, tensor=tensor, recompute=blocks if recompute else (), zero=zero)


def parallel_plan(recipe: Recipe) -> ParallelPlan:
    """The plan for a recipe's network."""
    return plan_of(recipe.model.name, zero=recipe.sharding.zero, recompute=recipe.sharding.recompute)


class MeshTrainer(TorchTrainer):
    """A trainer whose model's parameters are divided over the ranks by FSDP2, tensor parallelism or both."""

    def _distribute(self, recipe: Recipe) -> None:
        mesh = device_mesh(self._comm, recipe.mesh)
        plan = parallel_plan(recipe)
        distribute(self.model, self._optimizer, comm=self._comm, mesh=mesh, plan=plan, guard_every=recipe.guard.every)

    @property
    def communication_seconds(self) -> None:
        return None

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's parts of the gradients."""
        return [local_tensor(each.grad) for _, each in self._parameters() if each.grad is not None]

    def _finite(self, gradients: list[torch.Tensor], norm: float) -> bool:
        own = self.own_finite and super()._finite(gradients, norm)
        finite = not self._comm.allreduce(np.array([float(not own)]), "max")[0]
        if not finite and gradients:
            # A GradScaler looks only at its own rank's gradients, so that each rank needs one that is not finite.
            gradients[0].fill_(math.inf)
        return finite

    def evaluate(self, samples: Samples) -> tuple[float, float]:
        found = super().evaluate(samples)
        for stage in self._modules():
            reshard(stage)
        return found

    def _is_divided(self, tensor: torch.Tensor) -> bool:
        return True

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self.before_update()
        for name, parameter in self._parameters():
            fill(parameter, state, f"{MODEL}{name}")
        for name, buffer in self._buffers():
            if f"{STATISTICS}{name}" in state:
                buffer.copy_(tensor_of(state[f"{STATISTICS}{name}"]))
        self._restore_rest(state)


class PipelineTrainer(MeshTrainer):
    """A trainer whose model's blocks are divided into stages, each of which may be divided further."""

    def _distribute(self, recipe: Recipe) -> None:
        self._ranks = recipe.mesh.at(self._comm.size).pp
        self._evaluated = [0.0, 0.0]
        # Its loss is computed where a pipeline asks for it, from what the head gets: see torch_chunked_loss.
        assert isinstance(self.model, GPT)
        self.model.gives_hidden = True
        self._pipeline = Pipeline(
            self.model,
            self._optimizer,
            self._mean_loss,
            mesh=device_mesh(self._comm, recipe.mesh),
            plan=parallel_plan(recipe),
            schedule=recipe.pipeline.schedule,
            micro_batches=recipe.pipeline.count(self._ranks),
            guard_every=recipe.guard.every,
            comm=self._comm,
        )

    def _modules(self) -> Sequence[torch.nn.Module]:
        return self._pipeline.stages

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self._pipeline.named_parameters()

    def average_statistics(self) -> None:
        """Do nothing: networks that can be cut into stages have no batch normalisation."""

    def _backward(self, samples: Samples, scale: float, number: int, count: int) -> torch.Tensor:
        tokens, labels = self._inputs.tensors(samples)
        own = scale * len(tokens)
        with self._forward.autocast():
            # Scaled so that the ranks' mean of what is returned is the mean loss over all samples.
            scaler = self._scaler if self._scaler.is_enabled() else None
            return torch.tensor(own * self._pipeline.step(tokens, labels, scale=own, scaler=scaler))

    def _mean_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of a micro-batch on the last stage, which also counts for an evaluation."""
        stage, labels = self._pipeline.last_stage, labels.flatten()
        assert isinstance(stage, GPT)
        assert stage.head is not None
        if not torch.is_grad_enabled():
            loss_sum, correct = stage.head(hidden, partial(chunked_score, labels))
            self._evaluated[0] += loss_sum.item()
            self._evaluated[1] += int(correct)
        else:
            loss_sum = stage.head(hidden, partial(self._forward.loss.of_hidden, labels))
        mean: torch.Tensor = loss_sum / len(labels)
        return mean

    @torch.no_grad()
    def evaluate(self, samples: Samples) -> tuple[float, float]:
        """The sums over this rank's samples times the number of stages on the last stage; 0 on the others."""
        for module in self._modules():
            module.eval()
        tokens, labels = self._inputs.tensors(samples)
        self._evaluated = [0.0, 0.0]
        with self._forward.autocast():
            self._pipeline.evaluate(tokens, labels)
        loss_sum, correct = (self._ranks * each / labels[0].numel() for each in self._evaluated)
        return loss_sum, correct

    def _total_norm(self) -> torch.Tensor:
        # Where the loss scale is, which a copy to the CPU would not wait for.
        return torch.tensor(self._pipeline.grad_norm(), device=self._device)

    def _update(self) -> None:
        self._clip()
        self._pipeline.accept_gradients()
        self._optimizer.step()
