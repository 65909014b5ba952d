"""Records the steps of a script that trains with PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpctrain.worker.adapters.recording import recording
from hpctrain.worker.adapters.torch.batch.ranks import known_ranks
from hpctrain.worker.comm import Communicator


def step_recorder(
    comm: Communicator, model: torch.nn.Module, bucket_mb: float | None = None
) -> Callable[[torch.optim.Optimizer], None] | None:
    """The function that records a step of a script's first model with its learning rate; None to record nothing."""
    own, parameters = recording(), sum(parameter.numel() for parameter in model.parameters())
    if own is None or not own.begin_run(comm, "torch", model, parameters, bucket_mb):
        return None

    def step_done(optimizer: torch.optim.Optimizer) -> None:
        ranks = known_ranks()
        own.step_done(learning_rate(optimizer), gathered=None if ranks is None else ranks.end_step())

    return step_done


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """The first group's learning rate; None where it has none, or where reading it would wait for a GPU."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None or getattr(rate, "is_cuda", False) else float(rate)
