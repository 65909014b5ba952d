"""Runs micro-batches through the stages of a pipeline.

PyTorch's stages learn the shapes of their messages from the first batch, and keep them. Here each kind of batch gets a
schedule of its own, and each step begins with one small message over the ranks of pp: whether all of them got
the same batch, and whether layers were frozen or unfrozen on any of them, which changes what is sent back.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.worker.adapters.torch.parallel.gathered import MissingGradients
from hpctrain.worker.adapters.torch.parallel.sharding import groups_of

# The schedule, and how many stages each rank has.
SCHEDULES: dict[str, tuple[type, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved_1f1b": (ScheduleInterleaved1F1B, 2),
}
# The most schedules kept. Each holds an activation and a gradient per micro-batch and neighbouring stage.
_KEPT = 8


def schedule_on(pp: int, schedule: str) -> str:
    """The schedule that runs on so many ranks: one rank alone has one stage, and nobody to wait for.

    Raises:
        HpctrainError: there is no such schedule.
    """
    if schedule not in SCHEDULES:
        raise HpctrainError(
            "HT-choice-unknown",
            "unknown pipeline schedule {schedule!r}",
            nearest(schedule, SCHEDULES),
            schedule=schedule,
        )
    return "gpipe" if pp == 1 else schedule


class Schedules:
    """The schedules of one pipeline, one for each kind of batch.

    Args:
        stages: this rank's stages by their numbers.
        micro_batches: how many a batch is cut into.
        loss: computes the loss of an output and its target.
    """

    def __init__(
        self, name: str, stages: Mapping[int, nn.Module], micro_batches: int, loss: Any, mesh: DeviceMesh
    ) -> None:
        self._name, self._stages, self._micro_batches, self._loss = name, stages, micro_batches, loss
        self._device, self._group = torch.device(mesh.device_type), mesh["pp"].get_group()
        self._made: OrderedDict[Any, Any] = OrderedDict()
        divided = {number: part for number, part in stages.items() if isinstance(part, FSDPModule)}
        self._missing = {number: MissingGradients(groups_of(part)) for number, part in divided.items()}
        self._trained: tuple[bool, ...] = ()

    def of(self, size: int, inputs: torch.Tensor, target: torch.Tensor, *, trains: bool) -> Any:
        """The schedule for micro-batches of ``size`` samples of a batch. Collective over the ranks of pp.

        Evaluations have schedules of their own: one for both would infer all shapes anew after each change.
        """
        settings = (size, trains, *_autocast(self._device.type))
        self._agree(settings, inputs, target)
        kind = (*settings, inputs.shape[1:], inputs.dtype)
        schedule = self._made.pop(kind, None)
        self._made[kind] = schedule = self._make() if schedule is None else schedule
        if len(self._made) > _KEPT:
            self._made.popitem(last=False)
        return schedule

    def _agree(self, settings: tuple[object, ...], inputs: torch.Tensor, target: torch.Tensor) -> None:
        trained = tuple(each.requires_grad for stage in self._stages.values() for each in stage.parameters())
        batch = (settings, inputs.shape, inputs.dtype, target.shape, target.dtype)
        code = zlib.crc32(str(batch).encode())
        values = torch.tensor([code, -code, trained != self._trained], dtype=torch.int64, device=self._device)
        dist.all_reduce(values, dist.ReduceOp.MAX, self._group)
        highest, lowest, changed = values.tolist()
        if highest != -lowest:
            raise HpctrainError(
                "HT-pipeline-different-batches",
                "the ranks of one pipeline got different batches, or their batches before this one differed: inputs of "
                "shape {shape} and targets of shape {target} here",
                "give the ranks of pp the same tensors, as loader = ht.shard(loader) does, within or without autocast",
                exit_code=1,
                shape=tuple(inputs.shape),
                target=tuple(target.shape),
            )
        self._trained = trained
        if changed:
            self._made.clear()

    def _make(self) -> Any:
        kind, per_rank = SCHEDULES[self._name]
        pp = dist.get_world_size(self._group)
        parts = [
            _Stage(stage, number, pp * per_rank, self._device, group=self._group)
            for number, stage in self._stages.items()
        ]
        for part in parts:
            part.missing = self._missing.get(part.stage_index)
        stages: Any = parts[0] if per_rank == 1 else parts
        return kind(stages, self._micro_batches, loss_fn=self._loss, scale_grads=False)


class _Stage(PipelineStage):
    """A stage that learns the shapes of its messages without a trace in the model.

    PyTorch's own runs a forward and a backward pass for that, partly on uninitialised numbers: batch norms would count
    them, FSDP2 would lose accumulated gradients, and gather and reduce more often than on ranks whose batches stay the
    same.
    """

    missing: MissingGradients | None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if not self.has_backward:
            return
        super().perform_reduce_grad(grad_scale_factor)
        if self.missing is not None:
            self.missing.take_back()

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        before = {name: each.clone() for name, each in module.named_buffers()}
        outputs = super()._compute_outputs(*args, module=module, **kwargs)
        with torch.no_grad():
            for name, each in module.named_buffers():
                each.copy_(before.get(name, each))
        return outputs

    def _backward_metadata_inference(self, loss_fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        # A stand-in for the script's loss, which may count its calls.
        return super()._backward_metadata_inference(loss_fn and (lambda output, *_: output.sum()), *args, **kwargs)

    def _compute_input_grads(self, outputs: Any, all_fwd_inputs: Any, grad_outputs: Any = None) -> Any:
        if any(isinstance(each, DTensor) for each in all_fwd_inputs):
            # Only a backward pass shows how its gradient is divided.
            return super()._compute_input_grads(outputs, all_fwd_inputs, grad_outputs)
        return tuple(torch.empty_like(each) if each.requires_grad else None for each in all_fwd_inputs)

    def _post_metadata_inference_cleanup(self) -> None:
        self._fwd_outputs_for_bwd_meta = self._fwd_inputs_for_bwd_meta = self._fwd_kwargs_tensors_for_bwd_meta = None

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not self.is_last:
            self._check(output)
        return output

    def _check(self, output: Any) -> None:
        """Refuse outputs unlike those of this kind's first micro-batch, which the next stage waits for.

        PyTorch compares only when it debugs, and never whether there is a gradient to send back.
        """
        outputs = output if isinstance(output, tuple) else (output,)
        now = [(tuple(part.shape), part.dtype, part.requires_grad) for part in outputs]
        first = [(tuple(part.shape), part.dtype, part.requires_grad) for part in self._stage_meta.outputs or ()]
        if now != first:
            raise HpctrainError(
                "HT-pipeline-stage-varies",
                "stage {stage} of the pipeline returned {now} (shape, type, whether it has a gradient) "
                "for inputs that gave {first} before",
                "let what a block returns depend on its input's shape and type alone, and freeze layers by "
                "requires_grad_(False) rather than by detach()",
                exit_code=1,
                stage=self.stage_index,
                now=now,
                first=first,
            )


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    """The autocast settings, which decide the type of the stages' messages."""
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def connect(mesh: DeviceMesh, pairs: Iterable[tuple[int, int]]) -> None:
    """Open all connections that schedules use, before the first step. Collective.

    NCCL makes a group's communicator at its first collective, with all of its ranks; one of two ranks at the first
    message between them that is not part of a batch; and the connections within one when they are first used. All block
    the rank until the others take part, which in the middle of a schedule may wait for this one. PyTorch sends batches
    of one kind as single messages, and mixed ones over the group's communicator, so each pair needs both, in an order
    on which all ranks agree.

    Args:
        pairs: of ranks within pp that have neighbouring stages or share a parameter.
    """
    token, received = torch.zeros(1, device=mesh.device_type), torch.zeros(1, device=mesh.device_type)
    for axis in mesh.mesh_dim_names or ():
        if mesh[axis].size() > 1:
            dist.all_reduce(token, group=mesh[axis].get_group())
    group = mesh["pp"].get_group()
    here = dist.get_rank(group)
    for pair in meetings(pairs, here):
        peer = sum(pair) - here
        for source in pair:
            if source == here:
                dist.send(token, group=group, group_dst=peer)
            else:
                dist.recv(received, group=group, group_src=peer)
        both = [
            dist.P2POp(dist.isend, token, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()


def meetings(pairs: Iterable[tuple[int, int]], here: int) -> list[tuple[int, int]]:
    """The pairs with this rank, each once, in the order in which it meets the others.

    All ranks take the pairs in one order, so the first pair that has not met finds both of its ranks free.
    """
    different = {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}
    return sorted(pair for pair in different if here in pair)
