"""Gradients of embeddings that stay sparse: ranks exchange the rows they touched."""

from __future__ import annotations

import torch

from hpctrain.comm.base import Communicator, TorchEngine


def sparse_parameters(model: torch.nn.Module) -> frozenset[str]:
    """The names of the parameters whose gradient PyTorch makes sparse."""
    shared_names = {id(parameter): name for name, parameter in model.named_parameters()}
    return frozenset(
        shared_names[id(module.weight)]
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    )


def reduce_sparse(comm: Communicator, engine: TorchEngine, parameter: torch.nn.Parameter, name: str) -> None:
    """Replace a sparse gradient by its mean over the ranks; a parameter that no rank used keeps no gradient."""
    if parameter.grad is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_empty((0, *parameter.shape[1:]))
    else:
        gradient = parameter.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
    rows = engine.allgather(rows, f"{name}.rows")
    values = engine.allgather(values, f"{name}.values")
    if len(rows):
        mean = torch.sparse_coo_tensor(rows.unsqueeze(0), values / comm.size, parameter.shape)
        parameter.grad = mean.coalesce()
