"""Arguments with which each rule of whole batches is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from unit.worker.adapters.batch_ranks import Operand, seeded

functional = torch.nn.functional
Make = Callable[[tuple[int, ...], int], Operand]


def _shape(sizes: tuple[int, ...], dim: int, others: tuple[int, ...]) -> tuple[int, ...]:
    return (*others[:dim], sum(sizes), *others[dim:])


def _numbers(shape: tuple[int, ...], seed: int, low: float = -1.5, high: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low


def _batch(
    seed: int,
    others: tuple[int, ...] = (3,),
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    gradient: bool = True,
    **span: float,
) -> Make:
    def make(sizes: tuple[int, ...], dim: int) -> Operand:
        values = _numbers(_shape(sizes, dim, others) if dim <= len(others) else (), seed, **span)
        values = change(values) if change else values
        return Operand(values, sizes, dim, gradient and (values.is_floating_point() or values.is_complex()))

    return make


def _plain(
    seed: int,
    others: tuple[int, ...] | None,
    rows: bool,
    reduced: bool = False,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    gradient: bool = True,
    **span: float,
) -> Make:
    def make(sizes: tuple[int, ...], dim: int) -> Operand:
        values = _numbers(_shape(sizes, dim, others) if rows else others, seed, **span)
        values = change(values) if change else values
        return Operand(values, None, dim, gradient and values.is_floating_point(), reduced)

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
    "whole near": _plain(13, (3,), rows=True, low=0.1, high=0.9),
    "number": _plain(14, (), rows=False, low=0.2, high=0.9),
    "reduced": _plain(15, (1,), rows=False, reduced=True, low=0.2, high=0.9),
    "x3": _batch(16, (3, 4)),
    "y3": _batch(17, (3, 4)),
    "mask3": _batch(18, (3, 4), change=lambda values: values > 0),
    "one": _batch(19, ()),
    "labels": _batch(20, (), change=_classes),
    "one b": _batch(21, (), change=lambda values: values > 0),
    "matrix": _plain(22, (3, 4), rows=False),
    "matrix reduced": _plain(23, (3, 4), rows=False, reduced=True),
    "vector": _plain(24, (3,), rows=False),
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
        return f"{self.told} of {', '.join(self.operands)}"


def case(operands: str, *args: Any, **kwargs: Any) -> Case:
    """A call with these operands, separated by commas, and further arguments."""
    names = tuple(operands.split(", "))
    return Case(names, lambda func, *values: func(*values, *args, **kwargs), f"f(…, {args}, {kwargs})")


def written(operands: str, call: Callable[..., Any]) -> Case:
    """A call as it is written."""
    return Case(tuple(operands.split(", ")), call, "a call")


def _changed(operands: str, *args: Any) -> Case:
    """A change of what was computed from an operand, which no leaf that requires a gradient may have."""

    def call(func: Callable[..., Any], x: torch.Tensor, *values: torch.Tensor) -> tuple[Any, torch.Tensor]:
        changed = x * 1
        if (result := func(changed, *values, *args)) is NotImplemented:
            raise TypeError("what Python makes of NotImplemented")
        return result, changed

    return Case(tuple(operands.split(", ")), call, f"f(…, {args}) in place")


# Tried with every function that has no cases of its own; those that PyTorch refuses are to be refused by the ranks too.
GENERAL = [
    *[case(name) for name in ("x", "near", "above", "i", "b", "c", "f", "x3")],
    *[
        case(names)
        for names in (
            "x, y",
            "near, near2",
            "i, j",
            "b, b",
            "whole, x",
            "x, number",
            "x, reduced",
            "f, number",
            "x, vector",
            "f, whole",
        )
    ],
    *[case("x", number) for number in (0.5, 2, -1)],
    case("i", 2),
    case("x, y, 0.3".replace(", 0.3", ""), 0.3),
    case("b, x, y"),
    case("x, b", 0.5),
    case("x, y, near"),
    case("x", -0.5, 0.5),
    case("x", dim=1),
    case("x", dim=-1, keepdim=True),
    case("x", 0),
    case("x", dim=0),
    case("x3", dim=1),
    case("x", 5),
    case("x", dim=5),
    case("x3", dim=(0, 2)),
    case("x3", (1, 2), True),
    case("h"),
    case("x", dim=None, keepdim=True),
    case("x", torch.float32),
    case("x", dtype=torch.float32),
    case("x", "cpu"),
    case("x3", -1),
    case("x", ()),
    _changed("x"),
    _changed("x", 0.5),
    _changed("x, y"),
    _changed("x, whole"),
    _changed("i, j"),
    _changed("b, b"),
    _changed("x, b", 0.5),
    _changed("x, y, near"),
    _changed("x, y", 0.3),
    _changed("x, number"),
    _changed("i"),
    _changed("b"),
    _changed("x3", -0.5, 0.5),
]
CASES: dict[str, list[Case]] = {}
_T = torch.Tensor


def _cases(names: str, *cases: Case) -> None:
    for name in names.split():
        CASES.setdefault(name, []).extend(cases)


def _back(func: Callable[..., Any], roots: Any, leaves: list[torch.Tensor], **given: Any) -> list[torch.Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in leaves]
    func(roots(*leaves), **given)
    return [each.grad * 1 for each in leaves]


_cases(
    "backward",
    written("x", lambda func, x: _back(func, lambda x: (x * 2).sum(), [x])),
    written("x", lambda func, x: _back(func, lambda x: x.exp(), [x], **{_start_of(func): torch.ones_like(x)})),
    written("x, whole", lambda func, x, w: _back(func, lambda x: x.exp(), [x], **{_start_of(func): w})),
    written("x", lambda func, x: _back(func, lambda x: x.exp(), [x])),
)


def _start_of(func: Any) -> str:
    return "gradient" if func is _T.backward else "grad_tensors"


_cases(
    "grad",
    written("x", lambda func, x: func(x.square().sum(), x, create_graph=True)),
    written(
        "x, vector",
        lambda func, x, v: func((x[..., :2] * v[:2]).exp(), [x, v], torch.ones_like(x[..., :2]), create_graph=True),
    ),
    written("x, vector", lambda func, x, v: func([x.sum(), v.sum() * x.mean()], (v, x), create_graph=True)),
)
_cases("randint_like", case("x", 5), case("x", 2, 7), case("i", 3))
_cases("rand_like randn_like", case("x"), case("x", dtype=torch.float32), case("f"))
_cases(
    "dropout",
    case("x"),
    case("x", 0.3),
    case("x", training=False),
    written("x", lambda func, x: func(x * 1, inplace=True)),
)
_cases(
    "bernoulli_ random_ exponential_ cauchy_ log_normal_ uniform_ normal_",
    *[written("x", lambda func, x: func(x.detach().clone()))],
)
_cases("geometric_", written("x", lambda func, x: func(x.detach().clone(), 0.4)))
for _name, _of in list(CASES.items()):
    if _name not in ("backward", "grad"):
        CASES[_name] = [
            Case(each.operands, lambda func, *values, each=each: each.call(seeded(func), *values), each.told)
            for each in _of
        ]
_cases("masked_fill", case("x, b", 0.5), case("x, b, number"), case("x, one b", 1.0))
_cases("masked_fill_", _changed("x, b", 0.5), _changed("x, b, number"))
_cases("fill_", _changed("x", 0.5), _changed("x, number"), _changed("i", 3))
_cases(
    "copy_", _changed("x, y"), _changed("x, whole"), _changed("x, vector"), _changed("x, number"), _changed("f, whole")
)
_cases("zero_ detach_ bitwise_not_ logical_not_", _changed("x"), _changed("i"), _changed("b"))
_cases("detach_", written("x", lambda func, x: func(x * 1)))
_cases("full_like", case("x", 2.0), case("i", 3))
_cases("type", case("x", torch.float32), case("x", "torch.LongTensor"), case("x"))
_cases(
    "to",
    case("x", torch.float32),
    case("x", "cpu"),
    case("x", dtype=torch.int64),
    case("x, f"),
    case("f", torch.float64, copy=True),
)
_cases(
    "where",
    case("x, b, y"),
    case("x, b, number"),
    case("b, x, y"),
    case("b, x", 0.0),
    case("b", 1.0, 0.0),
    case("b"),
    case("one b, x3, y3"),
    case("b, x, whole"),
    case("b, reduced, number"),
)
_cases("threshold threshold_", written("x", lambda func, x: func(x * 1, 0.1, 2.0)))
_cases(
    "bitwise_left_shift bitwise_right_shift gcd lcm __lshift__ __rshift__ ldexp",
    case("i, j"),
    case("i", 1),
    case("x, j"),
)
_cases("ldexp", case("x, j"))
_cases(
    "sum mean nansum nanmean",
    *[
        case("x3", *args, **kwargs)
        for args, kwargs in [
            ((), {}),
            ((0,), {}),
            ((1,), {}),
            ((-1, True), {}),
            (((0, 1),), {}),
            (([0, 2], True), {}),
            ((), {"dim": 0, "keepdim": True}),
            ((), {"axis": 0}),
            ((), {"dim": None}),
            ((), {"dim": None, "keepdim": True}),
            ((), {"dtype": torch.float32}),
            ((0,), {"dtype": torch.float32}),
            (((),), {}),
            ((3,), {}),
            (((0, 0),), {}),
            ((-4,), {}),
            ((None,), {}),
            ((1, False), {"dtype": torch.float32}),
        ]
    ],
    case("h"),
    case("h", 0),
    case("i"),
    case("i", 0),
    case("b"),
    case("c"),
    case("c", 1),
    case("f", 0),
    case("one"),
    case("one", 0, True),
    case("one", -1),
    case("i", 0, dtype=torch.float64),
)
_cases(
    "amax amin argmax argmin max min prod all any var std logsumexp median nanmedian mode cummax cummin "
    "var_mean std_mean",
    *[
        case("x3", *args, **kwargs)
        for args, kwargs in [
            ((), {}),
            ((0,), {}),
            ((1,), {}),
            ((-1,), {"keepdim": True}),
            (((1, 2),), {}),
            ((), {"dim": 1}),
            ((), {"axis": 0}),
            ((2, True), {}),
            ((4,), {}),
            ((), {"dim": None}),
            ((False,), {}),
        ]
    ],
    case("b", 1),
    case("i"),
    case("i", -1),
    case("x, y"),
    case("x, whole"),
    case("whole, x"),
)
_cases(
    "norm linalg_vector_norm",
    case("x"),
    case("x", 2),
    case("x", 1, 1),
    case("x", 2, -1, True),
    case("x", dim=1),
    case("x", dim=0),
    case("x3", 2, (1, 2)),
    case("x3", float("inf"), 2),
    case("x3", dim=(0, 1), keepdim=True),
)
_cases(
    "topk kthvalue",
    case("x", 2),
    case("x", 2, 1),
    case("x", 1, 0),
    case("x", k=2, dim=-1),
    case("x", 9, 1),
    case("x3", 2, -1),
)
_cases(
    "softmax log_softmax softmin cumsum cumprod logcumsumexp",
    case("x", 1),
    case("x", 0),
    case("x", dim=-1),
    case("x3", -1, dtype=torch.float32),
    case("x3", 2),
    case("x", 5),
    case("one", 0),
)
_cases(
    "sort argsort",
    case("x"),
    case("x", 1),
    case("x", 0),
    case("x", dim=1, descending=True),
    case("x", 1, True),
    case("x", stable=True, dim=-1),
    case("x", 7),
)
_cases(
    "flip", case("x", 1), case("x", 0), case("x3", (1, 2)), case("x3", dims=(-1,)), case("x3", (0, 2)), case("x3", [1])
)
_cases("roll", case("x", 1, 1), case("x", 1, 0), case("x", 1), case("x3", (1, 2), (1, 2)), case("x3", shifts=1, dims=2))
_cases("normalize", case("x"), case("x", p=1, dim=1), case("x", dim=0), case("x3", dim=-1), case("x", 2.0, 5))
_REDUCTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"reduction": "mean"},
    {"reduction": "odd"},
    {"reduce": False},
    {"size_average": False},
]
_ELEMENTS = [case(names, **given) for given in _REDUCTIONS for names in ("x, y", "x, whole", "whole, y", "x3, y3")]
_cases("cuda", *([case("x")] if torch.cuda.is_available() else []))
_cases(
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss poisson_nll_loss kl_div hinge_embedding_loss",
    *_ELEMENTS,
    case("x, one"),
    case("x, vector"),
)
_cases(
    "mse_loss l1_loss huber_loss",
    case("x, y", weight=None),
    written("x, y, near", lambda func, x, y, w: func(x, y, weight=w.detach())),
)
_cases("smooth_l1_loss", case("x, y", beta=0.3))
_cases(
    "soft_margin_loss",
    *[written("x, y", lambda func, x, y, given=given: func(x, y.detach(), **given)) for given in _REDUCTIONS],
)
_cases("huber_loss", case("x, y", delta=0.3), case("x, y", "sum", 0.3))
_cases(
    "poisson_nll_loss",
    case("near, near2", log_input=False, full=True),
    written("x, near", lambda func, x, y: func(x, y.detach(), full=True)),
)
_cases(
    "kl_div",
    case("x, near", reduction="batchmean"),
    case("x, y", log_target=True),
    case("x3, y3", reduction="batchmean"),
)
_cases(
    "binary_cross_entropy binary_cross_entropy_with_logits",
    *[case(names, **given) for given in _REDUCTIONS for names in ("near, near2", "near, whole near")],
    written("near, near2, x", lambda func, x, y, w: func(x, y, weight=w.detach().abs())),
    written("near, near2, vector", lambda func, x, y, w: func(x, y, w.detach().abs(), reduction="sum")),
)
_cases(
    "binary_cross_entropy_with_logits",
    written("x, near, vector", lambda func, x, y, w: func(x, y, pos_weight=w.detach().abs())),
    written("x, near", lambda func, x, y: func(input=x, target=y.detach())),
)
_cases(
    "cosine_embedding_loss",
    *[
        written("x, y, one b", lambda func, x, y, b, given=given: func(x, y, b.double() * 2 - 1, **given))
        for given in _REDUCTIONS
    ],
)
_cases(
    "triplet_margin_loss",
    *[
        written("x, y, near", lambda func, x, y, z, given=given: func(x, y, z, swap=True, **given))
        for given in _REDUCTIONS
    ],
    case("x3, y3, x3"),
    case("one, one, one"),
)
_cases(
    "multi_margin_loss",
    *[case("x, labels", **given) for given in _REDUCTIONS],
    written("x, labels, vector", lambda func, x, y, w: func(x, y, weight=w.detach())),
)
_cases(
    "multilabel_margin_loss",
    *[written("x, i", lambda func, x, y, given=given: func(x, y.clamp(-1, 2), **given)) for given in _REDUCTIONS],
)
_cases(
    "multilabel_soft_margin_loss",
    *[written("x, b", lambda func, x, y, given=given: func(x, y.double(), **given)) for given in _REDUCTIONS],
    written("x, b, vector", lambda func, x, y, w: func(x, y.double(), weight=w.detach())),
)
_cases(
    "cross_entropy nll_loss",
    *[case("x, labels", **given) for given in _REDUCTIONS],
    case("x, labels", ignore_index=1),
    case("x3, y3"),
    written("x, labels, vector", lambda func, x, y, w: func(x, y, w.detach().abs(), ignore_index=2)),
    written("x, labels, vector", lambda func, x, y, w: func(x, y, weight=w.detach().abs(), reduction="none")),
    written("x3, i", lambda func, x, y: func(x.movedim(-1, 1), y.clamp(0, 2))),
    written("whole, labels", lambda func, x, y: func(x.detach(), y)),
    written("h, labels", lambda func, x, y: func(x, y)),
    written("x, labels", lambda func, x, y: func(target=y, input=x)),
)
_cases(
    "cross_entropy",
    case("x, labels", label_smoothing=0.1),
    written(
        "x, labels, vector",
        lambda func, x, y, w: func(x, y, weight=w.detach().abs(), label_smoothing=0.2, ignore_index=0),
    ),
    written("x, near", lambda func, x, y: func(x, y.softmax(-1))),
    written("x3, y3", lambda func, x, y: func(x, y.softmax(1))),
)
_SHAPES = [
    case("x3", *args)
    for args in [
        (-1,),
        (-1, 4),
        (5, -1),
        (5, 12),
        (3, 5, 4),
        (15, 4),
        (60,),
        (1, 5, 3, 4),
        (5, 3, 2, 2),
        (5, 3, 2, -1, 1),
        (7, 2),
        (-1, -1),
        (4, 15),
        ((5, 12),),
    ]
]
_cases(
    "reshape",
    *[
        case("x3", shape)
        for shape in [
            (-1,),
            (-1, 4),
            (5, -1),
            (5, 12),
            (15, 4),
            (60,),
            (1, 5, 3, 4),
            (5, 3, 2, 2),
            (3, 10, 2),
            (6, 10),
            (7, 2),
            (-1, -1),
        ]
    ],
)
_cases("view", *_SHAPES, case("x3", torch.int64))
_cases(
    "view_as reshape_as",
    written("x3", lambda func, x: func(x, torch.zeros(x.shape[0], x.shape[1] * 4, dtype=x.dtype))),
    case("whole, x"),
)
_cases(
    "flatten",
    case("x3"),
    case("x3", 1),
    case("x3", 0, 1),
    case("x3", start_dim=1),
    case("x3", 1, 2),
    case("x3", 2, 1),
    case("x3", 5),
    case("one"),
)
_cases(
    "squeeze",
    written("x", lambda func, x: func(x.unsqueeze(1))),
    written("x", lambda func, x: func(x.unsqueeze(0), 0)),
    written("x3", lambda func, x: func(x[None, :, None], dim=2)),
    case("x", 0),
    case("x", 4),
    written("x", lambda func, x: func(x[:1])),
    written("x", lambda func, x: func(x[None, :, None], (0, 2))),
)
_cases("unsqueeze", case("x", 0), case("x", 1), case("x", -1), case("x", dim=2), case("x", 3))
_cases("transpose swapaxes swapdims", case("x3", 0, 1), case("x3", 1, 2), case("x3", -1, 0), case("x3", 0, 3))
_cases("permute", case("x3", (2, 0, 1)), case("x3", (1, 0, -1)), case("x3", (0, 0, 1)), case("x3", (0, 1)))
_cases("T mT H mH t adjoint", case("x"), case("x3"), case("one"))
_cases(
    "cat concat concatenate",
    *[written("x, y", lambda func, x, y, dim=dim: func([x, y], dim)) for dim in (0, 1, -1, 4)],
    written("x, whole", lambda func, x, w: func((w, x), dim=1)),
    written("x, whole", lambda func, x, w: func((x, w))),
    written("x", lambda func, x: func([x[:2], x[2:]])),
    written("x", lambda func, x: func([x[3:], x[:3]])),
    written("x", lambda func, x: func([x[0:1], x[4:5]], 1)),
    written("x, i", lambda func, x, i: func([x, i])),
    written("x", lambda func, x: func([torch.zeros(0), x])),
)
_cases(
    "stack",
    *[written("x, y", lambda func, x, y, dim=dim: func([x, y], dim)) for dim in (0, 1, 2, -1, 4)],
    written("x, whole", lambda func, x, w: func((w, x), dim=1)),
    written("x", lambda func, x: func([x[0:1], x[4:5]])),
    written("x, x3", lambda func, x, y: func([x, y])),
)
_cases(
    "split",
    *[case("x", *args) for args in [(2,), (2, 1), ([1, 3, 1],), ([1, 2], 1), ([4, 4],), (2, 5)]],
    case("x", 2, dim=-1),
)
_cases("chunk", case("x", 2), case("x", 3, 1), case("x", 2, dim=0), case("x", 8))
_cases("tensor_split", case("x", 2), case("x", 3, 1), case("x", (1, 3)), case("x", (1,), dim=1))
_cases("unbind", case("x"), case("x", 1), case("x3", -1), case("x", dim=1))
_INDICES: list[Any] = [
    0,
    -1,
    2,
    7,
    -9,
    slice(1, 3),
    slice(None, None, 2),
    slice(3, None, 3),
    slice(4, 1),
    slice(-3, None),
    None,
    ...,
    True,
    [0, 2],
    [2, 0, 0],
    (slice(None), 1),
    (slice(1, 4), slice(0, 2)),
    (..., 0),
    (0, 1),
    (2, slice(0, 2)),
    (None, slice(1, 3)),
    (slice(None), None, 0),
    (slice(None), slice(None), slice(None), slice(None)),
    (slice(None), [0, 2]),
    ([0, 1], [1, 2]),
    torch.tensor([1, 1, 4]),
    torch.tensor([[0, 1], [2, 0]]),
    torch.tensor(2),
    torch.tensor([True, False, True, True, False]),
    (slice(None), torch.tensor([0, 1])),
    (1, None, 1),
    (slice(5, 9),),
    (),
]
_cases(
    "__getitem__",
    *[case(name, index) for name in ("x", "x3") for index in _INDICES],
    *[
        written(names, lambda func, x, index: func(x, index))
        for names in (
            "x, b",
            "x, one b",
            "x, labels",
            "whole, labels",
            "whole, one b",
            "x3, one b",
            "x3, labels",
            "x, i",
        )
    ],
    written("x, labels", lambda func, x, y: func(x, (torch.arange(len(y)), y))),
    written("x3, labels", lambda func, x, y: func(x, (slice(None), y))),
    written("x3, one b", lambda func, x, b: func(x, (b, 0))),
    written("x, one b", lambda func, x, b: func(x, ~b)),
)
_VALUES = [0.5, torch.tensor(2.0, dtype=torch.float64)]
_cases(
    "__setitem__",
    *[_changed(name, index, value) for name in ("x", "x3") for index in _INDICES for value in _VALUES],
    _changed("x, b", 0.5),
    _changed("x, one b", 2.0),
    _changed("x, b, number"),
    *[
        written(names, lambda func, x, y, index=index: (z := x * 1, func(z, index, y), z)[2])
        for names in ("x, y", "x, whole", "x, vector", "x, number")
        for index in (slice(None), ..., (slice(None), slice(None)))
    ],
    *[
        written(names, lambda func, x, y, index=index: (z := x * 1, func(z, index, y[index]), z)[2])
        for names in ("x, y", "x, whole")
        for index in (0, -1, slice(1, 3), slice(1, None, 2), (slice(None), 1), (2, 1), (..., 0), [0, 1])
    ],
    written(
        "x, vector", lambda func, x, v: (z := x * 1, func(z, 1, v[: z.shape[1]] if len(v) >= z.shape[1] else 1.0), z)[2]
    ),
    written("x, y", lambda func, x, y: (z := x * 1, func(z, slice(0, 2), y[1:3]), z)[2]),
)
_cases(
    "one_hot",
    case("labels", 3),
    case("labels"),
    written("i", lambda func, x: func(x.clamp(0), num_classes=9)),
    case("labels", 1),
)
_cases(
    "matmul mm __matmul__ __rmatmul__",
    *[
        written(names, lambda func, a, b: func(a, b))
        for names in (
            "x, matrix",
            "x, matrix reduced",
            "x, vector",
            "matrix, x",
            "x, x3",
            "x3, x",
            "x, one",
            "whole, x",
        )
    ],
    *[
        written(names, lambda func, a, b: func(a.mT, b))
        for names in ("x, y", "x, whole", "whole, x", "matrix, x", "x3, y3", "x, one")
    ],
    *[
        written(names, lambda func, a, b: func(a, b.mT))
        for names in ("x, y", "x, whole", "matrix, x", "x3, y3", "x3, matrix", "x3, y")
    ],
    written("x", lambda func, a: func(a, a)),
    written("x3", lambda func, a: func(a, a[0].T)),
    written("x", lambda func, a: func(a[:3].mT, a[2:])),
)
_cases(
    "bmm",
    written("x3, y3", lambda func, a, b: func(a.mT, b)),
    written("x3, y3", lambda func, a, b: func(a, b.mT)),
    case("x3, y3"),
    case("x, y"),
)
_cases(
    "linear",
    written("x, matrix", lambda func, x, m: func(x, m.T)),
    written("x, matrix reduced, vector", lambda func, x, m, v: func(x, m[:, :3], v)),
    written("x, matrix", lambda func, x, m: func(input=x, weight=m.T, bias=None)),
    written("x3, matrix", lambda func, x, m: func(x, m)),
    case("one, vector"),
    case("x, y"),
)
_cases(
    "embedding",
    case("labels, matrix"),
    case("labels, matrix reduced"),
    written("i, matrix", lambda func, i, m: func(i.clamp(0, 2), m, padding_idx=1)),
    written("labels, matrix", lambda func, i, m: func(i, m, scale_grad_by_freq=True)),
    case("labels, x"),
)
_META = [case(name) for name in ("x", "x3", "i", "c", "one", "h")]
_cases(
    "dtype device ndim layout names is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_xpu "
    "is_mps is_nested is_sparse_csr itemsize nbytes dim numel element_size __len__ is_floating_point is_complex "
    "is_signed "
    "get_device is_inference is_conj is_neg has_names",
    *_META,
)
_cases("new_zeros new_ones", *(written(name, lambda func, x: func(x, (2, 3))) for name in ("x", "i", "h")))
_cases("new_full", written("x", lambda func, x: func(x, (2,), 1.5)), written("i", lambda func, i: func(i, (3,), 2)))
_cases("size", *_META, case("x", 0), case("x", -1), case("x", dim=1), case("x", 5))
_cases(
    "requires_grad_",
    written("x", lambda func, x: func(x.detach())),
    written("x", lambda func, x: func(x.detach(), False)),
)
_cases("retain_grad", written("x", lambda func, x: (y := x * 2, func(y), y.sum().backward(), y.grad)[3]))
_cases("data", case("x"))
# Of a copy without a graph: PyTorch itself ends where data of a leaf get another form.
_cases(
    "__set__",
    written("x, y", lambda func, x, y: (d := x.detach() * 1, func(d, y.detach()), d * 2)[2]),
    written("x, whole", lambda func, x, w: (d := x.detach() * 1, func(d, w.detach()), d * 2)[2]),
)
_cases("__deepcopy__", written("x", lambda func, x: func(x, {})))
_cases(
    "register_hook",
    written("x, y", lambda func, x, y: (z := x * 1, func(z, lambda g: g * y.detach()), z)[2]),
    written("x, whole", lambda func, x, w: (z := x * 1, func(z, lambda g: w.detach()), z)[2]),
    written("x", lambda func, x: (z := x * 1, func(z, lambda g: None), z)[2]),
)
OPERANDS |= {
    "signal": _batch(30, (4, 8)),
    "image": _batch(31, (4, 6, 8)),
    "volume": _batch(32, (4, 4, 4, 6)),
    "w1": _plain(33, (2, 4, 3), rows=False),
    "w2": _plain(34, (2, 4, 3, 3), rows=False),
    "w2 reduced": _plain(35, (2, 4, 3, 3), rows=False, reduced=True),
    "w3": _plain(36, (2, 4, 2, 2, 2), rows=False),
    "four": _plain(37, (4,), rows=False),
    "four reduced": _plain(38, (4,), rows=False, reduced=True),
    "eight": _plain(39, (8,), rows=False),
    "heads": _batch(40, (2, 3, 4)),
    "heads2": _batch(41, (2, 3, 4)),
    "heads3": _batch(42, (2, 3, 4)),
    "heads plain": _plain(43, (2, 3, 4), rows=True),
    "attended": _plain(44, (3, 3), rows=False),
}
_cases(
    "conv1d",
    case("signal, w1"),
    written("signal, w1", lambda func, x, w: func(x, w, w[:, 0, 0], stride=2, padding=1)),
    written("signal, w1", lambda func, x, w: func(x[0], w)),
)
_cases(
    "conv2d",
    case("image, w2"),
    case("image, w2 reduced"),
    case("image, w2", None, 2, 1),
    written("image, w2", lambda func, x, w: func(x[0], w)),
    written("image", lambda func, x: func(x, x[:2, :, :2, :2])),
)
_cases("conv3d", case("volume, w3"))
_cases("conv_transpose1d", written("signal, w1", lambda func, x, w: func(x[:, :2], w, stride=2)))
_cases("conv_transpose2d", written("image, w2", lambda func, x, w: func(x[:, :2], w)))
_cases("conv_transpose3d", written("volume, w3", lambda func, x, w: func(x[:, :2], w)))
for _name, _of in {"1d": "signal", "2d": "image", "3d": "volume"}.items():
    _cases(
        f"max_pool{_name} avg_pool{_name}",
        case(_of, 2),
        case(_of, kernel_size=2, stride=1),
        written(_of, lambda func, x: func(x[0], 2)),
    )
    _cases(f"max_pool{_name}_with_indices", case(_of, 2), written(_of, lambda func, x: func(x, 2, return_indices=True)))
    _cases(
        f"adaptive_avg_pool{_name} adaptive_max_pool{_name}", case(_of, 2), written(_of, lambda func, x: func(x[0], 2))
    )
_cases(
    "interpolate",
    case("image", scale_factor=2),
    case("image", size=(3, 3), mode="bilinear"),
    case("signal", scale_factor=2, mode="linear"),
)
_cases("group_norm", case("image", 2), written("image, four, four reduced", lambda func, x, w, b: func(x, 2, w, b)))
_cases(
    "instance_norm",
    case("image"),
    written(
        "image, four",
        lambda func, x, w: func(x, torch.zeros(4).double(), torch.ones(4).double(), w, use_input_stats=False),
    ),
    written("image", lambda func, x: func(x, torch.zeros(4).double(), torch.ones(4).double())),
)
_cases(
    "batch_norm",
    written(
        "image, four, four reduced",
        lambda func, x, w, b: func(x, torch.zeros(4).double(), torch.ones(4).double() * 2, w, b),
    ),
    written("image, four", lambda func, x, w: func(x, None, None, w, training=True)),
    written(
        "image",
        lambda func, x: (m := torch.zeros(4).double(), func(x, m, torch.ones(4).double(), training=True), m)[1:],
    ),
)
_cases("local_response_norm", case("image", 2), case("signal", 2))
_cases("pixel_shuffle channel_shuffle", case("image", 2))
_cases("pixel_unshuffle", case("image", 2))
_cases("unfold", case("image", 2), case("image", (2, 3), stride=2))
_cases(
    "prelu",
    written("image, four", lambda func, x, w: func(x, w)),
    written("x, vector", lambda func, x, w: func(x, w[:1])),
)
_cases(
    "pad",
    case("image", (1, 2)),
    case("image", (1, 2, 0, 1), value=0.5),
    case("image", (1, 1), mode="circular"),
    case("signal", (2, 1), "reflect"),
    case("x", (1, 2)),
    case("x", (1, 2, 3, 4)),
    case("signal", (0, 0, 0, 0, 1, 1)),
)
_cases(
    "layer_norm",
    case("signal", (8,)),
    case("signal", (4, 8)),
    written("signal, eight", lambda func, x, w: func(x, (8,), w, w * 2)),
    case("x", (3,)),
    case("one", (5,)),
    case("signal", (3,)),
)
_cases("rms_norm", case("signal", (8,)), written("signal, eight", lambda func, x, w: func(x, (8,), w)))
_cases("glu", case("signal"), case("signal", 1), case("image", dim=2))
_cases(
    "scaled_dot_product_attention",
    case("heads, heads2, heads3"),
    case("heads, heads2, heads plain"),
    case("heads, heads2, heads3", is_causal=True),
    case("heads, heads2, heads3, attended"),
    written("heads, heads2, heads3, attended", lambda func, q, k, v, m: func(q, k, v, attn_mask=m)),
    written("heads", lambda func, q: func(q[0], q[0], q[0])),
    case("x3, x3, y3"),
    case("x, x, y"),
)
_cases("pairwise_distance", case("x, y"), case("x3, y3", keepdim=True), case("x, whole", 1.0), case("x, vector"))
_cases(
    "cosine_similarity",
    case("x, y"),
    case("x, y", -1),
    case("x3, y3", dim=-1),
    case("x, whole", dim=-1),
    case("x3, y3", dim=1),
    case("x, vector", dim=-1),
)
_cases(
    "cdist", case("x3, y3"), case("x3, matrix"), case("x, y"), written("x3, y3", lambda func, x, y: func(x, y, p=1.0))
)
_TOPS = [
    written(names, lambda func, x, i, dim=dim: func(x, dim, i % min(x.shape)))
    for names in ("x, i", "whole, i")
    for dim in (0, 1, -1)
]
_cases(
    "gather",
    *_TOPS,
    written("x, i", lambda func, x, i: func(x, dim=1, index=i % min(x.shape))),
    written("x", lambda func, x: func(x, 1, torch.zeros(x.shape[0], 2, dtype=torch.long))),
    written("x", lambda func, x: func(x, 1, torch.zeros(2, 2, dtype=torch.long))),
    written("x", lambda func, x: func(x, 4, torch.zeros(2, 2, dtype=torch.long))),
)
_cases(
    "take_along_dim",
    *[
        written(names, lambda func, x, i, dim=dim: func(x, i % min(x.shape), dim))
        for names in ("x, i", "whole, i")
        for dim in (0, 1)
    ],
    written("x, one", lambda func, x, y: func(x, torch.zeros(x.shape[0], 1, dtype=torch.long), dim=1)),
)
_cases(
    "scatter scatter_add",
    *[written("x, i, y", lambda func, x, i, y, dim=dim: func(x, dim, i % min(x.shape), y)) for dim in (0, 1)],
    written("x, i", lambda func, x, i: func(x, 1, i % min(x.shape), 2.0)),
    written("x, i, whole", lambda func, x, i, y: func(x, 1, i % min(x.shape), y)),
)
# Its second derivative is a difference of large numbers, which float32 does not hold.
_cases("copysign", *[each for each in GENERAL if "f" not in each.operands])
