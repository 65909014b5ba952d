"""Notices ranks that compute the same batches, as those of a script without ``ht.shard``: they gain nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.worker.comm.base import Communicator

_PASSES = 3


class SameGradients:
    """Compares, in the first backward passes of a model, rank 0's gradients with the mean over the ranks.

    One parameter's gradient may not depend on the samples, as that of a last bias; those of a whole bucket do.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._left = _PASSES if comm.size > 1 and comm.rank == 0 else 0
        self._own: list[torch.Tensor] = []

    def before(self, gradients: Sequence[torch.Tensor]) -> None:
        """Keep rank 0's gradients."""
        if self._left:
            self._own = [gradient.clone() for gradient in gradients]

    def after(self, means: Sequence[torch.Tensor]) -> None:
        """Compare them with the means, and tell the script in the last of the passes if they were equal in all."""
        if not self._left:
            return
        equal = len(means) == len(self._own) and all(map(self._equal, self._own, means))
        self._own = []
        self._left = self._left - 1 if equal else 0
        if equal and not self._left and not self._comm.divides_batches:
            self._comm.say(
                f"all {self._comm.size} ranks compute the same gradients, so they train no faster than one process: "
                "loader = ht.shard(loader) divides each batch over them. Tensors without a loader need one: "
                "ht.shard(DataLoader(TensorDataset(x, y), batch_size=len(x)))"
            )

    def _equal(self, own: torch.Tensor, mean: torch.Tensor) -> bool:
        # A sum of equal numbers may be rounded.
        tolerance = self._comm.size * torch.finfo(own.dtype).eps
        return bool(own.any()) and torch.allclose(own, mean, rtol=tolerance, atol=0.0)
