"""Random computations with batches: one to six functions, applied to random tensors and to what came out before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from unit.worker.adapters.batch_ranks import Operand, seeded

Value = torch.Tensor
_LARGEST = 2000


class Expression:
    """A computation that can be made again with other tensors of the same shapes.

    Attributes:
        ranks: the number of ranks.
        operands: what it starts from.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.ranks = rng.randint(1, 4)
        self.operands: list[Operand] = []
        self._steps: list[tuple[str, tuple[int, ...], Callable[..., Any]]] = []
        self._values: list[Value] = []
        self._total = rng.choice([1, 2, 3, 4, 5, 7, 0] if rng.random() < 0.5 else [4, 5, 7])
        self._sizes = self._division()
        self._dim = rng.choice([0, 0, 0, 1])
        self._others = tuple(
            rng.randint(1, 4) for _ in range(rng.choice([1, 1, 2]) if not self._dim else rng.choice([1, 2]))
        )
        for _ in range(rng.choice([1, 1, 2])):
            self._batch()
        for _ in range(rng.randint(1, 6)):
            self._extend()

    def __call__(self, *leaves: Value) -> list[Any]:
        values: list[Value] = list(leaves)
        for _, places, call in self._steps:
            values.append(call(*(values[place] for place in places)))
        return values[len(leaves) :]

    def __str__(self) -> str:
        told = [f"{self.ranks} ranks"]
        for number, each in enumerate(self.operands):
            kind = (
                f"batch {each.sizes} along {each.dim}"
                if each.sizes is not None
                else "reduced"
                if each.reduced
                else "plain"
            )
            told.append(f"v{number} = {kind} {tuple(each.whole.shape)} {each.whole.dtype} gradient={each.gradient}")
        told += [
            f"v{len(self.operands) + number} = {name}{places}" for number, (name, places, _) in enumerate(self._steps)
        ]
        return "\n".join(told)

    def _division(self) -> tuple[int, ...]:
        cuts = sorted(self._rng.randint(0, self._total) for _ in range(self.ranks - 1))
        return tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, self._total], strict=True))

    def _numbers(self, shape: tuple[int, ...]) -> Value:
        generator = torch.Generator().manual_seed(self._rng.randint(0, 10**6))
        values = torch.rand(shape, generator=generator, dtype=torch.float64) * 3 - 1.5
        kind = self._rng.random()
        if kind < 0.8:
            return values
        return (values * 3).long() if kind < 0.9 else values > 0

    def _add(self, operand: Operand) -> Operand:
        assert not self._steps
        self.operands.append(operand)
        self._values.append(operand.whole)
        return operand

    def _batch(self) -> None:
        shape = (*self._others[: self._dim], self._total, *self._others[self._dim :])
        values = self._numbers(shape)
        sizes = self._sizes if self._rng.random() < 0.8 else self._division()
        gradient = values.is_floating_point() and self._rng.random() < 0.8
        self._add(Operand(values, sizes, self._dim, gradient))
        if self._rng.random() < 0.7:
            kind = self._rng.choice([(), self._others[-1:], shape, (1,)])
            gradient = self._rng.random() < 0.6
            values = self._numbers(kind)
            gradient = gradient and values.is_floating_point()
            self._add(Operand(values, None, 0, gradient, gradient and self._rng.random() < 0.4))
        if self._rng.random() < 0.3 and self._dim == 0:
            labels = torch.randint(0, max(shape[-1], 1), shape[:1], generator=torch.Generator().manual_seed(1))
            self._add(Operand(labels, sizes, 0))

    def _extend(self) -> None:
        for _ in range(20):
            name, count = self._rng.choice(_STEPS)
            places = tuple(self._rng.randrange(len(self._values)) for _ in range(count))
            if self._rng.random() < 0.6:
                places = (len(self._values) - 1, *places[1:])
            with torch.random.fork_rng(devices=[]):
                try:
                    call = MAKERS[name](self._rng, *(self._values[place] for place in places))
                    value = call(*(self._values[place].clone() for place in places))
                except Exception:
                    continue
            if not isinstance(value, torch.Tensor) or value.numel() > _LARGEST or value.dim() > 5:
                continue
            if value.is_floating_point() and not (value.isfinite() & (value.abs() < 1e4)).all():
                continue
            self._steps.append((name, places, call))
            self._values.append(value.detach())
            return


