"""Make a PyTorch model and its optimizer use a communicator."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
import torch
import xxhash

from hpctrain.adapters.guard import Checksums, Guard, Values
from hpctrain.adapters.torch.broadcast import broadcast_model, broadcast_optimizer, check_same_model
from hpctrain.adapters.torch.reducer import GradientReducer, keep, reducers
from hpctrain.adapters.torch.sparse import sparse_parameters
from hpctrain.comm import Communicator, current
from hpctrain.errors import HpctrainError, nearest

Optimizers = TypeVar("Optimizers", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])
ModelT = TypeVar("ModelT", bound=torch.nn.Module)
Compression = Literal["none", "fp16", "bf16"]

_guards: weakref.WeakKeyDictionary[torch.optim.Optimizer, Guard] = weakref.WeakKeyDictionary()
_WIRE = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def distribute(
    model: ModelT,
    optimizer: Optimizers,
    *,
    comm: Communicator | None = None,
    bucket_mb: float = 25.0,
    compression: Compression = "none",
    guard_every: int = 100,
) -> tuple[ModelT, Optimizers]:
    """Let ``backward()`` leave the mean gradient over all ranks in ``parameter.grad``.

    Model and optimizer are the ones that were given, their classes and arguments untouched; every rank starts from
    rank 0's parameters, buffers and optimizer state. Parameters are reduced if they require a gradient at this moment;
    an optimizer that updates others stops with an error at its first step. As in DistributedDataParallel with
    ``gradient_as_bucket_view``, ``parameter.grad`` can lie in a buffer that the next backward pass writes again: clone
    a gradient that you keep. With the backend mpi that buffer is gone after :func:`hpctrain.shutdown`: parameters get
    copies of their gradients then, and a tensor that was taken from ``parameter.grad`` before must not be used.

    Args:
        model: the same on every rank.
        optimizer: one, or a list of several.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
        bucket_mb: gradients are reduced in groups of about this many MB (10^6 bytes).
        compression: the gradients' type on the wire. In fp16 their sum over the ranks must stay below 65504, with the
            backend mpi only their mean, and the share of each node in it: it adds up in float32.
        guard_every: steps between two proofs that all ranks hold equal parameters.

    Raises:
        HpctrainError: no model or no optimizer, ranks with different models, or a wrong setting.
    """
    optimizers = _optimizers(model, optimizer)
    if compression not in _WIRE:
        raise HpctrainError(f"unknown compression {compression!r}", nearest(compression, _WIRE))
    if guard_every < 1 or not bucket_mb > 0:
        raise HpctrainError(f"guard_every={guard_every} and bucket_mb={bucket_mb:g} must be above 0")
    comm = comm or current()
    check_same_model(comm, model)
    broadcast_model(comm, model)
    for each in optimizers:
        broadcast_optimizer(comm, each)
    known = set().union(*(reducer.managed for reducer in reducers()))
    fresh = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if fresh:
        wire = _WIRE[compression]
        sparse = sparse_parameters(model)
        keep(GradientReducer(comm, fresh, sparse=sparse, bucket_bytes=bucket_mb * 1e6, wire=wire), model)
        guard = _guard(comm, model, every=guard_every)
        optimizers[0].register_step_post_hook(lambda *_: guard.step_done())
        _guards[optimizers[0]] = guard
    for each in optimizers:
        each.register_step_pre_hook(_check_step)
    return model, optimizer


def _optimizers(model: object, optimizer: object) -> list[torch.optim.Optimizer]:
    if not isinstance(model, torch.nn.Module):
        raise HpctrainError(f"{type(model).__name__} is not a torch.nn.Module", "ht.distribute(model, optimizer)")
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [each for each in given if isinstance(each, torch.optim.Optimizer)]
    if not optimizers or len(optimizers) < len(given):
        raise HpctrainError(
            f"{optimizer!r} is not a torch.optim.Optimizer, nor a list of them", "ht.distribute(model, optimizer)"
        )
    return optimizers


def _check_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Before each update: refuse gradients that are this rank's alone.

    Raises:
        HpctrainError: a parameter that no call of ``distribute`` saw, or a backward pass that did not reach its end.
    """
    everyone = reducers()
    if any(reducer.interrupted for reducer in everyone):
        raise HpctrainError(
            "an error ended a backward pass before its gradients were reduced, so the ranks no longer agree",
            "let an error in backward() end the run",
            exit_code=1,
        )
    reduced = set().union(*(reducer.managed for reducer in everyone))
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None and id(parameter) not in reduced:
            raise HpctrainError(
                f"the optimizer updates a parameter of shape {tuple(parameter.shape)} whose gradient is not reduced: "
                "it belongs to no model that ht.distribute got, or did not require a gradient then",
                "give ht.distribute every model that the optimizer updates, with all its trainable layers unfrozen",
                exit_code=1,
            )


def statistics(model: torch.nn.Module) -> GradientReducer:
    """The reducer of a model, for its ``timeline`` and ``communication_seconds``."""
    own = {id(parameter) for parameter in model.parameters()}
    for reducer in reducers():
        if reducer.managed & own:
            return reducer
    raise HpctrainError("this model was not given to ht.distribute")


def guard_of(optimizer: torch.optim.Optimizer) -> Guard:
    """What proves that the parameters of ``distribute``'s first optimizer stay equal.

    Raises:
        KeyError: it was not given to ``distribute``, or without parameters of its own.
    """
    return _guards[optimizer]


def checksums(tensors: Sequence[torch.Tensor]) -> Checksums:
    """One integer a tensor: its hash (XXH3), on a GPU the sum of its bits. One flipped bit changes either."""
    return np.array([_checksum(tensor.detach().contiguous().view(-1)) for tensor in tensors], dtype=np.int64)


def _checksum(flat: torch.Tensor) -> int:
    if flat.device.type == "cpu":
        # As fast as the memory is read, four times as fast as a sum of 32-bit words. 64-bit words would not do for a
        # sum: two flipped top bits cancel in it.
        return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data) - (1 << 63)
    words = flat.view(torch.int32) if flat.element_size() % 4 == 0 else flat.view(torch.uint8)
    return int(words.sum(dtype=torch.int64))


def _guard(comm: Communicator, model: torch.nn.Module, *, every: int) -> Guard:
    """Over all parameters: one that is unfrozen later, and then not reduced, is caught by it."""
    names, tensors = zip(*model.named_parameters(), strict=True)

    def values(index: int) -> Values:
        tensor = tensors[index].detach().cpu()
        # NumPy has no bfloat16; every one is a float32.
        own: Values = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return own

    return Guard(comm, names, lambda: checksums(tensors), values, every=every)
