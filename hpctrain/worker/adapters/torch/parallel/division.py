"""Divides a user's model and its optimizer over a mesh, and explains PyTorch's errors about divided models."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.worker.adapters.data_ranks import mesh_of, set_mesh
from hpctrain.worker.adapters.torch.backward_passes import BackwardPasses, watch_gradients
from hpctrain.worker.adapters.torch.batch.derivatives import watch_engine
from hpctrain.worker.adapters.torch.guarding import guard_over, release, settings_of
from hpctrain.worker.adapters.torch.optimizer_contents import facts_of, optimizers_in
from hpctrain.worker.adapters.torch.parallel.gathered import Gathered
from hpctrain.worker.adapters.torch.parallel.optimizers import Rewiring, agree_on_overflow, share_state
from hpctrain.worker.adapters.torch.parallel.parallel_plan import ParallelPlan
from hpctrain.worker.adapters.torch.parallel.sharding import device_mesh, divide, recompute, sizes_of
from hpctrain.worker.adapters.torch.steps import mean_loss, step_recorder, with_closure
from hpctrain.worker.comm import Communicator

Optimizers = Sequence[torch.optim.Optimizer]


class Division:
    """How a mesh and a plan divide a model and its optimizers: the arguments of ``ht.distribute``.

    Attributes:
        divides_model: whether FSDP2 reduces the gradients, because ranks have parts of the model or it computes in
            another precision.
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
                "HT-mesh-not-supported",
                "the mesh has pp {pp}, but ht.distribute does not cut a model into stages",
                "pipeline = ht.Pipeline(model, optimizer, loss, mesh=mesh, plan=plan), and pipeline.step(x, y)",
                pp=sizes["pp"],
            )
        check_plan(model, sizes, plan)
        keeps_whole = sizes["tp"] == 1 and plan.precision is None and (plan.zero == 1 or sizes["dp_shard"] == 1)
        self.divides_model = not keeps_whole
        self._shares_state = keeps_whole and sizes["dp_shard"] > 1
        self._comm, self._model, self._optimizers, self._plan = comm, model, optimizers, plan
        self._guard_every = guard_every
        self._rewiring = Rewiring(model, optimizers) if self.divides_model or self._shares_state else None

    def apply(self) -> None:
        """Divide the model, which is equal on all ranks, or the optimizers' state alone. Collective."""
        watch_engine()
        if not self.divides_model:
            recompute(self._model, self._plan)
            if self._shares_state:
                share_state(self._comm, self._optimizers, device_mesh(self._comm, mesh_of(self._comm))["dp_shard"])
            return
        assert self._rewiring is not None
        mesh = device_mesh(self._comm, mesh_of(self._comm))
        divide(self._model, mesh, self._plan, keep=False)
        self._rewiring.apply([self._model])
        self._rewiring = None
        if isinstance(self._model, FSDPModule):
            gathered = Gathered(self._model)
            passes = gathered.passes
            for each in self._optimizers:
                each.register_step_post_hook(lambda *_: gathered.divide_again())
        else:
            passes = BackwardPasses()
            watch_gradients(self._model.parameters(), passes.made)
        for each in self._optimizers:
            each.register_step_pre_hook(lambda *_: passes.check_ended())
        note = step_recorder(self._comm, self._model)
        named = self._model.named_parameters()
        watch_steps(self._comm, named, self._optimizers, mesh, note=note, guard_every=self._guard_every)


def check_plan(model: nn.Module, sizes: dict[Any, int], plan: ParallelPlan) -> None:
    """Refuse a plan that does not fit the model or the mesh."""
    if sizes["cp"] > 1:
        raise HpctrainError(
            "HT-mesh-not-supported",
            "the mesh has cp {cp}: PyTorch's context_parallel computes attention only with the flash, "
            "efficient or cuDNN kernels of NVIDIA GPUs, and is not built in here",
            "leave cp out, or divide long sequences over tp with SequenceParallel in the plan",
            cp=sizes["cp"],
        )
    if sizes["tp"] > 1 and not plan.tensor:
        raise HpctrainError(
            "HT-parallel-plan-not-valid",
            "the mesh has tp {tp}, but the plan divides no layer",
            'plan=ht.ParallelPlan(tensor={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})',
            tp=sizes["tp"],
        )
    plan.check(model)


def watch_steps(
    comm: Communicator,
    parameters: Iterable[tuple[str, nn.Parameter]],
    optimizers: Optimizers,
    mesh: DeviceMesh,
    *,
    note: Callable[[torch.optim.Optimizer], None] | None,
    guard_every: int,
) -> None:
    """Record and guard the first optimizer's steps as those of the model; PyTorch reduces the gradients of all."""
    comm.distributed = True
    guard = guard_over(comm, parameters, every=guard_every, divided=True)
    agree_on_overflow(optimizers, mesh)
    for each in optimizers:
        for inner in optimizers_in(each):
            facts_of(inner).reduced_elsewhere = True
        each.register_step_pre_hook(lambda _, args, kwargs: with_closure(args, kwargs, partial(mean_loss, comm)))
    guard.settings = settings_of(optimizers)
    first, *others = optimizers
    facts_of(first).guard = guard
    # A model that is dropped before the end leaves the checksums that prove its parameters equal.
    weakref.finalize(first, release, guard).atexit = False

    def step_done(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if note is not None:
            note(optimizer)
        guard.step_done()

    def count_pass(*_: object) -> None:
        comm.passes += 1

    first.register_step_pre_hook(count_pass)
    first.register_step_post_hook(step_done)
    for each in others:
        each.register_step_post_hook(lambda *_: guard.updated())


# What PyTorch's messages about divided tensors mean to a script.
_EXPLAINED = {
    "Cannot flatten unevenly sharded tensor": (
        "a parameter or gradient that is divided over the ranks, of which they have different numbers of rows, cannot "
        "be flattened: take t.full_tensor() if hasattr(t, 'full_tensor') else t on all ranks before reshape, view or "
        "flatten; plan=ht.ParallelPlan(zero=1) keeps whole parameters and gradients"
    ),
    "appears to not have been used in the graph": (
        "the loss was not computed from what torch.autograd.grad differentiates by; if that is a parameter that is "
        "divided over the ranks, it was computed from the gathered one: call backward(), and take p.grad"
    ),
    "mixed torch.Tensor and DTensor": (
        "a parameter that is divided over the ranks, or what was computed from it, met a tensor of this rank's own: "
        "call the model or modules in it, which gather their parameters, rather than functions of their weights; in a "
        "penalty, take p.full_tensor() if hasattr(p, 'full_tensor') else p for each p of model.parameters(); "
        "plan=ht.ParallelPlan(zero=1) keeps whole parameters"
    ),
}


def of_divided_tensors(error: BaseException) -> str:
    """What PyTorch's message about a divided tensor means to a script; nothing for other errors.

    PyTorch 2.13 raises it in C++, where Python cannot replace it: ``hpctrain run`` prints this after the error.
    """
    return next((meaning for words, meaning in _EXPLAINED.items() if words in str(error)), "")
