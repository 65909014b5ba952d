"""What ranks send each other to compute with a batch whose rows they divide: sums over the ranks, and gathered rows.

Each operation begins with a message of one length that says where in the script a rank is. So a rank that computes
something else at that moment, as under ``if comm.rank == 0:``, is found before a value is mistaken for another.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from hpctrain.worker.adapters.data_ranks import data_place, is_first_of_data
from hpctrain.worker.adapters.torch.tensor_pieces import is_dtensor
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.rank_run import run
from hpctrain.worker.comm.script_location import WHOLE_BATCH, is_of_script, mismatch_error, script_line

# Numbers in the message with which each operation begins: the place, and values that need no second message.
_WORDS = 16
_SMALL = _WORDS - 1
# Gathered bytes a step from which on it is worth knowing what gathers them.
_LARGE = 64_000_000


class DataRanks:
    """The ranks among which the rows of each batch are divided. Ranks of one tp, cp or pp group hold the same rows.

    Every operation is collective over all ranks of the communicator.

    Attributes:
        comm: the communicator.
        rank: this rank's place among them.
        size: their number.
        losses: how many losses models have added up over all ranks themselves, by ``ht.mean_loss``.
    """

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size = data_place(comm)
        self.losses = 0
        self.comm = comm
        # In the step that runs: the bytes of gathered rows, and of the largest operation with its name and line.
        self._gathered, self._largest = 0, (0, "", "")
        self._told = False
        self._counts = is_first_of_data(comm)
        self._group = comm.kept_group(f"a computation {WHOLE_BATCH}")

    def sum(self, own: torch.Tensor, name: str = "a sum") -> torch.Tensor:
        """The sum over the data ranks of a tensor of one shape and type, as a new tensor."""
        own = own.detach()
        if is_dtensor(own):  # the gradient of a loss that was added to penalties on divided parameters
            own = own.full_tensor()
        if _is_small(own):
            totals = self._meet(own.reshape(-1).tolist(), name)
            return torch.tensor(totals, dtype=own.dtype, device="cpu").view(own.shape)
        # The hosts meet, and not the GPUs: NCCL would add up what ranks sum at different places.
        self._meet([], name)
        wide = own.to(_sum_type(own.dtype)) if self._counts else torch.zeros_like(own, dtype=_sum_type(own.dtype))
        complex_numbers = wide.is_complex()
        total = self._group.allreduce_torch(torch.view_as_real(wide) if complex_numbers else wide)
        return (torch.view_as_complex(total) if complex_numbers else total).to(own.dtype)

    def gather(self, own: torch.Tensor, sizes: Sequence[int], dim: int, name: str = "gathered rows") -> torch.Tensor:
        """All data ranks' rows along ``dim``, joined in the order of the ranks.

        Args:
            own: this rank's rows.
            sizes: how many rows each data rank has.
        """
        # A single row does not show how the dimensions lie in memory.
        (reordered,) = self._meet([float(own.shape[dim] > 1 and not own.is_contiguous())], name)
        own = own.detach()
        rows = own.movedim(dim, 0)
        whole = rows.new_zeros(sum(sizes), *rows.shape[1:])
        if self._counts:
            begin = sum(sizes[: self.rank])
            whole[begin : begin + sizes[self.rank]] = rows
        self._gathered += whole.nbytes
        if whole.nbytes > max(self._largest[0], _LARGE // 64):
            self._largest = whole.nbytes, name, script_line()
        if whole.numel():
            # As integers: what is added to zero bits stays as it is, whatever the type.
            words = whole.reshape(-1).view(torch.int32 if whole.nbytes % 4 == 0 else torch.uint8)
            whole = self._group.allreduce_torch(words).view(own.dtype).view(whole.shape)
        whole = whole.movedim(0, dim)
        # A view of the whole may need the layout in memory that one process has.
        return whole if reordered else whole.contiguous()

    def end_step(self) -> int:
        """The bytes of rows that were gathered on this rank in the step that ends. Says once where they are many."""
        gathered, largest = self._gathered, self._largest
        self._gathered, self._largest = 0, (0, "", "")
        if gathered > _LARGE and not self._told:
            self._told = True
            _, name, line = largest
            self.comm.say(
                f"a step gathers {gathered / 1e6:,.0f} MB of rows on each rank, because {name} "
                f"at {line or 'some line'} needs the whole batch; a function of rows, or of fewer columns, costs less"
            )
        return gathered

    def _meet(self, values: list[float], name: str) -> list[float]:
        """The sums of a few numbers over the data ranks, after all ranks have shown that they are at one place."""
        place, more = _place(name), [0.0] * (_SMALL - len(values))
        own = values if self._counts else [0.0] * len(values)
        total: list[float] = self._group.allreduce(np.array([place, *own, *more])).tolist()
        if total[0] != place * self.comm.size:
            own_place = f"in {name} {WHOLE_BATCH} at {script_line()}"
            raise mismatch_error(self._group.gather((self.comm.host, own_place)))
        return total[1 : 1 + len(values)]


def data_ranks(comm: Communicator) -> DataRanks:
    """The data ranks of a communicator. Collective at its first call, and where ranks have died since."""
    ranks = comm.part(f"{data_place(comm).ranks} data ranks", lambda: DataRanks(comm))
    run.batches = ranks
    return ranks


def known_ranks() -> DataRanks | None:
    """The data ranks of the batches that were divided last; None where none were."""
    known: DataRanks | None = run.batches
    return None if known is None or known.comm.left else known


def _is_small(own: torch.Tensor) -> bool:
    """Whether a tensor fits into the message with which an operation begins."""
    return own.is_cpu and own.numel() <= _SMALL and own.dtype in (torch.float32, torch.float64)


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers are added up over the ranks."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def _place(name: str) -> float:
    """A number for an operation at the line of the script that calls it, the same on every rank that is there."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if number := _number_of_file(frame.f_code.co_filename):
            return float((number * 31 + _number_of(name) + frame.f_lineno * 7919) % 0x7FFFFFFF + 1)
        frame = frame.f_back
    return float(_number_of(name) % 0x7FFFFFFF + 1)


