"""Traces a network: a step with each of two batches, on tensors that have shapes but no memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.common.errors import HpctrainError
from hpctrain.common.workloads.workload import Sample, Workload
from hpctrain.worker.tracing.layers import layers
from hpctrain.worker.tracing.recorder import OpTrace, Recorder

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
    tensors = [each for each in tree_leaves(batch) if isinstance(each, torch.Tensor)]
    if not tensors or not tensors[0].dim() or not len(tensors[0]):
        raise HpctrainError(
            "HT-trace-not-possible",
            "the batch holds no tensor with samples along dimension 0",
            "ht.trace(model, (images, labels), loss)",
        )
    with _without_onednn(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        with FakeCopyMode(fake):
            copied = copy.deepcopy(model)
        copied.train()
        samples = len(tensors[0])

        def repeated(times: int) -> Batch:
            return tree_map(lambda each: _repeat(fake, each, times), batch)  # type: ignore[no-any-return]

        both = [_record(copied, repeated(times), loss) for times in (1, 2)]
    return workload(
        name or type(model).__name__,
        both,
        batches=(samples, 2 * samples),
        sample=Sample(shape=tuple(tensors[0].shape[1:]), dtype=str(tensors[0].dtype).removeprefix("torch.")),
        model=copied,
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
    name: str, both: list[OpTrace], *, batches: tuple[int, int], sample: Sample, model: torch.nn.Module
) -> Workload:
    """The workload that two recordings show."""
    first = next((each for each in model.parameters() if each.requires_grad), None)
    if first is None:
        raise HpctrainError(
            "HT-trace-not-possible",
            "{name} has no parameter that requires a gradient, and so nothing to train",
            name=name,
        )
    held = (each for each in itertools.chain(model.parameters(), model.buffers()) if not each.requires_grad)
    found = layers(both[0], both[1], batches=batches, item_bytes=first.element_size())
    return Workload(
        name=name,
        sample=sample,
        layers=found,
        buffers=sum(each.numel() for each in held),
        outputs=(both[1].outputs - both[0].outputs) // (batches[1] - batches[0]),
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


def _repeat(fake: FakeTensorMode, value: Any, times: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    own = value if isinstance(value, torch._subclasses.FakeTensor) else fake.from_tensor(value)
    return torch.cat([own] * times) if times > 1 and own.dim() else own