MAKERS: dict[str, Callable[..., Callable[..., Any]]] = {}
_STEPS: list[tuple[str, int]] = []


def step(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what makes a function of so many tensors, with random arguments."""

    def register(maker: Callable[..., Any]) -> Callable[..., Any]:
        MAKERS[maker.__name__] = maker
        _STEPS.append((maker.__name__, count))
        return maker

    return register


def _words(names: str) -> list[str]:
    return names.split()


def _floats(value: Value) -> Value:
    return value if value.is_floating_point() else value.double()


def _changed(change: Callable[..., Any]) -> Callable[..., Value]:
    """A change of what was computed from a tensor, by others or by itself."""

    def call(x: Value, *others: Value) -> Value:
        copy = _floats(x) * 1
        change(copy, *others)
        return copy

    return call


def _dim(rng: random.Random, x: Value) -> int:
    return rng.randrange(-x.dim(), x.dim())


@step(1)
def unary(rng: random.Random, x: Value) -> Any:
    name = rng.choice(
        _words("exp tanh sigmoid neg abs square sin cos relu sign floor isnan float clone detach logical_not erf")
    )
    return lambda x: (
        getattr(_floats(x), name)()
        if name not in ("neg", "abs", "logical_not") or x.dtype == torch.bool
        else getattr(x, name)()
    )


@step(2)
def binary(rng: random.Random, x: Value, y: Value) -> Any:
    name = rng.choice(_words("add sub mul maximum minimum eq lt gt ge hypot logaddexp"))
    if rng.random() < 0.1:
        return lambda x, y: x / (y.abs() + 1)
    return lambda x, y: getattr(torch, name)(_floats(x), _floats(y))


@step(2)
def other_binary(rng: random.Random, x: Value, y: Value) -> Any:
    number = rng.choice([2, 0.5, -1, 3])
    return rng.choice(
        [
            lambda x, y: x + y,
            lambda x, y: x * number - y,
            lambda x, y: number - x * y,
            lambda x, y: (x > y) & (x <= number),
            lambda x, y: torch.where(x > number, x, y),
            lambda x, y: torch.lerp(_floats(x), _floats(y), 0.3),
            lambda x, y: x**2 % 3,
        ]
    )


_STEPS += [("binary", 2), ("other_binary", 2)] * 2


@step(3)
def ternary(rng: random.Random, x: Value, y: Value, z: Value) -> Any:
    return rng.choice(
        [
            lambda x, y, z: torch.addcmul(_floats(x), _floats(y), _floats(z)),
            lambda x, y, z: torch.where(x > 0, _floats(y), _floats(z)),
            lambda x, y, z: _floats(x).clamp(_floats(y).detach() - 1, _floats(z).detach() + 1),
        ]
    )


@step(1)
def activation(rng: random.Random, x: Value) -> Any:
    func = getattr(F, rng.choice(_words("gelu silu elu leaky_relu softplus logsigmoid hardtanh relu6 softsign")))
    return lambda x: func(_floats(x))


@step(1)
def reduction(rng: random.Random, x: Value) -> Any:
    func = getattr(torch, rng.choice(_words("sum mean sum mean amax amin var std logsumexp prod")))
    dims: Any = rng.choice([None, _dim(rng, x), tuple({rng.randrange(x.dim()) for _ in range(2)})]) if x.dim() else None
    if dims is None:
        return lambda x: func(_floats(x))
    keepdim = rng.random() < 0.4
    return lambda x: func(_floats(x), dims, keepdim=keepdim)


_STEPS += [("reduction", 1)] * 3


@step(1)
def choice(rng: random.Random, x: Value) -> Any:
    dim, keepdim = _dim(rng, x), rng.random() < 0.3
    return rng.choice(
        [
            lambda x: x.max(dim, keepdim).values,
            lambda x: x.min(dim=dim).values,
            lambda x: _floats(x).median(dim).values,
            lambda x: _floats(x).argmax(dim),
            lambda x: _floats(x).norm(dim=dim, keepdim=keepdim),
            lambda x: x.topk(2, dim).values,
            lambda x: x.sort(dim, descending=keepdim)[0],
            lambda x: x.argmax(),
            lambda x: x.max(),
            lambda x: x.any(dim),
            lambda x: (x > 0).all(),
            lambda x: torch.aminmax(x, dim=dim).max,
        ]
    )


@step(1)
def along(rng: random.Random, x: Value) -> Any:
    dim = _dim(rng, x)
    return rng.choice(
        [
            lambda x: _floats(x).softmax(dim),
            lambda x: F.log_softmax(_floats(x), dim),
            lambda x: _floats(x).cumsum(dim),
            lambda x: x.flip(dim),
            lambda x: x.roll(1, dim),
            lambda x: F.normalize(_floats(x), dim=dim, eps=0.1),
            lambda x: x.repeat_interleave(2, dim),
            lambda x: torch.diff(_floats(x), dim=dim),
        ]
    )


@step(1)
def views(rng: random.Random, x: Value) -> Any:
    a, b = _dim(rng, x), _dim(rng, x)
    shape = rng.choice(
        [(-1,), (x.shape[0], -1), (-1, x.shape[-1]), (*x.shape[:-1], 1, x.shape[-1]), (1, *x.shape), (*x.shape[:a], -1)]
    )
    order = list(range(x.dim()))
    rng.shuffle(order)
    return rng.choice(
        [
            lambda x: x.reshape(shape),
            lambda x: x.transpose(a, b),
            lambda x: x.unsqueeze(a),
            lambda x: x.flatten(),
            lambda x: x.flatten(min(a, b) % x.dim()),
            lambda x: x.permute(order),
            lambda x: x.T,
            lambda x: x.mT,
            lambda x: x.squeeze(),
            lambda x: x.movedim(a, b),
            lambda x: x.expand(2, *[-1] * x.dim()),
            lambda x: x.contiguous().view(shape),
            lambda x: x.unflatten(a, (-1, 2)),
            lambda x: x.repeat(2, *[1] * x.dim()),
        ]
    )


_STEPS += [("views", 1)] * 2


@step(1)
def index(rng: random.Random, x: Value) -> Any:
    def entry(size: int) -> Any:
        return rng.choice(
            [
                slice(None),
                slice(None),
                rng.randrange(-size, max(size, 1)),
                slice(rng.randint(-size, size), None),
                slice(rng.randint(0, size), rng.randint(0, size)),
                slice(None, None, rng.randint(1, 3)),
                slice(rng.randint(0, 2), None, 2),
            ]
        )

    entries: Any = tuple(entry(size) for size in x.shape[: rng.randint(1, x.dim())])
    kind = rng.random()
    if kind < 0.15:
        entries = (..., *entries[-1:])
    elif kind < 0.3:
        entries = (None, *entries) if rng.random() < 0.5 else (*entries[:1], None, *entries[1:])
    elif kind < 0.45:
        entries = torch.tensor([rng.randrange(len(x)) for _ in range(rng.randint(1, 4))])
    elif kind < 0.5:
        entries = (slice(None), [rng.randrange(x.shape[1]) for _ in range(2)])
    if rng.random() < 0.5:
        entries = entries[0] if isinstance(entries, tuple) and len(entries) == 1 else entries
    return lambda x: x[entries]


_STEPS += [("index", 1)] * 2


@step(1)
def masked(rng: random.Random, x: Value) -> Any:
    return rng.choice(
        [
            lambda x: x[x > 0],
            lambda x: x[_floats(x).reshape(len(x), -1).sum(1) > 0],
            lambda x: x.masked_fill(x > 0.5, 0),
            lambda x: x[: len(x) // 2][torch.arange(len(x) // 2) % 2 == 0],
            lambda x: x[x.argsort(0)[:, 0]],
        ]
    )


@step(1)
def parts(rng: random.Random, x: Value) -> Any:
    dim, number = _dim(rng, x), rng.randint(1, 3)
    which = rng.choice([0, -1])
    return rng.choice(
        [
            lambda x: x.split(number, dim)[which],
            lambda x: x.chunk(number, dim)[which],
            lambda x: x.unbind(dim)[which],
            lambda x: x.narrow(dim, 1, number),
            lambda x: x.select(dim, which),
            lambda x: torch.tensor_split(x, number, dim)[which],
            lambda x: torch.cat([x.split(number, dim)[which], x], dim),
        ]
    )


@step(2)
def joins(rng: random.Random, x: Value, y: Value) -> Any:
    dim = _dim(rng, x)
    return rng.choice(
        [
            lambda x, y: torch.cat([x, y], dim),
            lambda x, y: torch.stack([x, y], dim),
            lambda x, y: torch.cat([x, x * 2, x], dim),
            lambda x, y: torch.stack([x, x], dim),
        ]
    )


@step(1)
def in_place(rng: random.Random, x: Value) -> Any:
    row = rng.randrange(-len(x), len(x)) if len(x) else 0
    return _changed(
        rng.choice(
            [
                lambda y: y.mul_(2),
                lambda y: y.add_(y.detach().mean()),
                lambda y: y[1:3].zero_(),
                lambda y: y[:, 0].add_(1),
                lambda y: y.__setitem__(y > 0.5, 0.0),
                lambda y: y.__setitem__(row, 2.0),
                lambda y: y.__setitem__((slice(None), 0), y[:, -1].detach()),
                lambda y: y.clamp_(-1, 1).sub_(0.5),
                lambda y: y.__setitem__(slice(0, 2), y[1:3].detach() * 2),
                lambda y: y.__iadd__(1),
                lambda y: y.t().mul_(3),
                lambda y: y.view(-1).add_(2),
                lambda y: y.__setitem__(..., 1.0),
            ]
        )
    )


@step(2)
def in_place_of_two(rng: random.Random, x: Value, y: Value) -> Any:
    return _changed(
        rng.choice(
            [
                lambda x, y: x.add_(y),
                lambda x, y: x.mul_(y),
                lambda x, y: x[1:].sub_(y[1:]),
                lambda x, y: x.copy_(y),
                lambda x, y: x.masked_fill_(y > 0, 0.1),
                lambda x, y: x.__setitem__(slice(None), y),
                lambda x, y: x.__setitem__(0, y[0]),
                lambda x, y: x.__setitem__(slice(0, 2), y[0]),
            ]
        )
    )


@step(2)
def products(rng: random.Random, x: Value, y: Value) -> Any:
    weights = torch.linspace(-1, 1, x.shape[-1] * 3, dtype=torch.float64).reshape(x.shape[-1], 3)
    return rng.choice(
        [
            lambda x, y: _floats(x) @ weights,
            lambda x, y: _floats(x) @ _floats(y).mT,
            lambda x, y: _floats(x).mT @ _floats(y),
            lambda x, y: F.linear(_floats(x), weights.T),
            lambda x, y: torch.matmul(_floats(x), _floats(y)),
            lambda x, y: torch.cdist(_floats(x), _floats(y).exp()),
            lambda x, y: torch.einsum("bi,bj->ij", _floats(x), _floats(y)),
            lambda x, y: torch.einsum("bi,bi->b", _floats(x), _floats(y)),
            lambda x, y: F.cosine_similarity(_floats(x), _floats(y), dim=-1),
        ]
    )


@step(2)
def losses(rng: random.Random, x: Value, y: Value) -> Any:
    reduction = rng.choice(["mean", "sum", "none", "mean"])
    func = getattr(F, rng.choice(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]))
    return rng.choice(
        [
            lambda x, y: func(_floats(x), _floats(y), reduction=reduction),
            lambda x, y: F.binary_cross_entropy_with_logits(_floats(x), (y > 0).double(), reduction=reduction),
            lambda x, y: F.kl_div(F.log_softmax(_floats(x), -1), F.softmax(_floats(y), -1), reduction="batchmean"),
            lambda x, y: F.cosine_embedding_loss(
                _floats(x), _floats(y), (_floats(x).sum(1) > 0).double() * 2 - 1, margin=0.2, reduction=reduction
            ),
        ]
    )


@step(2)
def of_classes(rng: random.Random, x: Value, y: Value) -> Any:
    classes = x.shape[1]
    given: dict[str, Any] = {"reduction": rng.choice(["mean", "sum", "none", "mean"])}
    if rng.random() < 0.3:
        given["weight"] = torch.linspace(0.5, 2, classes, dtype=torch.float64)
    if rng.random() < 0.3:
        given["ignore_index"] = rng.randrange(classes)
    if rng.random() < 0.3:
        given["label_smoothing"] = 0.1
    target = rng.choice(
        [
            lambda x, y: x.detach().argmax(1),
            lambda x, y: y.long().clamp(0, classes - 1),
            lambda x, y: (y > 0).reshape(len(y), -1)[:, 0].long().clamp(0, classes - 1),
            lambda x, y: _floats(x).detach().softmax(1),
        ]
    )
    return lambda x, y: F.cross_entropy(_floats(x), target(x, y), **given)


_STEPS += [("losses", 2), ("of_classes", 2), ("of_classes", 2)]


@step(1)
def layers(rng: random.Random, x: Value) -> Any:
    channels, last = x.shape[1], x.shape[-1]
    weights = torch.linspace(-1, 1, 2 * channels * 2, dtype=torch.float64).reshape(2, channels, 2)
    return rng.choice(
        [
            lambda x: F.layer_norm(_floats(x), (last,)),
            lambda x: F.conv1d(_floats(x), weights),
            lambda x: F.avg_pool1d(_floats(x), 2),
            lambda x: F.max_pool1d(_floats(x), 2),
            lambda x: F.pad(_floats(x), (1, 2)),
            lambda x: F.group_norm(_floats(x), 1),
            lambda x: F.batch_norm(_floats(x), torch.zeros(channels).double(), torch.ones(channels).double()),
            lambda x: F.batch_norm(_floats(x), None, None, training=True),
            lambda x: F.scaled_dot_product_attention(_floats(x), _floats(x), _floats(x) * 2),
            lambda x: F.interpolate(_floats(x), scale_factor=2),
            lambda x: F.rms_norm(_floats(x), (last,)),
            lambda x: F.glu(_floats(x)),
            lambda x: seeded(F.dropout)(_floats(x).contiguous(), 0.3),
            lambda x: seeded(torch.rand_like)(x.double().contiguous()) * x,
        ]
    )


@step(1)
def gathering(rng: random.Random, x: Value) -> Any:
    dim = _dim(rng, x)
    return rng.choice(
        [
            lambda x: _floats(x).gather(dim, _floats(x).detach().argsort(dim)),
            lambda x: x.index_select(dim, torch.tensor([0, 0])),
            lambda x: torch.take_along_dim(_floats(x), _floats(x).detach().argmax(dim, keepdim=True), dim),
            lambda x: x.unique().sum(),
            lambda x: torch.corrcoef(_floats(x).T + torch.eye(len(x.T), len(x)).double()),
            lambda x: x.double().scatter(dim, torch.zeros_like(x, dtype=torch.long), 1.0),
        ]
    )


@step(1)
def number(rng: random.Random, x: Value) -> Any:
    return rng.choice(
        [
            lambda x: x * x.double().mean().item(),
            lambda x: x * len(x),
            lambda x: x / x.numel(),
            lambda x: sum(x[i] for i in range(len(x))),
            lambda x: torch.stack([each.double().sum() for each in x]),
            lambda x: x * float(x.shape[0]) + x.size(-1),
            lambda x: torch.as_tensor(x.detach().double().numpy().sum(0)),
            lambda x: x.float(),
            lambda x: x + x.new_ones(x.shape[-1]),
        ]
    )
