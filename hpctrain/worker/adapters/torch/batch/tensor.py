"""A batch that all ranks hold together: a tensor with the shape and values of the whole, of which each has rows."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Sequence
from types import GetSetDescriptorType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.batch.ranks import Rows, gathered, own_rows


class BatchTensor(torch.Tensor):
    """A tensor whose rows the data ranks divide. What a script computes from it is what one process computes.

    Functions that treat rows one by one compute this rank's rows, sums and means over rows are added up over the ranks,
    and any other function gets the gathered rows. All ranks have to call the same functions.

    Attributes:
        rows: how the rows are divided.
    """

    rows: Rows
    _local: torch.Tensor
    _shape: torch.Size
    _gradient: BatchTensor | None = None

    @staticmethod
    def __new__(cls, local: torch.Tensor, rows: Rows) -> BatchTensor:
        shape = list(local.shape)
        shape[rows.dim] = rows.total
        made: BatchTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        made._local, made.rows, made._shape = local, rows, torch.Size(shape)
        return made

    def __init__(self, local: torch.Tensor, rows: Rows) -> None: ...

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, a plain tensor."""
        if copies:
            check_copies()
        return self._local

    def whole(self) -> torch.Tensor:
        """The rows of all ranks, as a plain tensor with a gradient. Collective."""
        return gathered(self.local, self.rows)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the whole batch, within a model that of the rows that it computes."""
        return self._shape if running.rows is None else self.local.shape

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self._shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The type of the elements."""
        return self._local.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records what is computed from it."""
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.local.requires_grad = value

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The node that computed this rank's rows."""
        return self.local.grad_fn

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether it was not computed from tensors that require a gradient."""
        return self.local.is_leaf

    @property
    def grad(self) -> BatchTensor | None:
        """The true gradient, while each rank's rows have the number of ranks times it."""
        if (new := self.local.grad) is not None:
            # Moved here and not computed at each look, because scripts change it in place: d.grad.zero_().
            self.local.grad = None
            new = new / self.rows.ranks.size
            if self._gradient is None:
                self._gradient = BatchTensor(new, self.rows)
            else:
                self._gradient._local = self._gradient.local + new
        return self._gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.local.grad = None
        if value is not None and not isinstance(value, BatchTensor):
            value = BatchTensor(own_rows(value, self.rows), self.rows)
        self._gradient = value

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if running.rows is not None:
            return func(*tree_map(_computed_here, args), **tree_map(_computed_here, kwargs))
        # The rules find their operands by position; none of them by name alone.
        rule = rules.get(func) if args else None
        result = NotImplemented if rule is None else rule(func, args, kwargs)
        if result is NotImplemented:
            result = on_whole(func, args, kwargs)
        if copies:
            check_copies()
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise HpctrainError(
            "HT-batch-not-whole",
            "{function} got a batch of which each rank holds some rows, where PyTorch does not tell hpctrain",
            "give it the whole batch: x = x.whole()",
            exit_code=1,
            function=func,
        )


Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

rules: dict[Any, Rule] = {}
"""What a function does with rows. A rule returns NotImplemented where the function needs the whole batch."""


class _Running(threading.local):
    """What is computed at this moment in this thread.

    Attributes:
        rows: the rows that a distributed model computes; None outside of models.
        asks: whether the rule of ``torch.autograd.grad`` or a pipeline's schedule asks for gradients, which are then
            this rank's.
        tries: whether a model is called to see the dimensions of its results alone.
    """

    rows: Rows | None = None
    asks: bool = False
    tries: bool = False


running = _Running()


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for functions of PyTorch. It has to give what :func:`on_whole` gives, which a test compares."""

    def register(made: Rule) -> Rule:
        if twice := rules.keys() & set(functions):
            raise ValueError(f"there are rules for {twice} already")
        rules.update(dict.fromkeys(functions, made))
        return made

    return register


def named(names: str, *modules: Any) -> list[Any]:
    """The functions and attributes of these names, separated by blanks, in those modules that have them."""
    found = [getattr(module, name) for name in names.split() for module in modules if hasattr(module, name)]
    return [each.__get__ if isinstance(each, GetSetDescriptorType | property) else each for each in found]


def whole_of(value: Any) -> Any:
    """The whole of a batch; anything else as it is."""
    return value.whole() if isinstance(value, BatchTensor) else value


def rows_of(value: torch.Tensor, rows: Rows) -> torch.Tensor:
    """This rank's rows of a batch, which may be divided in another way, or of a plain tensor."""
    if isinstance(value, BatchTensor):
        if value.rows == rows:
            return value.local
        value = value.whole()
    return own_rows(value, rows)


