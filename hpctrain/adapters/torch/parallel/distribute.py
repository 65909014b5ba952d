"""Divides a user's model and its optimizer over a mesh."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.adapters.data_ranks import mesh_of, set_mesh
from hpctrain.adapters.guard import Guard
from hpctrain.adapters.torch.batches import tensors_in
from hpctrain.adapters.torch.guarding import guard_over, guards
from hpctrain.adapters.torch.parallel.mesh import device_mesh, sizes_of
from hpctrain.adapters.torch.parallel.optimizers import Rewiring
from hpctrain.adapters.torch.parallel.plan import ParallelPlan
from hpctrain.adapters.torch.parallel.sharding import divide, is_sharded, recompute
from hpctrain.adapters.torch.parallel.shared_state import share_state
from hpctrain.adapters.torch.recording import step_recorder
from hpctrain.adapters.torch.reducer import syncing
from hpctrain.adapters.torch.steps import reduced_elsewhere
from hpctrain.adapters.torch.weights import BatchWeights, batch_weights
from hpctrain.comm import Communicator
from hpctrain.errors import HpctrainError
from hpctrain.recipes.mesh import Mesh

Optimizers = Sequence[torch.optim.Optimizer]


class Division:
    """How a mesh and a plan divide a model and its optimizers.

    Args:
        comm: the ranks.
        mesh: by default that of the run; else it becomes it.
        plan: by default the whole model is one unit.
        guard_every: steps between two comparisons of what several ranks have alike.

    Attributes:
        divides_model: not every rank has the whole model, or it computes in another precision: FSDP2 reduces its
            gradients.

    Raises:
        HpctrainError: the plan does not fit the model or the mesh.
    """

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        optimizers: Optimizers,
        mesh: DeviceMesh | None,
        plan: ParallelPlan | None,
        *,
        guard_every: int,
    ) -> None:
        if mesh is not None:
            set_mesh(comm, Mesh(**sizes_of(mesh)))
        sizes = mesh_of(comm).sizes
        plan = plan or ParallelPlan()
        if sizes["pp"] > 1:
            raise HpctrainError(
                f"the mesh has pp {sizes['pp']}, but ht.distribute does not cut a model into stages",
                "pipeline = ht.Pipeline(model, optimizer, loss, mesh=mesh, plan=plan), and pipeline.step(x, y)",
            )
        only_data = sizes["tp"] == 1 and plan.precision is None
        self._shares_state = plan.zero == 1 and sizes["dp_shard"] > 1
        check_plan(model, sizes, plan)
        self.divides_model = not (only_data and (self._shares_state or sizes["dp_shard"] == 1))
        if self.divides_model and self._shares_state:
            raise HpctrainError(
                "zero=1 divides the state of an optimizer of the whole model, but tp or the plan's precision divides "
                "the model",
                "choose zero=2 or zero=3, which keep less",
            )
        self._comm, self._model, self._optimizers, self._plan = comm, model, optimizers, plan
        self._guard_every = guard_every
        self._rewiring = Rewiring(model, optimizers) if self.divides_model or self._shares_state else None

    def apply(self) -> None:
        """Divide the model, which is equal on all ranks, or the optimizers' state alone. Collective."""
        if not self.divides_model:
            recompute(self._model, self._plan)
            if self._shares_state:
                share_state(self._optimizers, device_mesh(self._comm, mesh_of(self._comm))["dp_shard"])
            return
        assert self._rewiring is not None
        divide(self._model, device_mesh(self._comm, mesh_of(self._comm)), self._plan, keep=False)
        self._rewiring.apply([self._model])
        weigh_outputs(batch_weights(self._comm), self._model)
        if is_sharded(self._model):
            syncing.add(self._model)
        guard = guard_over(self._comm, self._model.named_parameters(), every=self._guard_every, divided=True)
        watch_steps(guard, self._comm, self._optimizers, step_recorder(self._comm, self._model))


def check_plan(model: nn.Module, sizes: dict[Any, int], plan: ParallelPlan) -> None:
    """Refuse a plan that does not fit the model or the mesh.

    Raises:
        HpctrainError: says what does not fit.
    """
    if sizes["cp"] > 1:
        raise HpctrainError(
            f"the mesh has cp {sizes['cp']}: PyTorch's context_parallel computes attention only with the flash, "
            "efficient or cuDNN kernels of NVIDIA GPUs, and is not built in here",
            "leave cp out, or divide long sequences over tp with SequenceParallel in the plan",
        )
    if sizes["tp"] > 1 and not plan.tensor:
        raise HpctrainError(
            f"the mesh has tp {sizes['tp']}, but the plan divides no layer",
            'plan=ht.ParallelPlan(tensor={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})',
        )
    plan.check(model, sizes["tp"])


def weigh_outputs(weights: BatchWeights, model: nn.Module) -> None:
    """Weight what a rank computes from its share of an uneven batch, at the model's outputs.

    FSDP2 gives its parameters' gradients no hooks.
    """

    def weigh(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        weight_of = weights.of_inputs((args, kwargs))
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: weighted(gradient, weight_of()))

    model.register_forward_hook(weigh, with_kwargs=True)


def weighted(gradient: torch.Tensor, weight: float) -> torch.Tensor | None:
    """A gradient times a rank's weight; None for the same."""
    if weight == 1.0:
        return None
    # Not 0 x gradient: a rank without samples must not pass on a NaN.
    return gradient * weight if weight else torch.zeros_like(gradient)


def watch_steps(
    guard: Guard, comm: Communicator, optimizers: Optimizers, note: Callable[[torch.optim.Optimizer], None] | None
) -> None:
    """Record and guard the first optimizer's steps as those of the model; PyTorch reduces the gradients of all."""
    reduced_elsewhere.update(optimizers)
    comm.distributed = True
    first, *others = optimizers
    guards[first] = guard
    # What is dropped before the end leaves what proves that ranks were equal.
    weakref.finalize(first, guard.seal).atexit = False

    def step_done(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if note is not None:
            note(optimizer)
        guard.step_done()

    def step_begins(*_: object) -> None:
        comm.passes += 1

    first.register_step_pre_hook(step_begins)
    first.register_step_post_hook(step_done)
    for each in others:
        each.register_step_post_hook(lambda *_: guard.updated())
