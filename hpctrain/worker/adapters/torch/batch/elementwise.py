"""Functions of each element by itself, and what concerns a batch as a tensor: on the rows that are here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.worker.adapters.torch.batch.ranks import Rows, own_rows, spread
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, named, rows_of, rule, whole_of
from hpctrain.worker.adapters.torch.trainable import is_reduced

_NAMES = """
abs absolute neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal
sin cos tan asin acos atan arcsin arccos arctan sinh cosh tanh asinh acosh atanh arcsinh arccosh arctanh
sigmoid logit erf erfc erfinv lgamma digamma sinc relu floor ceil round trunc frac fix nan_to_num deg2rad rad2deg
isnan isinf isfinite isposinf isneginf isreal signbit logical_not bitwise_not conj real imag
angle conj_physical resolve_conj
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power rsub
eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose
maximum minimum fmax fmin atan2 arctan2 hypot copysign xlogy logaddexp logaddexp2 nextafter ldexp heaviside
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm
where lerp addcmul addcdiv clamp clip clamp_min clamp_max masked_fill threshold clone detach
zeros_like ones_like full_like
"""
_METHODS = """
__rsub__ __rtruediv__ __rdiv__ __floordiv__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __eq__
__and__ __or__ __xor__ __lshift__ __rshift__
float double half bfloat16 int long short char byte bool cfloat cdouble to type type_as cpu cuda contiguous
"""
_ACTIVATIONS = """
relu relu6 elu selu celu leaky_relu gelu silu mish softplus softsign softshrink hardshrink tanhshrink hardtanh
hardsigmoid hardswish logsigmoid threshold
"""
_IN_PLACE = """
add_ sub_ mul_ div_ true_divide_ floor_divide_ pow_ neg_ abs_ exp_ log_ log1p_ sqrt_ rsqrt_ square_ reciprocal_
sigmoid_ tanh_ relu_ sin_ cos_ floor_ ceil_ round_ trunc_ clamp_ clip_ clamp_min_ clamp_max_ masked_fill_ fill_ zero_
copy_ lerp_ addcmul_ addcdiv_ nan_to_num_ eq_ ne_ lt_ le_ gt_ ge_ logical_and_ logical_or_ logical_not_ fmod_
remainder_ bitwise_and_ bitwise_or_ bitwise_xor_ bitwise_not_ detach_ __ipow__ __iand__ __ior__ __ixor__
"""


class Aligned(NamedTuple):
    """Operands of which each is what this rank needs.

    Attributes:
        args: positional ones.
        kwargs: by name.
        rows: the division of the first batch among them.
        from_end: the place of the rows' dimension, counted from the last one, which is 1.
        dims: the most dimensions that an operand has.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: Rows
    from_end: int
    dims: int

    def result(self, value: Any) -> Any:
        """The batch that a tensor computed from the operands is the part of."""
        return BatchTensor(value, self.rows.along(value.dim() - self.from_end))


