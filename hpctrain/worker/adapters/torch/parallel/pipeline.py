"""Pipelines of stages, over torch.distributed.pipelining."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.worker.adapters.data_ranks import mesh_of, set_mesh, stream_of
from hpctrain.worker.adapters.torch.backward_passes import refuse_ended
from hpctrain.worker.adapters.torch.batch.edge import RankStream
from hpctrain.worker.adapters.torch.batch.tensor import running
from hpctrain.worker.adapters.torch.broadcast import start_from_rank_0
from hpctrain.worker.adapters.torch.parallel.division import check_plan, watch_steps
from hpctrain.worker.adapters.torch.parallel.optimizers import Rewiring
from hpctrain.worker.adapters.torch.parallel.parallel_plan import ParallelPlan
from hpctrain.worker.adapters.torch.parallel.schedules import SCHEDULES, Schedules, connect, schedule_on
from hpctrain.worker.adapters.torch.parallel.sharding import (
    device_mesh,
    divide,
    refuse_tie,
    reshard,
    sizes_of,
    tied_names,
)
from hpctrain.worker.adapters.torch.parallel.stages import (
    Cut,
    MeanLosses,
    MicroBatches,
    Part,
    Tie,
    TiedGradients,
    padded,
    part_of,
    ties_of,
)
from hpctrain.worker.adapters.torch.refusals import check_model, check_optimizer
from hpctrain.worker.adapters.torch.steps import step_recorder
from hpctrain.worker.comm import Communicator, current

# How many numbers of each gradient are compared to find out whether it was changed.
_SAMPLED = 16
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Count = Callable[[torch.Tensor], torch.Tensor | float]


class Pipeline:
    """A model cut into stages over the ranks of pp, each divided further by the mesh's other axes. Collective.

    The model's ``forward`` takes a tensor and runs its children in their order: what comes before the blocks is in the
    first stage, what comes after them in the last, and every part that a stage lacks is None, to be skipped. The model
    becomes this rank's first stage. Ranks start from rank 0's weights, and the optimizer gets this rank's parameters::

        pipeline = ht.Pipeline(model, optimizer, loss_of, mesh=ht.mesh(pp=2), plan=plan)
        for x, y in ht.shard(loader):
            loss = pipeline.step(x, y)
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        model: the same on every rank.
        optimizer: one or several, of the model's parameters.
        loss: of outputs and targets, the mean over their samples; with ``count`` the sum over them.
        mesh: what ``ht.mesh`` returned; by default the mesh of the run.
        plan: how the model is divided; its parameters are gathered once a step, whatever its stage of ZeRO.
        schedule: gpipe, 1f1b or interleaved_1f1b.
        micro_batches: number of pieces into which this rank's part of a batch is cut; by default as many as pp has
            ranks.
        guard_every: steps between two comparisons of what several ranks hold in common.
        count: of targets, what the loss is divided by where that is not the number of samples: tokens, or the sum of
            weights. The loss of a step is the sum over all micro-batches and ranks, divided by the sum of the counts::

                def total(output, target):
                    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")

                pipeline = ht.Pipeline(model, optimizer, total, count=lambda target: (target != -100).sum())

    Attributes:
        stages: this rank's, modules of the model's class with the model's names.

    Raises:
        HpctrainError: the plan, the mesh or the schedule does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Loss,
        *,
        mesh: DeviceMesh | None = None,
        plan: ParallelPlan | None = None,
        schedule: str = "1f1b",
        micro_batches: int | None = None,
        guard_every: int = 100,
        count: Count | None = None,
        comm: Communicator | None = None,
    ) -> None:
        self._comm = comm or current()
        if mesh is not None:
            set_mesh(self._comm, Mesh(**sizes_of(mesh)))
        sizes = mesh_of(self._comm).sizes
        schedule = schedule_on(sizes["pp"], schedule)
        per_rank = SCHEDULES[schedule][1]
        self._micro_batches = micro_batches or sizes["pp"]
        self._pp = sizes["pp"]
        self._loss_of, self._count_of, self._plan = loss, count, plan or ParallelPlan()
        self._means = MeanLosses(loss) if count is None else None
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        _check(model, optimizers)
        check_plan(model, sizes, self._plan)
        cut = Cut.of(model, self._plan.blocks, self._pp * per_rank)
        ties, rewiring = ties_of(model, cut), Rewiring(model, optimizers)
        # A parameter that two stages share has one name, as in the whole model.
        self._first_names = {name: first for first, *others in tied_names(model) for name in others}
        start_from_rank_0(self._comm, model, optimizers)
        note = step_recorder(self._comm, model)
        self._mesh = device_mesh(self._comm, mesh_of(self._comm))
        self._count = self._pp * per_rank
        own = range(self._mesh.get_local_rank("pp"), self._count, self._pp)
        self.stages = cut.take(model, own)
        for stage in self.stages:
            divide(stage, self._mesh, self._plan, keep=True)
        rewiring.apply(self.stages)
        named = self.named_parameters()
        watch_steps(self._comm, named, optimizers, self._mesh, note=note, guard_every=guard_every)
        self._check_ties(ties)
        self._by_number = dict(zip(own, self.stages, strict=True))
        self._tied = TiedGradients(ties, self._by_number, self._mesh["pp"].get_group())
        for each in optimizers:
            each.register_step_pre_hook(self._before_step)
        self._taken: torch.Tensor | None = None
        self._size = 0
        # False after an error in a step, wherever it occurred.
        self._ended = True
        neighbours = itertools.pairwise(range(self._count))
        pairs = (*neighbours, *(tie.stages for tie in ties))
        connect(self._mesh, [(one % self._pp, other % self._pp) for one, other in pairs])
        self._schedules = Schedules(schedule, self._by_number, self._micro_batches, self._loss, self._mesh)

    def _check_ties(self, ties: Sequence[Tie]) -> None:
        """Refuse a parameter that two stages share and divide over tp differently."""
        named = (pair for part in self.stages for pair in part.named_parameters(remove_duplicate=False))
        own = {name: str(getattr(each, "placements", "")) for name, each in named}
        everyone = {name: form for each in self._comm.allgather_object(own) for name, form in each.items()}
        for tie in ties:
            one, other = tie.names
            if everyone[one] != everyone[other]:
                refuse_tie(one, other)

    @property
    def last_stage(self) -> nn.Module:
        """The stage that computes the loss, on its rank."""
        return self._by_number[self._count - 1]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, each once, with their names in the model."""
        own = {id(each): (name, each) for stage in reversed(self.stages) for name, each in stage.named_parameters()}
        for name, each in own.values():
            yield self._first_names.get(name, name), each

    def step(
        self,
        inputs: torch.Tensor,
        target: torch.Tensor,
        *,
        scale: float = 1.0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> float:
        """Forward and backward passes of a batch; adds the mean gradient over the whole batch to the parameters'.
        Collective.

        Each rank computes its own rows of a batch of ``ht.shard``. Plain tensors are this rank's samples, the same on
        the ranks of one pp group; gradients are then averaged over the other ranks.

        Args:
            inputs: samples along the first dimension.
            target: one target per sample, along the first dimension.
            scale: a factor of the loss, such as 1 / steps when gradients are accumulated.
            scaler: the GradScaler, for 16-bit training; an overflow in one stage counts as an overflow in all.

        Returns:
            The mean loss over the whole batch, on every rank, without the factors.
        """
        # A GradScaler keeps its scale where its first tensor is. On the CPU, its update would not wait for a GPU to
        # report an overflow.
        one = torch.ones((), device=self._mesh.device_type)
        factor = scale if scaler is None else scale * float(scaler.scale(one))
        self._check_ended()
        self._tied.restart()
        part = part_of(inputs, target)
        # A smaller batch is padded, so that it needs no schedule of its own.
        self._size = max(self._size, math.ceil(len(part.inputs) / self._micro_batches))
        with self._in_stages(part):
            found = self._run(part, self._size, factor, trains=True)
        self._tied.add_up()
        self._ended = True
        self.accept_gradients()
        if scaler is not None and scaler.is_enabled():
            self._taken = None  # The scaler is about to change the gradients.
        return found / factor

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, target: torch.Tensor) -> float:
        """The mean loss of a batch, as :meth:`step` returns it, without a backward pass. Collective."""
        part = part_of(inputs, target)
        found = self._run(part, math.ceil(len(part.inputs) / self._micro_batches), 1.0, trains=False)
        for stage in self.stages:
            reshard(stage)
        return found

    def _run(self, part: Part, size: int, factor: float, *, trains: bool) -> float:
        """The mean loss over the whole batch, times a factor, computed in micro-batches of ``size`` samples."""
        whole = self._cut_up(part, size, factor)
        losses: list[torch.Tensor] = []
        inputs = [whole] if 0 in self._by_number else []
        last = self._count - 1 in self._by_number
        given: dict[str, Any] = {"target": self._batch.target, "losses": losses} if last else {}
        schedule = self._schedules.of(size, part.inputs, part.target, trains=trains)
        self._ended = self._ended and not trains
        run = schedule.step if trains else schedule.eval
        try:
            run(*inputs, return_outputs=False, **given)
        except RuntimeError as error:
            if own := _own_error(error):
                raise own from None
            raise
        return self._everyone(losses)

    def _cut_up(self, part: Part, size: int, factor: float) -> torch.Tensor:
        """Divide a batch into micro-batches of one size, the last ones padded; returns the padded inputs."""
        if self._means is not None:
            self._means.begin()
        samples, rows = len(part.inputs), size * self._micro_batches
        counts = [min(max(samples - start, 0), size) for start in range(0, rows, size)]
        # The padding is cut off again before the loss.
        factors = [(own, factor * part.weight * own / samples) for own in counts]
        if self._count_of is not None:
            # What turns the mean over the ranks of their sums into the mean of the batch.
            divisor = self._sum(float(self._count_of(part.target))) / self._comm.size
            factors = [(own, factor / divisor if divisor else 0.0) for own in counts]
        self._batch = MicroBatches(size, padded(part.target, rows), factors)
        return padded(part.inputs, rows)

    def _everyone(self, losses: Sequence[torch.Tensor]) -> float:
        """The mean over the ranks that compute different samples, on every rank."""
        own = float(torch.stack([each.detach().double() for each in losses]).sum()) if losses else 0.0
        return self._sum(own) / (self._comm.size // self._pp)

    def _sum(self, own: float) -> float:
        return float(self._comm.allreduce(np.array([own]), "sum")[0])

    @contextmanager
    def _in_stages(self, part: Part) -> Iterator[None]:
        """A context manager in which stages compute rows: schedules ask autograd for this rank's gradients, and stages
        draw random numbers of its own, except for plain tensors."""
        running.asks = True
        try:
            with RankStream(stream_of(self._comm), self._any) if part.shared else nullcontext():
                yield
        finally:
            running.asks = False

    def _any(self, drawn: list[bool]) -> list[bool]:
        """Whether any rank has drawn: the others' stages may have no dropout."""
        return [bool(each) for each in self._comm.allreduce(np.array(drawn, np.float64), "max")]

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch, with its share of the whole batch's mean."""
        # PyTorch passes no number of the micro-batch; the target's place in the batch's memory tells it.
        batch = self._batch
        offset = target.data_ptr() - batch.target.data_ptr()
        count, factor = batch.factors[offset // (batch.size * batch.target.stride(0) * target.itemsize)]
        if count == 0:
            return output[:0].sum()
        found = self._loss_of(output[:count], target[:count])
        # In an evaluation a loss may also collect its values, as that of recipes does.
        if self._means is not None and torch.is_grad_enabled() and found.numel() == 1:
            self._means.check(output[:count], target[:count])
        return found * factor

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradients of all stages so that the norm over all of them is at most ``max_norm``. Collective.

        ``torch.nn.utils.clip_grad_norm_`` knows only this rank's stages.

        Returns:
            The norm before clipping, the same on every rank.
        """
        total = self.grad_norm()
        parameters = [each for _, each in self.named_parameters() if each.grad is not None]
        if parameters:  # The stages of a rank may be frozen.
            norm = torch.tensor(total, dtype=parameters[0].dtype, device=parameters[0].device)
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        if self._taken is not None:
            self.accept_gradients()
        return total

    def grad_norm(self) -> float:
        """The norm over the gradients of all stages, the same on every rank. Collective."""
        parameters = [each for _, each in self.named_parameters() if each.grad is not None]
        counted = [cast(torch.Tensor, each.grad) for each in parameters if not self._tied.is_copy(each)]
        own = torch.nn.utils.get_total_norm(counted)
        own = own.full_tensor() if hasattr(own, "full_tensor") else own
        return math.sqrt(self._sum(float(own) ** 2) / (self._comm.size // self._pp))

    def accept_gradients(self) -> None:
        """Take the gradients as they are, after the script changed them element by element (``clip_grad_value_``)."""
        self._taken = self._sample()

    def _sample(self) -> torch.Tensor | None:
        """A few numbers of each gradient, which clipping by a norm would change. Version counters do not show that."""
        gradients = (getattr(each.grad, "_local_tensor", each.grad) for _, each in self.named_parameters())
        numbers = [each.detach().flatten()[:_SAMPLED] for each in gradients if each is not None]
        return torch.cat(numbers).nan_to_num() if numbers else None

    def _check_ended(self) -> None:
        if not self._ended:
            refuse_ended()

    def _before_step(self, *_: Any) -> None:
        self._check_ended()
        # Without gradients, as after zero_grad(), nothing was clipped.
        now = self._sample()
        if self._taken is not None and now is not None and not torch.equal(now, self._taken):
            raise HpctrainError(
                "HT-pipeline-gradients-changed",
                "the gradients were changed after pipeline.step(): torch.nn.utils.clip_grad_norm_ takes "
                "the norm of this rank's stages alone",
                "pipeline.clip_grad_norm_(max_norm); after a change element by element, call "
                "pipeline.accept_gradients()",
                exit_code=1,
            )


def _own_error(error: BaseException | None) -> HpctrainError | None:
    """The HpctrainError of a stage within the error that PyTorch's schedules wrap it in; None for other errors."""
    while error is not None and not isinstance(error, HpctrainError):
        error = error.__cause__
    return error


def _check(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    check_model(model)
    for each in optimizers:
        check_optimizer(each)
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise HpctrainError(
                "HT-pipeline-not-for-model",
                "{name!r} normalises over all ranks, and the ranks of other stages do not have it",
                "use nn.LayerNorm or nn.GroupNorm in a pipeline",
                name=name,
            )
