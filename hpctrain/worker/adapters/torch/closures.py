"""Makes the closure of ``optimizer.step(closure)`` return the loss of the whole batch, which some optimizers read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hpctrain.worker.comm import Communicator

Closure = Callable[[], Any]


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], evaluate: Callable[[Closure], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a step, the optimizer first, with closures that ``evaluate`` calls; None without a closure."""
    if not any(map(callable, (*args[1:], *kwargs.values()))):
        return None

    def instead(value: Any) -> Any:
        return (lambda: evaluate(value)) if callable(value) else value

    return (args[0], *map(instead, args[1:])), {name: instead(value) for name, value in kwargs.items()}


def mean_loss(comm: Communicator, closure: Closure) -> Any:
    """The mean over the ranks of a closure's loss; the loss of a whole batch is the same on all of them. Collective.

    LBFGS chooses the length and number of its steps by it; ranks that chose differently would wait for each other.
    """
    loss = closure()
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.detach().new_full(loss.shape, _mean(comm, loss.item()))
    return _mean(comm, loss) if isinstance(loss, float) else loss


def _mean(comm: Communicator, loss: float) -> float:
    return float(comm.allreduce(np.array([loss]))[0])
