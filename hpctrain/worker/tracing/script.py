"""Traces the model of a user's script while the script computes its first step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpctrain.common.errors import HpctrainError
from hpctrain.common.workloads.workload import Workload
from hpctrain.worker.adapters.torch import no_sync
from hpctrain.worker.adapters.torch.trainable import record_of
from hpctrain.worker.tracing.network_trace import workload
from hpctrain.worker.tracing.recorder import Allocation, Recorder, tensors_of


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
        self._first = torch.empty(0)
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
        tensors = [tensor for tensor in tensors_of(inputs) if tensor.dim()]
        if not tensors or not len(tensors[0]):
            raise HpctrainError(
                "HT-trace-not-possible",
                "{model} is called without a tensor whose dimension 0 is the samples, so what a sample "
                "takes is unknown",
                "give the batch as the first argument, or trace the network in Python: ht.trace(model, batch, loss)",
                model=type(model).__name__,
            )
        self._first, self._model = tensors[0].detach(), model
        model.zero_grad(set_to_none=True)
        self._recorder = Recorder(model, inputs)
        # No reduction, so that gradients stay where autograd puts them.
        self._watching.enter_context(no_sync())
        self._watching.enter_context(self._recorder.watching(within_model=True))

    def _finish(self) -> None:
        if not self._seen_backward:
            return
        assert self._recorder is not None and self._model is not None
        self._watching.close()
        shapes = {tuple(sorted(parameter.shape)) for parameter in self._model.parameters()}
        samples = len(self._first)

        def grows(memory: Allocation) -> bool:
            # In a real step only shapes tell: what has the shape of a weight is one's copy, unless it begins with the
            # batch's size.
            return memory.shape[:1] == (samples,) or tuple(sorted(memory.shape)) not in shapes

        self._done(workload(type(self._model).__name__, self._recorder.recording, self._model, self._first, grows))
