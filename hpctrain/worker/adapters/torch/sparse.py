"""Gradients of embeddings that stay sparse: ranks exchange the rows they touched."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.base import Communicator, TorchEngine


def sparse_parameters(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The ids of the parameters whose gradient is sparse: those that only sparse embeddings use."""
    sparse: set[int] = set()
    dense: set[int] = set()
    for module in modules:
        embeds = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        (sparse if embeds else dense).update(id(parameter) for parameter in module.parameters(recurse=False))
    return sparse - dense


def reduce_sparse(
    comm: Communicator, engine: TorchEngine, title: str, parameter: torch.nn.Parameter, name: str
) -> None:
    """Replace a sparse gradient by its mean over the ranks; a parameter that no rank used keeps none.

    Args:
        title: the parameter's name, for messages.
        name: the reduction's name, the same on every rank.

    Raises:
        HpctrainError: the gradient is dense.
    """
    if parameter.grad is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_empty((0, *parameter.shape[1:]))
    else:
        if not parameter.grad.is_sparse:
            raise HpctrainError(
                "HT-gradient-not-sparse",
                "{parameter!r} is the weight of a sparse embedding, and its gradient is dense: something "
                "else than the embedding uses it too",
                "make the embedding with sparse=False",
                exit_code=1,
                parameter=title,
            )
        gradient = parameter.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
    rows = engine.allgather(rows, f"{name}.rows")
    values = engine.allgather(values, f"{name}.values")
    if len(rows):
        mean = torch.sparse_coo_tensor(rows.unsqueeze(0), values / comm.size, parameter.shape, device=values.device)
        parameter.grad = mean.coalesce()