def place_of(dim: int, dims: int) -> int:
    """A dimension counted from the first one.

    Raises:
        IndexError: there is none of this number.
    """
    if not -dims <= dim < dims:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {dim})")
    return dim % dims


def on_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "") -> Any:
    """Call a function with the gathered rows. Exact for every function, and slow for large batches.

    ``name`` is that of the function where it has none itself.
    """
    name = name or getattr(getattr(func, "__self__", None), "__name__", "") or getattr(func, "__name__", str(func))
    if _changes(name, args, kwargs):
        raise _changed(name)
    wholes = []

    def whole(value: Any) -> Any:
        if not isinstance(value, BatchTensor):
            return value
        wholes.append((gathered(value.local, value.rows, name), value.local))
        return wholes[-1][0]

    return watched(func(*tree_map(whole, args), **tree_map(whole, kwargs)), wholes, name)


def _changed(name: str) -> HpctrainError:
    return HpctrainError(
        "HT-batch-not-whole",
        "{function} would change a batch, of which each rank holds some rows, in another way than row by row",
        "change a copy of the whole batch: x = x.whole()",
        exit_code=1,
        function=name,
    )


class _Copy:
    """A gathered copy of which a script has views, where PyTorch gives views of the batch."""

    def __init__(self, whole: torch.Tensor, rows: torch.Tensor, views: list[torch.Tensor], name: str) -> None:
        self._whole, self._version, self._name = whole, whole._version, name
        self._version_of_rows = _version_of(rows)
        # What the rows are a view of lives as long as anybody may read them.
        self._rows = weakref.ref(rows if rows._base is None else rows._base)
        self._views = {weakref.ref(view, self._forget) for view in views}

    def _forget(self, view: weakref.ref[torch.Tensor]) -> None:
        self._views.discard(view)

    def check(self) -> bool:
        """Whether the script still has views, and the rows."""
        if (rows := self._rows()) is None:
            return False
        if self._whole._version != self._version:
            copies.remove(self)
            raise _changed(f"a change of what {self._name} returned")
        if self._views and _version_of(rows) != self._version_of_rows:
            copies.remove(self)
            raise HpctrainError(
                "HT-batch-not-whole",
                "a batch was changed of which the script has what {function} returned, a copy that does not change",
                "del what was returned before, such as the row that the variable of a finished loop still holds, or "
                "change a copy of the batch: x = x.clone()",
                exit_code=1,
                function=self._name,
            )
        return bool(self._views)

    def has(self, view: Any) -> bool:
        """Whether this is one of the views."""
        return any(each() is view for each in self._views)


def _version_of(rows: torch.Tensor) -> int:
    """A number that each change moves, but for those in an inference mode."""
    return 0 if rows.is_inference() else rows._version


copies: list[_Copy] = []


def check_copies() -> None:
    """Find changes of gathered copies that PyTorch would have made to a batch."""
    copies[:] = [each for each in list(copies) if each.check()]


def forget_copy(view: Any) -> None:
    """Let a script change a view and write it back, as ``x[0] += 1`` does."""
    copies[:] = [each for each in copies if not each.has(view)]


def watched(result: Any, wholes: list[tuple[torch.Tensor, torch.Tensor]], name: str) -> Any:
    """What a function returned for gathered rows, whose views among it must not be changed.

    Args:
        wholes: gathered rows, each with this rank's rows.
    """
    for whole, rows in wholes:
        place = whole.untyped_storage().data_ptr()
        found = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        views = [each for each in found if each.numel() and each.untyped_storage().data_ptr() == place]
        if views:
            copies.append(_Copy(whole, rows, views, name))
    return result


def _changes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of this name changes a batch among its arguments."""
    if any(isinstance(each, BatchTensor) for each in tree_leaves(kwargs.get("out"))):
        return True
    changes = kwargs.get("inplace") or _CHANGING.fullmatch(name)
    return bool(changes) and any(isinstance(each, BatchTensor) for each in tree_leaves(args[:1] or kwargs))


# Setting an attribute, such as data, is a call of __set__.
_CHANGING = re.compile(
    r".*[^_]_|__(set|setitem|delitem|i(add|sub|mul|matmul|truediv|div|floordiv|mod|pow|and|or|xor|lshift|rshift))__"
)


def _computed_here(value: Any) -> Any:
    """What a running model takes of a batch that it finds elsewhere than among its arguments."""
    if not isinstance(value, BatchTensor):
        return value
    return value.local if running.rows and value.rows.sizes == running.rows.sizes else value.whole()


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


# A script that asks for these runs on one rank too, where batches are plain tensors.
torch.Tensor.local = property(_itself)  # type: ignore[attr-defined]
torch.Tensor.whole = _itself  # type: ignore[attr-defined]
