"""Calls with which each rule of whole batches is tried."""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from unit.worker.adapters.batch_ranks import Operand, seeded

Make = Callable[[tuple[int, ...], int], Operand]
Change = Callable[[torch.Tensor], torch.Tensor]


def _shape(sizes: tuple[int, ...], dim: int, others: tuple[int, ...]) -> tuple[int, ...]:
    return (*others[:dim], sum(sizes), *others[dim:])


def _numbers(shape: tuple[int, ...], seed: int, low: float = -1.5, high: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low


def _batch(
    seed: int, others: tuple[int, ...] = (3,), change: Change | None = None, gradient: bool = True, **span: float
) -> Make:
    def make(sizes: tuple[int, ...], dim: int) -> Operand:
        values = _numbers(_shape(sizes, dim, others) if dim <= len(others) else (), seed, **span)
        values = change(values) if change else values
        return Operand(values, sizes, dim, gradient and (values.is_floating_point() or values.is_complex()))

    return make


def _plain(seed: int, others: tuple[int, ...], rows: bool = False, reduced: bool = False, **span: float) -> Make:
    def make(sizes: tuple[int, ...], dim: int) -> Operand:
        values = _numbers(_shape(sizes, dim, others) if rows else others, seed, **span)
        return Operand(values, None, dim, True, reduced)

    return make


def _classes(values: torch.Tensor) -> torch.Tensor:
    return (values * 3).long().clamp(0, 2)


OPERANDS: dict[str, Make] = {
    "x": _batch(1),
    "y": _batch(2),
    "near": _batch(3, low=0.1, high=0.9),
    "near2": _batch(4, low=0.1, high=0.9),
    "above": _batch(5, low=1.1, high=2.5),
    "i": _batch(6, change=lambda values: (values * 5).long()),
    "j": _batch(7, change=lambda values: (values * 2).long() * 2 + 1),
    "b": _batch(8, change=lambda values: values > 0),
    "c": _batch(9, change=lambda values: torch.complex(values, values.flip(-1))),
    "f": _batch(10, change=torch.Tensor.float),
    "h": _batch(11, change=torch.Tensor.half, gradient=False),
    "whole": _plain(12, (3,), rows=True),
    "whole_near": _plain(13, (3,), rows=True, low=0.1, high=0.9),
    "number": _plain(14, (), low=0.2, high=0.9),
    "reduced": _plain(15, (1,), reduced=True, low=0.2, high=0.9),
    "x3": _batch(16, (3, 4)),
    "y3": _batch(17, (3, 4)),
    "one": _batch(19, ()),
    "labels": _batch(20, (), change=_classes),
    "one_b": _batch(21, (), change=lambda values: values > 0),
    "matrix": _plain(22, (3, 4)),
    "matrix_reduced": _plain(23, (3, 4), reduced=True),
    "vector": _plain(24, (3,)),
    "signal": _batch(30, (4, 8)),
    "image": _batch(31, (4, 6, 8)),
    "w2": _plain(34, (2, 4, 3, 3)),
    "w2_reduced": _plain(35, (2, 4, 3, 3), reduced=True),
    "four": _plain(37, (4,)),
    "four_reduced": _plain(38, (4,), reduced=True),
}
# What stands for a name in calls, one after the other.
CHOICES: dict[str, list[Any]] = {
    "given": [
        {},
        *({"reduction": reduction} for reduction in ("sum", "none", "mean", "odd")),
        {"reduce": False},
        {"size_average": False},
    ],
    "value": [0.5, torch.tensor(2.0, dtype=torch.float64)],
    "shape": [
        *((-1,), (-1, 4), (5, -1), (5, 12), (3, 5, 4), (15, 4), (60,), (1, 5, 3, 4), (5, 3, 2, 2), (5, 3, 2, -1, 1)),
        *((3, 10, 2), (6, 10), (7, 2), (-1, -1), (4, 15)),
    ],
    "dim": [0, 1, 2, -1, 4],
    "all_of_it": [slice(None), ..., (slice(None), slice(None))],
    "part": [0, -1, slice(1, 3), slice(1, None, 2), (slice(None), 1), (2, 1), (..., 0), [0, 1]],
    "index": [
        *(0, -1, 2, 7, -9, slice(1, 3), slice(None, None, 2), slice(3, None, 3), slice(4, 1), slice(-3, None)),
        *(None, ..., True, [0, 2], [2, 0, 0], (slice(None), 1), (slice(1, 4), slice(0, 2)), (..., 0), (0, 1)),
        *((2, slice(0, 2)), (None, slice(1, 3)), (slice(None), None, 0), (slice(None),) * 4, (slice(None), [0, 2])),
        *(([0, 1], [1, 2]), torch.tensor([1, 1, 4]), torch.tensor([[0, 1], [2, 0]]), torch.tensor(2)),
        *(torch.tensor([True, False, True, True, False]), (slice(None), torch.tensor([0, 1])), (1, None, 1)),
        *((slice(5, 9),), ()),
    ],
}


@dataclass(frozen=True)
class Case:
    """One way to call a function.

    Attributes:
        operands: names of OPERANDS.
        call: the call, of the function and the operands.
        told: how it is written.
    """

    operands: tuple[str, ...]
    call: Callable[..., Any]
    told: str

    def __str__(self) -> str:
        return self.told


def changed(func: Callable[..., Any], x: torch.Tensor, *values: Any) -> tuple[Any, torch.Tensor]:
    """A change of what was computed from an operand, which no leaf that requires a gradient may have."""
    own = x * 1
    if (result := func(own, *values)) is NotImplemented:
        raise TypeError("what Python makes of NotImplemented")
    return result, own


def after(func: Callable[..., Any], x: torch.Tensor, *values: Any) -> torch.Tensor:
    """What was computed from an operand, after a function that gives nothing has changed it."""
    own = x * 1
    func(own, *values)
    return own


def back(func: Callable[..., Any], roots: Any, leaf: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """The gradient of a leaf after a backward pass from what was computed from it."""
    leaf = leaf.detach().clone().requires_grad_()
    given = {} if start is None else {"gradient" if func is torch.Tensor.backward else "grad_tensors": start}
    func(roots(leaf), **given)
    assert leaf.grad is not None
    return leaf.grad * 1


def _made(text: str) -> list[Case]:
    """The calls of a text, which are separated as Python's statements are, with each choice for their names."""
    found = []
    for statement in ast.parse(textwrap.dedent(text)).body:
        names = dict.fromkeys(node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
        operands = tuple(name for name in names if name in OPERANDS)
        told = ast.unparse(statement)
        chosen = [name for name in names if name in CHOICES]
        for values in itertools.product(*(CHOICES[name] for name in chosen)):
            space = {**globals(), **dict(zip(chosen, values, strict=True))}
            call = eval(f"lambda {', '.join(('func', *operands))}: {told}", space)
            found.append(Case(operands, call, f"{told} {dict(zip(chosen, values, strict=True)) or ''}"))
    return found


CASES: dict[str, list[Case]] = {}


def _cases(names: str, text: str, *, draws: bool = False) -> None:
    """Add cases of these functions; of those that draw random numbers, each from the beginning of one stream."""
    for name in names.split():
        for each in _made(text):
            CASES.setdefault(name, []).append(_drawing(each) if draws else each)


def _drawing(case: Case) -> Case:
    # Where a rank has a single row, its strides do not tell the order in which one process would draw.
    def call(func: Callable[..., Any], *values: torch.Tensor) -> Any:
        return case.call(seeded(func), *(each.contiguous() for each in values))

    return Case(case.operands, call, case.told)


# Tried with every function that has no cases of its own; those that PyTorch refuses are to be refused by the ranks too.
GENERAL = _made(
    """
    func(x); func(near); func(above); func(i); func(b); func(c); func(f); func(x3); func(h)
    func(x, y); func(near, near2); func(i, j); func(b, b); func(whole, x); func(x, number); func(x, reduced)
    func(f, number); func(x, vector); func(f, whole)
    func(x, 0.5); func(x, 2); func(x, -1); func(i, 2); func(x, y, 0.3)
    func(b, x, y); func(x, b, 0.5); func(x, y, near); func(x, -0.5, 0.5)
    func(x, dim=1); func(x, dim=-1, keepdim=True); func(x, 0); func(x, dim=0); func(x3, dim=1)
    func(x, 5); func(x, dim=5); func(x3, dim=(0, 2)); func(x3, (1, 2), True)
    func(x, dim=None, keepdim=True); func(x, torch.float32); func(x, dtype=torch.float32); func(x, 'cpu')
    func(x3, -1); func(x, ())
    changed(func, x); changed(func, x, 0.5); changed(func, x, y); changed(func, x, whole); changed(func, i, j)
    changed(func, b, b); changed(func, x, b, 0.5); changed(func, x, y, near); changed(func, x, y, 0.3)
    changed(func, x, number); changed(func, i); changed(func, b); changed(func, x3, -0.5, 0.5)
    """
)
# Its second derivative is a difference of large numbers, which float32 does not hold.
CASES["copysign"] = [each for each in GENERAL if "f" not in each.operands]


def cases_of(func: Callable[..., Any]) -> list[Case]:
    """The calls with which a function is tried."""
    return CASES.get(name_of(func), GENERAL)


def name_of(func: Any) -> str:
    """The name of a function, of an attribute that of the attribute."""
    return str(func.__self__.__name__ if func.__name__ == "__get__" else func.__name__)


# Gradients.
_cases(
    "backward",
    """
    back(func, lambda x: (x * 2).sum(), x)
    back(func, lambda x: x.exp(), x, torch.ones_like(x))
    back(func, lambda x: x.exp(), x, whole)
    back(func, lambda x: x.exp(), x)
    """,
)
_cases(
    "grad",
    """
    func(x.square().sum(), x, create_graph=True)
    func((x[..., :2] * vector[:2]).exp(), [x, vector], torch.ones_like(x[..., :2]), create_graph=True)
    func([x.sum(), vector.sum() * x.mean()], (vector, x), create_graph=True)
    """,
)
_cases("requires_grad_", "func(x.detach()); func(x.detach(), False)")
_cases("retain_grad", "((y := x * 2), func(y), y.sum().backward(), y.grad)[3]")
_cases(
    "register_hook",
    """
    after(func, x, lambda g: g * y.detach())
    after(func, x, lambda g: whole.detach())
    after(func, x, lambda g: None)
    """,
)

# Random numbers.
_cases("randint_like", "func(x, 5); func(x, 2, 7); func(i, 3)", draws=True)
_cases("rand_like randn_like", "func(x); func(x, dtype=torch.float32); func(f)", draws=True)
_cases("bernoulli_ random_ exponential_ cauchy_ log_normal_ uniform_ normal_", "func(x.detach().clone())", draws=True)
_cases("geometric_", "func(x.detach().clone(), 0.4)", draws=True)

# Each element by itself.
_cases("masked_fill", "func(x, b, 0.5); func(x, b, number); func(x, one_b, 1.0)")
_cases("masked_fill_", "changed(func, x, b, 0.5); changed(func, x, b, number)")
_cases("fill_", "changed(func, x, 0.5); changed(func, x, number); changed(func, i, 3)")
_cases(
    "copy_",
    """
    changed(func, x, y); changed(func, x, whole); changed(func, x, vector); changed(func, x, number)
    changed(func, f, whole)
    """,
)
_cases("zero_ detach_ bitwise_not_ logical_not_", "changed(func, x); changed(func, i); changed(func, b)")
_cases("detach_", "func(x * 1)")
_cases("full_like", "func(x, 2.0); func(i, 3)")
_cases("type", "func(x, torch.float32); func(x, 'torch.LongTensor'); func(x)")
_cases("cuda data", "func(x)")
_cases(
    "to",
    """
    func(x, torch.float32); func(x, 'cpu'); func(x, dtype=torch.int64); func(x, f); func(f, torch.float64, copy=True)
    """,
)
_cases(
    "where",
    """
    func(x, b, y); func(x, b, number); func(b, x, y); func(b, x, 0.0); func(b, 1.0, 0.0); func(b)
    func(one_b, x3, y3); func(b, x, whole); func(b, reduced, number)
    """,
)
_cases("threshold threshold_", "func(x * 1, 0.1, 2.0)")
_cases(
    "bitwise_left_shift bitwise_right_shift gcd lcm __lshift__ __rshift__ ldexp", "func(i, j); func(i, 1); func(x, j)"
)
_cases(
    "dtype device ndim layout names is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_xpu is_mps is_nested "
    "is_sparse_csr itemsize nbytes dim numel element_size __len__ is_floating_point is_complex is_signed get_device "
    "is_inference is_conj is_neg has_names size",
    "func(x); func(x3); func(i); func(c); func(one); func(h)",
)
_cases("size", "func(x, 0); func(x, -1); func(x, dim=1); func(x, 5)")
_cases("new_zeros new_ones", "func(x, (2, 3)); func(i, (2, 3)); func(h, (2, 3))")
_cases("new_full", "func(x, (2,), 1.5); func(i, (3,), 2)")
# Of a copy without a graph: PyTorch itself ends where data of a leaf get another form.
_cases("__set__", "after(func, x.detach(), y.detach()) * 2; after(func, x.detach(), whole.detach()) * 2")
_cases("__deepcopy__", "func(x, {})")

# Reductions, and functions along dimensions.
_cases(
    "sum mean nansum nanmean",
    """
    func(x3); func(x3, 0); func(x3, 1); func(x3, -1, True); func(x3, (0, 1)); func(x3, [0, 2], True)
    func(x3, dim=0, keepdim=True); func(x3, axis=0); func(x3, dim=None); func(x3, dim=None, keepdim=True)
    func(x3, dtype=torch.float32); func(x3, 0, dtype=torch.float32); func(x3, ()); func(x3, 3); func(x3, (0, 0))
    func(x3, -4); func(x3, None); func(x3, 1, False, dtype=torch.float32)
    func(h); func(h, 0); func(i); func(i, 0); func(b); func(c); func(c, 1); func(f, 0)
    func(one); func(one, 0, True); func(one, -1); func(i, 0, dtype=torch.float64)
    """,
)
_cases(
    "amax amin argmax argmin max min prod all any var std logsumexp median nanmedian mode cummax cummin var_mean "
    "std_mean",
    """
    func(x3); func(x3, 0); func(x3, 1); func(x3, -1, keepdim=True); func(x3, (1, 2)); func(x3, dim=1)
    func(x3, axis=0); func(x3, 2, True); func(x3, 4); func(x3, dim=None); func(x3, False)
    func(b, 1); func(i); func(i, -1); func(x, y); func(x, whole); func(whole, x)
    """,
)
_cases(
    "norm linalg_vector_norm",
    """
    func(x); func(x, 2); func(x, 1, 1); func(x, 2, -1, True); func(x, dim=1); func(x, dim=0); func(x3, 2, (1, 2))
    func(x3, float('inf'), 2); func(x3, dim=(0, 1), keepdim=True)
    """,
)
_cases(
    "topk kthvalue", "func(x, 2); func(x, 2, 1); func(x, 1, 0); func(x, k=2, dim=-1); func(x, 9, 1); func(x3, 2, -1)"
)
_cases(
    "softmax log_softmax softmin cumsum cumprod logcumsumexp",
    """
    func(x, 1); func(x, 0); func(x, dim=-1); func(x3, -1, dtype=torch.float32); func(x3, 2); func(x, 5); func(one, 0)
    """,
)
_cases(
    "sort argsort",
    """
    func(x); func(x, 1); func(x, 0); func(x, dim=1, descending=True); func(x, 1, True); func(x, stable=True, dim=-1)
    func(x, 7)
    """,
)
_cases(
    "flip",
    """
    func(x, 1); func(x, 0); func(x3, (1, 2)); func(x3, dims=(-1,)); func(x3, (0, 2)); func(x3, [1]); func(x3, 1, 0)
    """,
)
_cases("roll", "func(x, 1, 1); func(x, 1, 0); func(x, 1); func(x3, (1, 2), (1, 2)); func(x3, shifts=1, dims=2)")
_cases(
    "normalize", "func(x); func(x, p=1, dim=1); func(x, dim=0); func(x3, dim=-1); func(x, 2.0, 5); func(x3, dim=(1, 2))"
)
_cases("glu", "func(signal); func(signal, 1); func(image, dim=2)")
_cases(
    "gather",
    """
    func(x, dim, i % min(x.shape)); func(whole, dim, i % min(whole.shape)); func(x, dim=1, index=i % min(x.shape))
    func(x, 1, torch.zeros(x.shape[0], 2, dtype=torch.long)); func(x, 1, torch.zeros(2, 2, dtype=torch.long))
    func(x, 4, torch.zeros(2, 2, dtype=torch.long))
    """,
)
_cases(
    "take_along_dim",
    """
    func(x, i % min(x.shape), dim); func(whole, i % min(whole.shape), dim)
    func(x, torch.zeros(x.shape[0], 1, dtype=torch.long), dim=1)
    """,
)
_cases(
    "scatter scatter_add",
    """
    func(x, dim, i % min(x.shape), y); func(x, 1, i % min(x.shape), 2.0); func(x, 1, i % min(x.shape), whole)
    """,
)

# Losses.
_cases(
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss poisson_nll_loss kl_div hinge_embedding_loss",
    """
    func(x, y, **given); func(x, whole, **given); func(whole, y, **given); func(x3, y3, **given)
    func(x, one); func(x, vector)
    """,
)
_cases("mse_loss l1_loss huber_loss", "func(x, y, weight=None); func(x, y, weight=near.detach())")
_cases("smooth_l1_loss", "func(x, y, beta=0.3)")
_cases("soft_margin_loss", "func(x, y.detach(), **given)")
_cases("huber_loss", "func(x, y, delta=0.3); func(x, y, 'sum', 0.3)")
_cases("poisson_nll_loss", "func(near, near2, log_input=False, full=True); func(x, near.detach(), full=True)")
_cases(
    "kl_div", "func(x, near, reduction='batchmean'); func(x, y, log_target=True); func(x3, y3, reduction='batchmean')"
)
_cases(
    "binary_cross_entropy binary_cross_entropy_with_logits",
    """
    func(near, near2, **given); func(near, whole_near, **given); func(near, near2, weight=x.detach().abs())
    func(near, near2, vector.detach().abs(), reduction='sum')
    """,
)
_cases(
    "binary_cross_entropy_with_logits",
    "func(x, near, pos_weight=vector.detach().abs()); func(input=x, target=near.detach())",
)
_cases(
    "cross_entropy nll_loss",
    """
    func(x, labels, **given); func(x, labels, ignore_index=1); func(x3, y3)
    func(x, labels, vector.detach().abs(), ignore_index=2)
    func(x, labels, weight=vector.detach().abs(), reduction='none')
    func(x3.movedim(-1, 1), i.clamp(0, 2)); func(whole.detach(), labels); func(h, labels)
    func(target=labels, input=x)
    """,
)
_cases(
    "cross_entropy",
    """
    func(x, labels, label_smoothing=0.1)
    func(x, labels, weight=vector.detach().abs(), label_smoothing=0.2, ignore_index=0)
    func(x, near.softmax(-1)); func(x3, y3.softmax(1))
    """,
)

# Shapes, joins and parts.
_cases("reshape view", "func(x3, shape)")
_cases("view", "func(x3, *shape); func(x3, torch.int64); func(x3, dtype=torch.int32)")
_cases("unflatten", "func(x3, 2, (2, 2)); func(x3, -1, (-1, 1)); func(x, 0, (5, 1)); func(x, dim=1, sizes=(3, 1))")
_cases("view_as reshape_as", "func(x3, torch.zeros(x3.shape[0], x3.shape[1] * 4, dtype=x3.dtype)); func(whole, x)")
_cases(
    "flatten",
    """
    func(x3); func(x3, 1); func(x3, 0, 1); func(x3, start_dim=1); func(x3, 1, 2); func(x3, 2, 1); func(x3, 5); func(one)
    """,
)
_cases(
    "squeeze",
    """
    func(x.unsqueeze(1)); func(x.unsqueeze(0), 0); func(x3[None, :, None], dim=2); func(x, 0); func(x, 4); func(x[:1])
    func(x[None, :, None], (0, 2))
    """,
)
_cases("unsqueeze", "func(x, 0); func(x, 1); func(x, -1); func(x, dim=2); func(x, 3); func(x[:1], 0); func(x[:1], 1)")
_cases(
    "transpose swapaxes swapdims",
    "func(x3, 0, 1); func(x3, 1, 2); func(x3, -1, 0); func(x3, 0, 3); func(x3[:1], 0, 1)",
)
_cases("permute", "func(x3, (2, 0, 1)); func(x3, (1, 0, -1)); func(x3, (0, 0, 1)); func(x3, (0, 1)); func(x3, 2, 1, 0)")
_cases("T mT H mH t adjoint", "func(x); func(x3); func(one); func(c); func(x[:1])")
_cases(
    "cat concat concatenate",
    """
    func([x, y], dim); func((whole, x), dim=1); func((x, whole)); func([x[:2], x[2:]]); func([x[3:], x[:3]])
    func([x[0:1], x[4:5]], 1); func([x, i]); func([torch.zeros(0), x])
    """,
)
_cases(
    "split",
    """
    func(x, 2); func(x, 2, 1); func(x, [1, 3, 1]); func(x, [1, 2], 1); func(x, [4, 4]); func(x, 2, 5)
    func(x, 2, dim=-1)
    """,
)
_cases("chunk", "func(x, 2); func(x, 3, 1); func(x, 2, dim=0); func(x, 8)")
_cases("tensor_split", "func(x, 2); func(x, 3, 1); func(x, (1, 3)); func(x, (1,), dim=1)")
_cases("unbind", "func(x); func(x, 1); func(x3, -1); func(x, dim=1); func(x[:1]); func(x3[:1], 1)")
_cases(
    "__getitem__",
    """
    func(x, index); func(x3, index); func(x, b); func(x, one_b); func(x, labels); func(whole, labels)
    func(whole, one_b); func(x3, one_b); func(x3, labels); func(x, i); func(x, (torch.arange(len(labels)), labels))
    func(x3, (slice(None), labels)); func(x3, (one_b, 0)); func(x, ~one_b)
    """,
)
_cases(
    "__setitem__",
    """
    changed(func, x, index, value); changed(func, x3, index, value)
    changed(func, x, b, 0.5); changed(func, x, one_b, 2.0); changed(func, x, b, number)
    after(func, x, all_of_it, y); after(func, x, all_of_it, whole); after(func, x, all_of_it, vector)
    after(func, x, all_of_it, number); after(func, x, part, y[part]); after(func, x, part, whole[part])
    after(func, x, 1, vector[: x.shape[1]] if len(vector) >= x.shape[1] else 1.0)
    after(func, x, slice(0, 2), y[1:3])
    """,
)

# Products, layers.
_cases(
    "matmul mm __matmul__ __rmatmul__",
    """
    func(x, matrix); func(x, matrix_reduced); func(x, vector); func(matrix, x); func(x, x3); func(x3, x); func(x, one)
    func(whole, x); func(x.mT, y); func(x.mT, whole); func(whole.mT, x); func(matrix.mT, x); func(x3.mT, y3)
    func(x.mT, one); func(x, y.mT); func(x, whole.mT); func(matrix, x.mT); func(x3, y3.mT); func(x3, matrix.mT)
    func(x3, y.mT); func(x, x); func(x3, x3[0].T); func(x[:3].mT, x[2:])
    """,
)
_cases("bmm", "func(x3.mT, y3); func(x3, y3.mT); func(x3, y3); func(x, y)")
_cases(
    "linear",
    """
    func(x, matrix.T); func(x, matrix_reduced[:, :3], vector); func(input=x, weight=matrix.T, bias=None)
    func(x3, matrix); func(one, vector); func(x, y)
    """,
)
_cases(
    "conv2d",
    """
    func(image, w2); func(image, w2_reduced); func(image, w2, None, 2, 1); func(image[0], w2)
    func(image, image[:2, :, :2, :2])
    """,
)
_cases("conv_transpose2d", "func(image[:, :2], w2)")
_cases("max_pool2d avg_pool2d", "func(image, 2); func(image, kernel_size=2, stride=1); func(image[0], 2)")
_cases("max_pool2d_with_indices", "func(image, 2); func(image, 2, return_indices=True)")
_cases("adaptive_avg_pool2d adaptive_max_pool2d", "func(image, 2); func(image[0], 2)")
_cases(
    "interpolate",
    """
    func(image, scale_factor=2); func(image, size=(3, 3), mode='bilinear'); func(signal, scale_factor=2, mode='linear')
    """,
)
_cases("group_norm", "func(image, 2); func(image, 2, four, four_reduced)")
_cases("local_response_norm", "func(image, 2); func(signal, 2)")
_cases("pixel_shuffle channel_shuffle pixel_unshuffle", "func(image, 2)")
_cases("unfold", "func(image, 2); func(image, (2, 3), stride=2)")
_cases("prelu", "func(image, four); func(x, vector[:1])")
_cases(
    "pad",
    """
    func(image, (1, 2)); func(image, (1, 2, 0, 1), value=0.5); func(image, (1, 1), mode='circular')
    func(signal, (2, 1), 'reflect'); func(x, (1, 2)); func(x, (1, 2, 3, 4)); func(signal, (0, 0, 0, 0, 1, 1))
    """,
)

# Functions without a rule, and changes of views, for computations that are composed of calls.
COMPOSED = _made(
    """
    torch.einsum('bi,bj->ij', x, y); torch.einsum('bi,bi->b', x, y); torch.cdist(x, y.exp())
    torch.nn.functional.cosine_similarity(x, y, dim=-1); torch.corrcoef(x.T + torch.eye(len(x.T), len(x)).double())
    torch.nn.functional.linear(x, x[:1].detach()); x.index_select(-1, torch.tensor([0, 0])); x.unique().sum()
    x.repeat_interleave(2, 0); x.movedim(0, -1); x.expand(2, *x.shape); torch.stack([x, y], -1); x.repeat(2, *x.shape)
    torch.diff(x, dim=0); x.narrow(0, 1, 2); x.select(0, -1); torch.aminmax(x, dim=0).max
    x[x > 0]; x[x.argsort(0)[:, 0]]
    x * x.mean().item(); x / x.numel(); sum(x[number] for number in range(len(x)))
    torch.as_tensor(x.detach().numpy().copy())
    after(lambda own: own.mul_(2), torch.cat([x, whole])); after(lambda own: own.mul_(2), x[[2, 0, 1]])
    after(lambda own: own[1:3].zero_(), x); after(lambda own: own[:, 0].add_(1), x)
    after(lambda own: own.t().mul_(3), x)
    after(lambda own: own.view(-1).add_(2), x); after(lambda own: own.clamp_(-1, 1).sub_(0.5), x)
    after(lambda own: own.add_(own.detach().mean()), x); after(lambda own: own[1:].sub_(y[1:]), x)
    after(lambda own: own.__setitem__(slice(0, 2), own[1:3].detach() * 2), x)
    after(lambda own: own.__setitem__((slice(None), 0), own[:, -1].detach()), x)
    """
)
