"""Loops of different length: ranks without further batches take part in the others' reductions until all are done.

The method is that of DistributedDataParallel's ``join``
(https://docs.pytorch.org/tutorials/advanced/generic_join.html), and the optimizer's state ends equal too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.broadcast import broadcast_model, broadcast_optimizer
from hpctrain.worker.adapters.torch.trainable import Trained, reducers_of, trained
from hpctrain.worker.adapters.torch.turns import Turns, turns_of


@contextmanager
def join(
    model: torch.nn.Module | Sequence[torch.nn.Module], *, divide_by_initial_world_size: bool = True
) -> Iterator[None]:
    """A context manager for a loop whose number of batches may differ between ranks.

    A rank that finishes early adds zeros to the gradients of those that still have batches. When all have finished,
    every rank takes over the parameters, the buffers and the state of the optimizers given to ``ht.distribute`` from a
    rank that was active to the end. Within the loop, no other operation may involve all ranks (``ht.should_stop()``,
    batch normalisation over the ranks). Collective; costs one small all-reduce per backward pass. Step a scheduler
    after the loop: stepped with each batch, it ends at a different point on each rank, and learning rates differ in the
    next loop. Gradients that are accumulated over several calls of ``backward()`` need ``ht.no_sync()`` around all but
    the last.

    Args:
        model: the model, or a list of all models, that the loop trains.
        divide_by_initial_world_size: divide gradients by the number of all ranks, so that each batch counts alike;
            otherwise by the number of those that still have batches, so that the last steps are as large as the others.

    Raises:
        HpctrainError: a model that was not given to ``ht.distribute``, or one that normalises over the ranks.
    """
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    records = [_record(each) for each in models]
    comm = records[0].comm
    turns = turns_of(comm)
    if comm.size == 1:
        yield
        return
    turns.connect(comm)
    turns.begin_join(of_active=not divide_by_initial_world_size)
    try:
        yield
        _shadow(turns, models)
        last, differ = turns.last_active, turns.uneven
    finally:
        turns.end_join()
    if differ:
        for each, record in zip(models, records, strict=True):
            _take_over(each, record, last)


def _record(model: torch.nn.Module) -> Trained:
    if not isinstance(model, torch.nn.Module) or model not in trained:
        raise HpctrainError(
            "HT-model-not-distributed",
            "ht.join got {model}, which was not given to ht.distribute",
            "with ht.join(model): around the loop, with the model that was given to ht.distribute",
            model=type(model).__name__,
        )
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()):
        raise HpctrainError(
            "HT-join-batch-norm",
            "{model} normalises batches over all ranks, which a rank without a batch cannot take part in",
            "use nn.BatchNorm, or give every rank the same number of batches",
            model=type(model).__name__,
        )
    return trained[model]


def _shadow(turns: Turns, models: Sequence[torch.nn.Module]) -> None:
    """Take part in the reductions of the other ranks until all have finished their batches."""
    own = {reducer.number: reducer for model in models for reducer in reducers_of(model)}
    while (number := turns.next_model_of_others()) is not None:
        if number not in own:
            raise HpctrainError(
                "HT-join-model-missing",
                "ht.join: another rank trains {model}, which ht.join was not given on this rank",
                "with ht.join([model, …]): name all models that the loop trains",
                exit_code=1,
                model=turns.model(number),
            )
        own[number].reduce_zeros()


def _take_over(model: torch.nn.Module, record: Trained, root: int) -> None:
    broadcast_model(record.comm, model, root)
    for optimizer in record.optimizers:
        broadcast_optimizer(record.comm, optimizer, root)
    if record.guard is not None:
        steps = np.zeros(record.comm.size, dtype=np.int64)
        steps[record.comm.rank] = record.guard.steps
        record.guard.steps = int(record.comm.allreduce(steps, "sum")[root])
        record.guard.updated()
