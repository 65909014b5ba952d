"""What torch.distributed's reduce operations do to tensors; narrow floating-point types are reduced in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.common.errors import HpctrainError

_Combine = Callable[..., torch.Tensor]
_ADD: _Combine = torch.add
_COMBINE: dict[str, _Combine] = {
    "SUM": _ADD,
    "AVG": _ADD,
    "PREMUL_SUM": _ADD,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
# The size of one rank's block: the blocks of all ranks stay in a core's second-level cache until the last pass.
_BLOCK_BYTES = 131072


@dataclass(frozen=True)
class Reduction:
    """One reduce operation on tensors of one type over a number of ranks, combined in the given order.

    Attributes:
        within: the type in which terms are combined, float32 for narrower floating-point types.
        factor: multiplies the result, for PREMUL_SUM.
        divisor: divides the result, for AVG; the mean of integers is rounded towards zero.
    """

    name: str
    dtype: torch.dtype
    within: torch.dtype
    factor: float | None
    divisor: int | None

    @classmethod
    def of(cls, operation: Any, dtype: torch.dtype, ranks: int) -> Reduction:
        """The reduction for a ``torch.distributed.ReduceOp``."""
        name = operation.op.name if hasattr(operation, "op") else operation.name
        if name not in _COMBINE:
            raise HpctrainError(
                "HT-group-bad-argument",
                "the process group hpctrain has no reduce operation {reduction}",
                f"it has {', '.join(_COMBINE)}",
                reduction=name,
            )
        return cls(
            name=name,
            dtype=dtype,
            within=torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype,
            factor=float(operation.factor) if name == "PREMUL_SUM" else None,
            divisor=ranks if name == "AVG" else None,
        )

    def into(self, out: torch.Tensor, terms: Sequence[torch.Tensor], *, last: bool = True) -> None:
        """Write the combination of ``terms`` into ``out``, which may be one of them.

        Args:
            out: one dimension; of the type ``within`` if the terms are, or if ``last`` is False.
            last: whether to apply :attr:`factor` and :attr:`divisor`; False for a partial result.
        """
        step = _BLOCK_BYTES // self.within.itemsize
        length = min(step, len(out))
        scratch = None if self._direct(out, terms) else torch.empty(length, dtype=self.within, device="cpu")
        for start in range(0, len(out), step):
            block = out[start : start + step]
            total = block if scratch is None else scratch[: len(block)]
            self._combine(total, [term[start : start + step] for term in terms])
            if last:
                self._scale(total)
            if scratch is not None:
                block.copy_(total)

    def _direct(self, out: torch.Tensor, terms: Sequence[torch.Tensor]) -> bool:
        """Whether the result can be accumulated in ``out`` without overwriting a term too early."""
        if any(tensor.dtype != self.within for tensor in (out, terms[0])):
            return False
        return all(term.data_ptr() != out.data_ptr() for term in terms[2:])

    def _combine(self, total: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
        combine = _COMBINE[self.name]
        if len(terms) > 1 and terms[0].dtype == self.within:
            combine(terms[0], terms[1], out=total)
            rest = terms[2:]
        else:
            total.copy_(terms[0])
            rest = terms[1:]
        for term in rest:
            combine(total, term.to(self.within), out=total)

    def _scale(self, total: torch.Tensor) -> None:
        if self.divisor is not None:
            exact = self.dtype.is_floating_point or self.dtype.is_complex
            total.div_(self.divisor, rounding_mode=None if exact else "trunc")
        if self.factor is not None:
            total.mul_(self.factor)
