"""Traces a network: one step on tensors that have shapes but no memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_map

from hpctrain.common.errors import HpctrainError
from hpctrain.common.workloads.workload import Sample, Workload
from hpctrain.worker.tracing.layers import layers
from hpctrain.worker.tracing.recorder import Allocation, OpTrace, Recorder, tensors_of

# Samples of the step: a prime that divides no size of a network, so that a memory grows with the samples if it is a
# multiple of it. Tensors without memory may have any number of rows.
_SAMPLES = 10_007

Batch = TypeVar("Batch")
Loss = Callable[[torch.nn.Module, Batch], torch.Tensor]


def trace(model: torch.nn.Module, batch: Batch, loss: Loss[Batch], *, name: str | None = None) -> Workload:
    """The workload of a training step of a PyTorch network. Computes nothing, and does not change the model.

    What a step does must not depend on the values of the samples, and must grow linearly with their number.

    Args:
        model: the network; neither its weights nor its device matter.
        batch: one batch of samples and labels, tensors in any tuple, list or dictionary, the samples along dimension
            0 of each and the network's input first.
        loss: gives a tensor of one number from model and batch, as
            ``lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])``.
        name: the workload's name, by default that of the model's class.

    Raises:
        HpctrainError: the model is not of PyTorch, the batch holds no tensors, or the step cannot be traced.
    """
    if not isinstance(model, torch.nn.Module):
        raise HpctrainError(
            "HT-only-in-pytorch",
            "{module}.{name} is not a torch.nn.Module, and only PyTorch networks can be traced",
            "for a Keras model, trace the same network in PyTorch",
            module=type(model).__module__,
            name=type(model).__name__,
        )
    tensors = tensors_of(batch)
    if not tensors or not tensors[0].dim() or not len(tensors[0]):
        remedy = "ht.trace(model, (images, labels), loss)"
        raise HpctrainError("HT-trace-not-possible", "the batch holds no tensor with samples along dimension 0", remedy)
    with _without_onednn(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        with FakeCopyMode(fake):
            copied = copy.deepcopy(model)
        copied.train()
        samples = len(tensors[0])
        # Rows along dimension 0 may be several for each sample.
        resized = tree_map(lambda each: _resized(fake, each, samples), batch)
        recording = _record(copied, resized, loss)
        first = tensors_of(resized)[0]
        if any(memory.nbytes and memory.nbytes % _SAMPLES**2 == 0 for memory in recording.memories):
            raise HpctrainError(
                "HT-trace-not-possible",
                "the step of {model} compares samples with each other, so its work does not grow with their number",
                "trace the network without that part of its loss",
                model=type(model).__name__,
            )
        return workload(
            name or type(model).__name__, recording, copied, first, lambda memory: memory.nbytes % _SAMPLES == 0
        )


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Disable oneDNN, in which a recurrent layer is one operator that hides its matrix products."""
    before, *_ = torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before, _fp32_precision=None)


def workload(
    name: str, recording: OpTrace, model: torch.nn.Module, batch: torch.Tensor, grows: Callable[[Allocation], bool]
) -> Workload:
    """The workload that a recording shows.

    Args:
        batch: the network's first input, the samples along dimension 0.
        grows: whether a memory that is neither of a weight nor of a sample would be larger with more samples.
    """
    trained = next((each for each in model.parameters() if each.requires_grad), None)
    if trained is None:
        raise HpctrainError(
            "HT-trace-not-possible",
            "{name} has no parameter that requires a gradient, and so nothing to train",
            name=name,
        )
    held = (each for each in itertools.chain(model.parameters(), model.buffers()) if not each.requires_grad)
    return Workload(
        name=name,
        sample=Sample(shape=tuple(batch.shape[1:]), dtype=str(batch.dtype).removeprefix("torch.")),
        layers=layers(recording, samples=len(batch), grows=grows, item_bytes=trained.element_size()),
        buffers=sum(each.numel() for each in held),
        outputs=recording.outputs // len(batch),
        source=f"torch {torch.__version__}",
    )


def _record(model: torch.nn.Module, batch: Any, loss: Loss[Any]) -> OpTrace:
    model.zero_grad(set_to_none=True)
    recorder = Recorder(model, batch)
    try:
        with recorder.watching():
            loss(model, batch).backward()
    except HpctrainError:
        raise
    except Exception as error:
        raise HpctrainError(
            "HT-trace-not-possible",
            "a training step of {model} cannot be traced: {kind}: {reason}",
            "what it does must not depend on the values of its samples (.item(), masks as indices)",
            model=type(model).__name__,
            kind=type(error).__name__,
            reason=str(error),
        ) from error
    return recorder.recording


def _resized(fake: FakeTensorMode, value: Any, samples: int) -> Any:
    """A tensor with the rows of :data:`_SAMPLES` samples in place of those of ``samples``."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    own = value if isinstance(value, torch._subclasses.FakeTensor) else fake.from_tensor(value)
    rows = len(own) * _SAMPLES // samples
    return own.new_empty((rows, *own.shape[1:]), requires_grad=own.requires_grad)