@functools.cache
def _number_of_file(file: str) -> int:
    """A number for a file of the script, 0 for others. Hosts may keep it in different folders."""
    return zlib.crc32(file.rpartition("/")[2].encode()) if is_of_script(file) else 0


@functools.cache
def _number_of(name: str) -> int:
    return zlib.crc32(name.encode())


class Rows(NamedTuple):
    """The division of one dimension of a tensor: each data rank holds a contiguous part, in the order of the ranks.

    Attributes:
        ranks: the data ranks.
        sizes: how many rows each of them holds.
        dim: the dimension that is divided, at least 0.
    """

    ranks: DataRanks
    sizes: tuple[int, ...]
    dim: int = 0

    @property
    def total(self) -> int:
        """The rows of all ranks."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """The rows of this rank."""
        return self.sizes[self.ranks.rank]

    @property
    def begin(self) -> int:
        """This rank's first row."""
        return sum(self.sizes[: self.ranks.rank])

    def along(self, dim: int) -> Rows:
        """The same parts of another dimension."""
        return self if dim == self.dim else Rows(self.ranks, self.sizes, dim)

    def sized(self, sizes: Iterable[int]) -> Rows:
        """Parts of other sizes of the same dimension."""
        return Rows(self.ranks, tuple(sizes), self.dim)

    def even(self) -> Rows:
        """The same rows, divided as evenly as possible, the first ranks having one more."""
        least, more = divmod(self.total, self.ranks.size)
        return self.sized(least + (rank < more) for rank in range(self.ranks.size))


def sum_over_ranks(
    own: torch.Tensor, ranks: DataRanks, name: str = "a sum", divisor: torch.Tensor | float = 1
) -> torch.Tensor:
    """The sum over the data ranks of a tensor that each computed from its rows: a plain tensor.

    Args:
        divisor: what the sum is divided by: a number, or a tensor of one number, which is added up with the other.
    """
    if isinstance(divisor, torch.Tensor):
        both = ranks.sum(torch.stack((own.detach(), divisor.to(own.dtype))), name)
        total, divisor = both[0] / both[1], both[1]
    else:
        total = ranks.sum(own, name)
        total = total if divisor == 1 else total / divisor
    if own.requires_grad and torch.is_grad_enabled():
        return _apply_sum(own, [total], ranks, name, divisor)
    return total


def gathered(own: torch.Tensor, rows: Rows, name: str = "gathered rows") -> torch.Tensor:
    """The rows of all ranks: a plain tensor."""
    if own.requires_grad and torch.is_grad_enabled():
        return _Gather.apply(own, rows, name)  # type: ignore[no-untyped-call, no-any-return]
    if torch.is_inference_mode_enabled():  # whose tensors do not count their changes
        with torch.inference_mode(False):
            return rows.ranks.gather(own, rows.sizes, rows.dim, name)
    return rows.ranks.gather(own, rows.sizes, rows.dim, name)


def own_rows(whole: torch.Tensor, rows: Rows) -> torch.Tensor:
    """This rank's rows of a plain tensor."""
    if whole.requires_grad and torch.is_grad_enabled():
        return _Cut.apply(whole, rows)  # type: ignore[no-untyped-call, no-any-return]
    return whole.narrow(rows.dim, rows.begin, rows.size)


def spread(plain: torch.Tensor, ranks: DataRanks) -> torch.Tensor:
    """A plain tensor for use with rows: its gradient is made that of all ranks' rows.

    Parameters that a reducer handles need not be spread: their gradients are averaged later, together.
    """
    if plain.requires_grad and torch.is_grad_enabled():
        return _Spread.apply(plain, ranks)  # type: ignore[no-untyped-call, no-any-return]
    return plain


def mean_over_ranks(own: torch.Tensor, ranks: DataRanks) -> torch.Tensor:
    """The mean over the data ranks of the gradients that they have for one plain tensor: its true gradient."""
    return sum_over_ranks(own, ranks, "a gradient", ranks.size)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        total: list[torch.Tensor],
        ranks: DataRanks,
        name: str,
        divisor: torch.Tensor | float,
    ) -> torch.Tensor:
        ctx.ranks, ctx.name, ctx.divisor = ranks, name, divisor
        return total[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        total = sum_over_ranks(gradient, ctx.ranks, f"the gradient of {ctx.name}")
        return total / ctx.divisor, None, None, None, None


# Without what Function.apply does for functorch, whose tensors have no numbers to add up.
_apply_sum: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Sum).apply


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: torch.Tensor, ranks: DataRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return mean_over_ranks(gradient, ctx.ranks), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, rows: Rows, name: str) -> torch.Tensor:
        ctx.rows = rows
        return rows.ranks.gather(own, rows.sizes, rows.dim, name)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_rows(sum_over_ranks(gradient, ctx.rows.ranks, "the gradient of rows"), ctx.rows), None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        # PyTorch lets nobody change a view that is the result of such a function.
        return whole.narrow(rows.dim, rows.begin, rows.size).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows = ctx.rows
        return gathered(gradient, rows, "the gradient of rows") / rows.ranks.size, None