def aligned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Aligned | None:
    """Take of each operand what belongs to this rank's rows, by the rules of broadcasting; None where that fails."""
    tensors = tensors_in(args, kwargs)
    first = next((each for each in tensors if isinstance(each, BatchTensor)), None)
    if first is None:
        return None
    rows = first.rows
    from_end = len(first.shape) - rows.dim
    dims = 0
    for tensor in tensors:
        shape = tensor.shape
        dims = max(dims, len(shape))
        if isinstance(tensor, BatchTensor):
            if len(shape) - tensor.rows.dim != from_end or tensor.rows.total != rows.total:
                return None
        elif len(shape) >= from_end and shape[-from_end] != rows.total and (shape[-from_end] != 1 or not rows.total):
            return None

    def here(value: Any) -> Any:
        return part_of(value, rows, from_end) if isinstance(value, torch.Tensor) else value

    return Aligned(
        _mapped(here, args), {name: _mapped(here, each) for name, each in kwargs.items()}, rows, from_end, dims
    )


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among arguments."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list | dict):
            found += [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return found


def _mapped(func: Callable[[Any], Any], value: Any) -> Any:
    """Like tree_map, which is slow, in the usual cases: an argument, or a tuple of arguments that are no containers."""
    if type(value) is tuple:
        return tuple(_mapped(func, each) for each in value)
    return tree_map(func, value) if isinstance(value, list | dict) else func(value)


def part_of(value: torch.Tensor, rows: Rows, from_end: int) -> torch.Tensor:
    """What belongs to this rank's rows of an operand, a batch or a plain tensor."""
    if isinstance(value, BatchTensor):
        if value.rows.sizes == rows.sizes:
            return value.local
        value = value.whole()
    if value.dim() >= from_end and value.shape[-from_end] == rows.total:
        return own_rows(value, rows.along(value.dim() - from_end))
    return for_rows(value, rows)


def for_rows(plain: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A plain tensor for use with rows: spread, unless a reducer averages its gradients."""
    return plain if not plain.requires_grad or is_reduced(plain) else spread(plain, rows.ranks)


T = torch.Tensor
_SPECIAL = "expit log_ndtr ndtr entr i0 i0e erfcx xlog1py"


@rule(
    *named(_NAMES, torch, T),
    *named(_METHODS, T),
    *named(_ACTIVATIONS, F, torch),
    *named(_SPECIAL, torch.special),
)
def elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("out") is not None or (kwargs.get("inplace") and not isinstance(args[0], BatchTensor)):
        return NotImplemented
    operands = aligned(args, kwargs)
    if operands is None:
        return NotImplemented
    result = func(*operands.args, **operands.kwargs)
    if isinstance(result, torch.Tensor) and result.dim() == operands.dims:
        return args[0] if kwargs.get("inplace") else operands.result(result)
    return NotImplemented  # such as the numbers that torch.where gives of a mask alone


@rule(*named(_IN_PLACE, T, torch), *named("relu_ elu_ selu_ celu_ leaky_relu_ hardtanh_ threshold_", F))
def in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed = args[0]
    if not isinstance(changed, BatchTensor):
        return NotImplemented
    operands = aligned(args, kwargs)
    if operands is None:  # other batches, whose rows are another dimension
        operands = aligned((changed, *map(whole_of, args[1:])), kwargs)
    if operands is None or operands.dims != changed.dim() or operands.args[0] is not changed.local:
        return NotImplemented
    return NotImplemented if func(*operands.args, **operands.kwargs) is NotImplemented else changed


_ATTRIBUTES = (
    "dtype device ndim layout names is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_xpu is_mps is_nested "
    "is_sparse_csr itemsize nbytes"
)


@rule(
    *named(_ATTRIBUTES, T),
    *named("size dim numel element_size __len__ is_floating_point is_complex is_signed", T, torch),
    *named("get_device is_inference is_conj is_neg has_names", T, torch),
)
def metadata(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@rule(*named("new_zeros new_ones new_full", T))
def new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor of the batch's type, on its device."""
    return func(args[0].local, *args[1:], **kwargs)


@rule(T.requires_grad_)
def requires_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args[0].local.requires_grad_(*args[1:], **kwargs)
    return args[0]


@rule(T.record_stream, T.is_pinned)
def of_memory(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0].local, *args[1:], **kwargs)


@rule(T.pin_memory)
def pin_memory(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return BatchTensor(func(args[0].local, *args[1:], **kwargs), args[0].rows)


@rule(T.retain_grad)
def retain_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].local.retain_grad()


@rule(*named("data", T))
def data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return BatchTensor(args[0].local.data, args[0].rows)


@rule(T.data.__set__)  # type: ignore[attr-defined]
def set_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    batch, value = args
    if not isinstance(batch, BatchTensor) or (batch.shape, batch.dtype) != (value.shape, value.dtype):
        return NotImplemented
    batch.local.data = rows_of(value, batch.rows)
    return None


@rule(T.__deepcopy__)
def deepcopy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return BatchTensor(copy.deepcopy(args[0].local, *args[1:]), args[0].rows)


@rule(T.register_hook)
def register_hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    batch, hook = args

    def on_true_gradient(gradient: torch.Tensor) -> Any:
        ranks = batch.rows.ranks.size
        changed = hook(BatchTensor(gradient / ranks, batch.rows))
        return None if changed is None else rows_of(changed, batch.rows) * ranks

    return batch.local.register_hook(on_true_gradient)


@rule(*named("rand_like randn_like randint_like", torch))
def like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    return BatchTensor(own_rows(func(_empty(x), *args[1:], **kwargs), x.rows), x.rows)


def _empty(x: BatchTensor) -> torch.Tensor:
    """A tensor like the whole batch. Random numbers are drawn in the order in which it lies in memory."""
    order, strides = list(range(x.dim())), x.local.stride()
    # The stride of a single row says nothing.
    if 0 not in strides and not x.local.is_contiguous():
        order.sort(key=lambda dim: -strides[dim])
    laid_out = torch.empty([x.shape[dim] for dim in order], dtype=x.dtype, device=x.device)
    return laid_out.permute([order.index(dim) for dim in range(x.dim())])


@rule(*named("uniform_ normal_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ random_", torch.Tensor))
def random_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not isinstance(x, BatchTensor) or any(isinstance(each, torch.Tensor) for each in args[1:]):
        return NotImplemented
    whole = func(_empty(x), *args[1:], **kwargs)
    x.local.copy_(own_rows(whole, x.rows))
    return x
