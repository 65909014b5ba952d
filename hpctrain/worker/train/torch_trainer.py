"""A recipe's model and optimizer in PyTorch."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.common.checkpoints.layout import STATISTICS
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sync import is_local
from hpctrain.worker import models
from hpctrain.worker.adapters.data_ranks import data_place
from hpctrain.worker.adapters.guard import Guard
from hpctrain.worker.adapters.torch import average_statistics, distribute, no_sync, statistics
from hpctrain.worker.adapters.torch.guarding import are_finite, values_of
from hpctrain.worker.adapters.torch.optimizer_contents import guard_of, load_optimizer, optimizer_tensors
from hpctrain.worker.adapters.torch.tensor_pieces import array_of, is_dtensor, pieces_of, tensor_of
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.models.torch_batch_norm import batch_norms
from hpctrain.worker.train.local_steps import OuterStep
from hpctrain.worker.train.state import GUARD_STEPS, LazyState
from hpctrain.worker.train.torch_average import TorchAverage
from hpctrain.worker.train.torch_chunked_loss import chunk_gradient
from hpctrain.worker.train.torch_compile import compile_network, is_compiled
from hpctrain.worker.train.torch_finetuning import freeze, load_weights
from hpctrain.worker.train.torch_forward import TorchForward, TorchInputs, mixed, rank_device
from hpctrain.worker.train.torch_rules import make_optimizer, scale_gradients, total_norm
from hpctrain.worker.train.trainer import NOTHING, Trainer

# The first factor of losses in fp16; halved when a gradient overflows, doubled after 2000 steps in which none does.
_INITIAL_SCALE = 2.0**16
MODEL, _SCALER, _AVERAGE = "model.", "scaler.", "average."


class TorchTrainer(Trainer):
    """The PyTorch side of :class:`hpctrain.worker.train.trainer.Trainer`."""

    framework = "torch"

    def __init__(self, recipe: Recipe, comm: Communicator) -> None:
        super().__init__(recipe, comm)
        torch.manual_seed(recipe.seed)
        self._device = rank_device(comm)
        self.gpu = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None
        model: torch.nn.Module = models.build(
            recipe.model, "torch", comm, at_once=recipe.batch.at_once(data_place(comm).ranks)
        ).to(self._device)
        if recipe.mesh.replicates_only and self._has_channels_last():
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        drawn = load_weights(model, recipe.model, comm) if recipe.model.init_from else ()
        self._still = freeze(model, recipe.model.frozen, drawn)
        self._inputs = TorchInputs(self._device, recipe.images)
        self._forward = TorchForward(recipe, self._device)
        self._scaler = torch.amp.GradScaler(
            self._device.type, init_scale=_INITIAL_SCALE, enabled=recipe.precision == "fp16"
        )
        self._clip_norm = recipe.optimizer.clip_norm
        optimizer = make_optimizer(recipe.optimizer, model, divided=not recipe.mesh.replicates_only)
        # Registered before distribute's hooks, one of which may find after the update that a rank died.
        optimizer.register_step_post_hook(self._updated)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model, self._optimizer = model, optimizer
        self.compiled, self._replays = is_compiled(recipe, comm, self._device), recipe.compile == "graphs"
        if self.compiled:
            compile_network(model, recipe, comm)
            compiled = torch.compile(chunk_gradient, dynamic=False)
            self._forward.loss = replace(self._forward.loss, of_logits=compiled)
        self._distribute(recipe)
        still = {module for each in self._still for module in each.modules()}
        # What is frozen normalises by its statistics, which a part of a step does not change.
        self._batch_norms = [norm for norm in batch_norms(model) if norm not in still]
        self._average = TorchAverage(self.model) if recipe.averaging else None
        read_first = self._average or self._scaler.is_enabled() or recipe.fault_tolerance.fault_tolerant
        # Given before it is read whether the gradients are finite, so that a GPU is not idle until the update comes:
        # by a flag there, PyTorch's fused kernels change nothing.
        self._can_update_early = bool(optimizer.defaults.get("fused")) and not read_first
        self._has_updated, self._updates_early = False, self._can_update_early and self._device.type == "cuda"
        self._mean_of_ranks: torch.Tensor | None = None
        self.outer = OuterStep(self, recipe.sync.outer) if is_local(recipe.sync) else None

    def _distribute(self, recipe: Recipe) -> None:
        """Make the model and its optimizer those of all ranks."""
        plan = None
        if recipe.sharding.recompute:
            # Imported here, as it takes a second.
            from hpctrain.worker.train.mesh_trainer import parallel_plan

            plan = parallel_plan(recipe)
        self.bucket_mb = recipe.communication.bucket_mb or self._comm.bucket_bytes / 1e6
        distribute(
            self.model,
            self._optimizer,
            comm=self._comm,
            bucket_mb=self.bucket_mb,
            compression=recipe.communication.compression,
            guard_every=recipe.guard.every,
            plan=plan,
        )
        self._statistics = statistics(self.model)

    def _has_channels_last(self) -> bool:
        """Whether the weights of convolutions lie in memory as images do, with which a GPU's kernels need no copies."""
        return self._device.type == "cuda"

    def _modules(self) -> Sequence[torch.nn.Module]:
        """This rank's part of the model: all of it, or stages of a pipeline."""
        return [self.model]

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Each parameter that this rank has a part of, once, with its name in the whole model."""
        return self.model.named_parameters()

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (buffer for module in self._modules() for buffer in module.named_buffers())

    @property
    def guard(self) -> Guard:
        return guard_of(self._optimizer)

    @property
    def communication_seconds(self) -> float | None:
        if self._comm.backend == "nccl":
            # The GPU waits, and not this process.
            return None
        return self._averaging_seconds if self.alone else self._statistics.communication_seconds

    def step(self, parts: Iterable[Samples], count: int, scale: float, learning_rate: float, sgd_share: float) -> float:
        self._prepare(learning_rate, sgd_share)
        losses = [self._backward(part, scale, number, count) for number, part in enumerate(parts, start=1)]
        gradients = values_of(self._gradients())
        # Read together: on a GPU a reading waits until it has done what it was given.
        numbers = torch.stack([number.to(self._device) for number in (*losses, *self._norms(gradients))])
        host = numbers.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream(self._device).record_event() if numbers.is_cuda else None
        # Also called before an update that is left out: the step counts only if all ranks have come this far.
        self.before_update()
        # The first update makes the optimizer's state, which one that changes nothing would leave as it finds it.
        early = self._updates_early and self._has_updated
        if early:
            self._update_unless(~numbers[len(losses) :].isfinite().all())
        if self._inputs.copies:
            self.meanwhile()
        if copied:
            copied.synchronize()
        finite = self._read(host.tolist(), len(losses), gradients)
        self._scaler.unscale_(self._optimizer)
        if not finite:
            # A factor of 1 or less does not make gradients overflow.
            self.faulty = not self._scaler.is_enabled() or self._scaler.get_scale() <= 1
            self.own_finite = self.own_finite and not self.alone
        if not early:
            self._update() if finite else self._leave_out()
        return self.loss

    def _prepare(self, learning_rate: float, sgd_share: float) -> None:
        self._averaging_seconds = 0.0
        if self._remembers:
            self._before = (self.updates, self._forward_state())
        for module in self._modules():
            # train() visits every layer, so it is called only where it changes something.
            if not module.training:
                module.train()
        for module in self._still:
            module.eval()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["factor"]
            if "sgd_share" in group:
                group["sgd_share"] = sgd_share
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        if not self._replays:
            self._optimizer.zero_grad()
            return
        # A CUDA graph overwrites the gradients that it returned before, so that each is added to memory of its own.
        for parameter in self._trained():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._optimizer.zero_grad(set_to_none=False)

    def _read(self, read: list[float], losses: int, gradients: list[torch.Tensor]) -> bool:
        """Take over a step's losses and the norms of its gradients; returns whether all gradients are finite."""
        self.loss = sum(read[:losses])
        self.own_finite = math.isfinite(self.loss)
        return self._finite(gradients, sum(read[losses:]))

    def place(self, samples: Samples) -> Samples:
        return self._inputs.place(samples)

    def vector(self) -> NDArray[np.float32]:
        return torch.cat(self._flat()).cpu().numpy()

    @torch.no_grad()
    def set_vector(self, vector: NDArray[np.float32]) -> None:
        trained = self._trained()
        parts = torch.from_numpy(vector).to(self._device).split([parameter.numel() for parameter in trained])
        for parameter, part in zip(trained, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))

    def mean_vector(self) -> NDArray[np.float32]:
        own, engine = self._flat(), self._comm.torch()
        if self._mean_of_ranks is None:
            self._mean_of_ranks = engine.allocate(sum(map(len, own)), own[0].dtype, own[0].device)
        torch.cat(own, out=self._mean_of_ranks)
        begin = time.perf_counter()
        engine.allreduce(self._mean_of_ranks, "hpctrain.parameters").wait()
        self._averaging_seconds = time.perf_counter() - begin
        return self._mean_of_ranks.cpu().numpy()

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _flat(self) -> list[torch.Tensor]:
        """The trained parameters, each in one dimension."""
        return [parameter.detach().reshape(-1) for parameter in self._trained()]

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's gradients, joined where they are reduced."""
        if self.alone:
            return [each.grad for each in self.model.parameters() if each.grad is not None]
        return self._statistics.gradients()

    def _norms(self, gradients: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The norm of each of the gradients, or where they are clipped, of all gradients of the model together."""
        if self._clip_norm:
            self._norm = self._total_norm()
            return [self._norm]
        # The largest gradient overflows only if it is not finite, but on CPUs takes ten times as long.
        return torch._foreach_norm(gradients, math.inf if self._updates_early else 2.0) if gradients else []

    def _total_norm(self) -> torch.Tensor:
        """The norm of all gradients of the model, the same on all ranks that have parts of them."""
        return total_norm(self.model.parameters())

    def _finite(self, gradients: list[torch.Tensor], norm: float) -> bool:
        """Whether all gradients are finite; for reduced gradients all ranks get the same answer.

        Args:
            gradients: all of this rank's.
            norm: the sum of what :meth:`_norms` returned.
        """
        # Clipping would make NaN of finite gradients whose norm overflows.
        return math.isfinite(norm) if self._clip_norm else are_finite(gradients, norm)

    def _update_unless(self, faulty: torch.Tensor) -> None:
        """Update, or count the update and change nothing, by a flag that is on the device."""
        optimizer: Any = self._optimizer
        # What a GradScaler sets, too.
        optimizer.found_inf = faulty.float()
        try:
            self._update()
        finally:
            del optimizer.found_inf

    def _leave_out(self) -> None:
        """Count an update that changes nothing."""
        self._count()
        # After an update the optimizer's hook calls it.
        self.guard.step_done()

    def _update(self) -> None:
        self._clip()
        # Not by the scaler, which would read once more whether gradients are finite.
        self._optimizer.step()

    def _clip(self) -> None:
        if self._clip_norm:
            # The norm is that of gradients that were scaled.
            norm = self._norm / self._scaler.scale(torch.ones_like(self._norm))
            gradients = (each.grad for _, each in self._parameters() if each.grad is not None)
            scale_gradients(gradients, self._clip_norm, norm)

    def rebuild(self) -> None:
        self._statistics.rebuild()
        super().rebuild()

    @torch.no_grad()
    def undo_forward(self) -> None:
        values = self._before[1]
        for name, buffer in self._buffers():
            if name in values:
                buffer.copy_(values[name])

    def average_statistics(self) -> None:
        average_statistics(self.model, self._comm)
        if self._average:
            self._average.average_statistics(self._comm)

    def take_average(self) -> None:
        if self._average:
            self._average.take()

    @torch.no_grad()
    def evaluate(self, samples: Samples) -> tuple[float, float]:
        self.model.eval()
        images, labels = self._inputs.tensors(samples)
        model = self._average.output if self._average else self.model
        return self._forward.score(model, images, labels)

    def state(self) -> LazyState:
        tensors: dict[str, torch.Tensor] = {f"{MODEL}{name}": each for name, each in self._parameters()}
        kept = optimizer_tensors(self._parameters(), self._optimizer)
        tensors |= {f"{self._moments}{name}": each for name, each in kept.items()}
        pieces = {name: pieces_of(each) for name, each in tensors.items() if self._is_divided(each)}
        tensors = {name: each for name, each in tensors.items() if name not in pieces}
        tensors |= {f"{STATISTICS}{name}": buffer for name, buffer in self._buffers()}
        tensors |= self._averages()
        scaler = {f"{_SCALER}{name}": np.array(value) for name, value in self._scaler.state_dict().items()}
        steps, outer = {GUARD_STEPS: np.array(self.guard.steps)}, self.outer.state if self.outer else {}
        return LazyState(
            scaler | steps | outer,
            {name: (tensor.nbytes, partial(array_of, tensor)) for name, tensor in tensors.items()},
            pieces or None,
        )

    def _is_divided(self, tensor: torch.Tensor) -> bool:
        """Whether other ranks have other parts of a tensor; if any tensor is divided, one is on every rank."""
        return is_dtensor(tensor)

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self.before_update()
        self._before = NOTHING
        tensors = {name: tensor_of(state[name]) for name in state if not name.startswith((self._moments, _SCALER))}
        kept = dict(self.model.named_buffers())
        for name, tensor in self._averages().items():
            if name in tensors or name.startswith(_AVERAGE):
                tensor.copy_(tensors.pop(name))
        self.model.load_state_dict(
            kept | self._shared(_with_prefix(MODEL, tensors)) | _with_prefix(STATISTICS, tensors)
        )
        if self.outer:
            self.outer.restore(state)
        self._restore_rest(state)

    def _restore_rest(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore all of a state except the model."""
        load_optimizer(self._parameters(), self._optimizer, state, self._moments)
        if self._scaler.is_enabled():
            scaler = {name: tensor_of(state[name]) for name in state if name.startswith(_SCALER)}
            self._scaler.load_state_dict({name: value.item() for name, value in _with_prefix(_SCALER, scaler).items()})
        self.guard.steps = int(state[GUARD_STEPS])

    def _shared(self, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters that are saved once, under each of their names."""
        first = {parameter: name for name, parameter in self.model.named_parameters()}
        names = ((name, first[each]) for name, each in self.model.named_parameters(remove_duplicate=False))
        return parameters | {name: parameters[own] for name, own in names if own in parameters}

    def _averages(self) -> dict[str, torch.Tensor]:
        """The averages by their names in a state."""
        return self._average.named(_AVERAGE) if self._average else {}

    def _updated(self, *_: object) -> None:
        self.faulty, self._has_updated = False, True
        if self._average and self.average_weight is not None:
            self._average.update(self.average_weight)
        self._count()

    def _count(self) -> None:
        """Count an update, to which the scaler's belongs: both are done, or neither."""
        self._scaler.update()
        self.updates += 1

    def _forward_state(self) -> dict[str, torch.Tensor]:
        """The state that a step changes before its update: statistics of batch normalisation."""
        return {name: buffer.clone() for name, buffer in self._buffers()}

    def _backward(self, samples: Samples, scale: float, number: int, count: int) -> torch.Tensor:
        images, labels = self._inputs.tensors(samples)
        for norm in self._batch_norms:
            norm.begin_part(number, count)
        with contextlib.nullcontext() if number == count and not self.alone else no_sync():
            if samples.mixture:
                images = mixed(images, samples.mixture)
            loss_sum = self._forward.loss_sum(self.model, images, labels.flatten(), samples.mixture)
            factor = scale / labels.shape[1:].numel()
            own = loss_sum.detach() * factor
            # A loss that is not finite has no gradient that may be used, although it can have a finite one: what it is
            # multiplied by becomes NaN.
            self._scaler.scale(loss_sum).backward(own * 0 + factor)
        return own


def _with_prefix(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
