"""Traces the model of a user's script while the script computes its first step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from hpctrain.common.errors import HpctrainError
from hpctrain.common.workloads.workload import Sample, Workload
from hpctrain.worker.adapters.torch import no_sync
from hpctrain.worker.adapters.torch.trainable import record_of
from hpctrain.worker.tracing.network_trace import workload
from hpctrain.worker.tracing.recorder import Access, Allocation, Operator, OpTrace, Recorder


class ScriptTracer:
    """Records the first training step of the first model that ``ht.distribute`` gets.

    It begins with the model's forward pass and ends with the optimizer's step, or with another forward pass after a
    backward pass, where gradients are accumulated.

    Args:
        done: called with the workload; it has to end the process, since the training must not go on.
    """

    def __init__(self, done: Callable[[Workload], None]) -> None:
        self._done = done
        self._recorder: Recorder | None = None
        self._model: torch.nn.Module | None = None
        self._sample = Sample(shape=(), dtype="")
        self._samples = 0
        self._watching = ExitStack()
        torch.nn.modules.module.register_module_forward_pre_hook(self._entered)
        register_optimizer_step_pre_hook(lambda *_: self._finish())

    def _entered(self, module: torch.nn.Module, inputs: Any) -> None:
        if module is self._model and self._seen_backward:
            self._finish()
        if self._recorder is None and record_of(module) and module.training and torch.is_grad_enabled():
            self._begin(module, inputs)

    @property
    def _seen_backward(self) -> bool:
        return self._recorder is not None and any(each.backward for each in self._recorder.recording.operators)

    def _begin(self, model: torch.nn.Module, inputs: Any) -> None:
        tensors = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor) and each.dim()]
        if not tensors or not len(tensors[0]):
            raise HpctrainError(
                "HT-trace-not-possible",
                "{model} is called without a tensor whose dimension 0 is the samples, so what a sample "
                "takes is unknown",
                "give the batch as the first argument, or trace the network in Python: ht.trace(model, batch, loss)",
                model=type(model).__name__,
            )
        first = tensors[0]
        self._samples, self._model = len(first), model
        self._sample = Sample(shape=tuple(first.shape[1:]), dtype=str(first.dtype).removeprefix("torch."))
        model.zero_grad(set_to_none=True)
        self._recorder = Recorder(model, inputs)
        # No reduction, so that gradients stay where autograd puts them.
        self._watching.enter_context(no_sync())
        self._watching.enter_context(self._recorder.watching(within_model=True))

    def _finish(self) -> None:
        if not self._seen_backward:
            return
        assert self._recorder is not None
        assert self._model is not None
        self._watching.close()
        recording = self._recorder.recording
        both = [_without_samples(recording, self._model, self._samples), recording]
        name = type(self._model).__name__
        self._done(workload(name, both, batches=(0, self._samples), sample=self._sample, model=self._model))


def _without_samples(recording: OpTrace, model: torch.nn.Module, samples: int) -> OpTrace:
    """What a recording would be without samples: weights, their gradients, and memory with the shape of a weight.

    In a single step, only shapes show what depends on the batch: tensors whose dimension 0 is the batch's size do.
    """
    shapes = {tuple(sorted(parameter.shape)) for parameter in model.parameters()}
    gradients = {memory.number for memory in recording.gradients.values()}

    def fixed(memory: Allocation) -> bool:
        if memory.number in recording.samples:
            return False
        known = not memory.own or memory.number in gradients
        return known or (memory.shape[:1] != (samples,) and tuple(sorted(memory.shape)) in shapes)

    memories = [each if fixed(each) else replace(each, nbytes=0) for each in recording.memories]

    def left(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(
            replace(each, memory=memories[each.memory.number], nbytes=each.nbytes if fixed(each.memory) else 0)
            for each in accesses
        )

    def without(operator: Operator) -> Operator:
        return replace(operator, flops=0, reads=left(operator.reads), writes=left(operator.writes))

    return replace(
        recording,
        operators=[without(each) for each in recording.operators],
        saved=[(node, memories[memory.number]) for node, memory in recording.saved],
        memories=memories,
        gradients={name: memories[memory.number] for name, memory in recording.gradients.items()},
        outputs=0,
    )
