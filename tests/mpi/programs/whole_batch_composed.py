"""Training scripts composed at random, each by its seed: networks, losses, updates and batches under every division.

Every choice is drawn by the seed and its own name, so that a further one leaves the others of a seed as they are.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import parallel
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint
from whole_batches import CASES, CLASSES, FEATURES, Numbers, batches, labels, samples

import hpctrain as ht

SEEDS = range(400)
EPOCHS = 2
CHOICES: dict[str, tuple[Any, ...]] = {
    "layout": ("replicas", "zero1", "zero2", "zero3", "hybrid", "tp", "tp_shard", *parallel.PIPELINES),
    "units": (True, True, False),
    "network": ("mlp", "transformer"),
    "frozen": (False, False, True),
    "recompute": ("", "", "reentrant", "plain", "plan"),
    "calls": ("one", "one", "two", "parts"),
    "loss": ("mean", "mean", "masked", "sum", "weights"),
    "counted": (True, True, False),
    "optimizer": ("sgd", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "lbfgs", "closure", "several", "groups"),
    "clip": ("", "", "norm", "value"),
    "accumulate": (1, 1, 2, 3),
    # Samples, those of a batch, and drop_last.
    "division": ((24, 12, False), (21, 7, False), (18, 8, False), (17, 8, False), (17, 7, True)),
    "shuffled": (True, False),
    "average": ("", "", "before", "after"),
}


def drawn(seed: int) -> SimpleNamespace:
    """The choices of a seed, such as go together."""
    chosen = {name: random.Random(f"{seed} {name}").choice(choices) for name, choices in CHOICES.items()}
    if chosen["layout"] in parallel.PIPELINES:
        # Its stages take and return one tensor, and it is told what its loss is divided by.
        chosen |= {"network": "transformer", "calls": "one", "counted": chosen["loss"] != "mean", "average": ""}
        chosen |= {"loss": "masked"} if chosen["loss"] == "sum" else {}
        chosen |= {"optimizer": "adamw"} if chosen["optimizer"] in ("lbfgs", "closure") else {}
        chosen |= {"recompute": ""} if chosen["recompute"] in ("reentrant", "plain") else {}
    elif chosen["layout"] not in ("replicas", "zero1"):
        chosen["average"] = ""  # of a whole model
    if chosen["optimizer"] == "lbfgs" and chosen["layout"] not in ("replicas", "tp"):
        chosen["optimizer"] = "closure"  # Rows do not divide evenly.
    if chosen["recompute"] == "plan" and chosen["layout"] == "replicas":
        chosen["recompute"] = ""
    if chosen["recompute"] == "reentrant" and chosen["frozen"]:
        chosen["recompute"] = "plain"  # Nothing that goes in requires a gradient.
    if chosen["optimizer"] in ("lbfgs", "closure"):
        chosen |= {"accumulate": 1, "clip": ""}
    return SimpleNamespace(**chosen)


class Parts(nn.Module):
    """A chain of parts, some of which are computed again in the backward pass."""

    recompute = ""

    def parts(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts():
            again = self.recompute in ("reentrant", "plain") and x.requires_grad
            x = checkpoint(part, x, use_reentrant=self.recompute == "reentrant") if again else part(x)
        return x


class MLP(Parts):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(OrderedDict(up=nn.Linear(FEATURES, 16), tanh=nn.Tanh(), down=nn.Linear(16, 8)))
        self.decoder = nn.Sequential(OrderedDict(up=nn.Linear(8, 12), tanh=nn.Tanh(), down=nn.Linear(12, CLASSES)))
        self.encoder.requires_grad_(not frozen)

    def parts(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        yield from (self.encoder, self.decoder)


class Transformer(Parts, parallel.GPT):
    """With tied embeddings, unless they are frozen; a stage of a pipeline lacks some parts."""

    def __init__(self, *, frozen: bool) -> None:
        parallel.GPT.__init__(self, tied=not frozen, frozen=frozen)
        # The first of two stages has nothing to train then.
        self.blocks["1"].requires_grad_(not frozen)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions(torch.arange(x.shape[1]))

    def parts(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        if self.tokens is not None:
            yield self.embed
        yield from self.blocks.values()
        yield from (part for part in (self.norm, self.head) if part is not None)


class Script:
    """What a seed says, line by line."""

    def __init__(self, seed: int) -> None:
        self.chosen = chosen = drawn(seed)
        self.model: Any = (MLP if chosen.network == "mlp" else Transformer)(frozen=chosen.frozen)
        self.model.recompute = chosen.recompute
        self.optimizers = self.optimizers_of([each for each in self.model.parameters() if each.requires_grad])
        classes = parallel.VOCABULARY if chosen.network == "transformer" else CLASSES
        self.weights = torch.linspace(0.5, 2, classes)
        self.average = self.averaged() if chosen.average == "before" else None
        self.distribute()
        self.average = self.averaged() if chosen.average == "after" else self.average
        number, batch, drop_last = chosen.division
        if chosen.network == "transformer":
            shape = (parallel.CONTEXT,)
            x, y = (labels(classes, *shape, number=number, seed=seed) for seed in (6, 7))
            # Sequences of different length, each with a token to learn at least.
            self.masked = torch.arange(parallel.CONTEXT) > torch.arange(number)[:, None] % parallel.CONTEXT
        else:
            x, y, self.masked = samples(number=number), labels(number=number), torch.arange(number) % 4 == 3
        y = y.masked_fill(self.masked, -100) if chosen.loss == "masked" else y
        self.loader = batches(x, y, batch=batch, shuffle=chosen.shuffled, drop_last=drop_last)

    def averaged(self) -> swa_utils.AveragedModel:
        return swa_utils.AveragedModel(self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))

    def optimizers_of(self, every: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        optim, half = torch.optim, len(every) // 2
        groups = [{"params": every[:half], "weight_decay": 0.1}, {"params": every[half:], "lr": 0.003}]
        kinds: dict[str, Callable[[], Any]] = {
            "sgd": lambda: [optim.SGD(every, 0.1)],
            "closure": lambda: [optim.SGD(every, 0.1, momentum=0.9)],
            "nesterov": lambda: [optim.SGD(every, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)],
            # Gradients that are 0 but for rounding, such as those of a key's bias, are to stay so.
            "adam": lambda: [optim.Adam(every, 0.01, eps=1e-6)],
            "adamw": lambda: [optim.AdamW(every, 0.01, weight_decay=0.1, eps=1e-6)],
            "adagrad": lambda: [optim.Adagrad(every, 0.05, eps=1e-6)],
            "rmsprop": lambda: [optim.RMSprop(every, 0.01, eps=1e-6)],
            "lbfgs": lambda: [optim.LBFGS(every, 0.1, max_iter=4)],
            "several": lambda: [optim.SGD(every[:half], 0.1), optim.AdamW(every[half:], 0.01, eps=1e-6)],
            "groups": lambda: [optim.AdamW(groups, 0.01, eps=1e-6)],
        }
        made: list[torch.optim.Optimizer] = kinds[self.chosen.optimizer]()
        return made

    def distribute(self) -> None:
        layout, ranks = self.chosen.layout, ht.init().size
        half = 2 if ranks % 2 == 0 else 1
        optimizers = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        zero = int(layout[4:]) if layout.startswith("zero") else 3
        sizes = {"hybrid": {"dp_replicate": half}, "tp": {"tp": half, "dp_replicate": -1}, "tp_shard": {"tp": half}}
        mesh = sizes.get(layout, {"pp": half} if layout in parallel.PIPELINES else {})
        mesh = {axis: size for axis, size in {"dp_shard": 1 if layout == "tp" else -1, **mesh}.items() if size != 1}
        self.pipeline: Any = None
        if layout in parallel.PIPELINES:
            counted = {"count": self.count} if self.chosen.counted else {}
            loss_of = self.total if counted else self.loss_of
            plan = parallel.plan_of(parallel.Case(mesh, recompute=self.chosen.recompute == "plan"))
            settings = {"schedule": layout, "micro_batches": 2, "plan": plan, **counted}
            self.pipeline = ht.Pipeline(
                self.model, optimizers, loss_of, mesh=ht.mesh(**{"pp": half, **mesh}), **settings
            )
        elif layout == "replicas":
            self.model, _ = ht.distribute(self.model, optimizers)
        else:
            self.model, _ = ht.distribute(self.model, optimizers, mesh=ht.mesh(**mesh), plan=self.plan(mesh, zero))

    def plan(self, mesh: dict[str, int], zero: int) -> ht.ParallelPlan:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        recompute = self.chosen.recompute == "plan"
        if self.chosen.network == "transformer":
            return parallel.plan_of(parallel.Case(mesh, recompute=recompute, zero=zero))
        units = ["encoder", "decoder"]
        tensor = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()} if "tp" in mesh else {}
        shard = units if self.chosen.units else []
        return ht.ParallelPlan(shard=shard, recompute=units if recompute else [], tensor=tensor, zero=zero)

    def total(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = {"weight": self.weights} if self.chosen.loss == "weights" else {}
        return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum", **weight)

    def count(self, y: torch.Tensor) -> torch.Tensor:
        return self.weights[y].sum() if self.chosen.loss == "weights" else (y != -100).sum()

    def loss_of(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.chosen.loss == "sum":
            total = self.total(logits, y) * 0.02
            return ht.sum_loss(total) if self.chosen.counted else total
        if self.chosen.counted:
            return ht.mean_loss(self.total(logits, y), self.count(y))
        weight = {"weight": self.weights} if self.chosen.loss == "weights" else {}
        return F.cross_entropy(logits.flatten(0, -2), y.flatten(), **weight)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.chosen.calls == "parts":
            for part in self.model.parts():
                x = part(x)
            return self.loss_of(x, y)
        loss = self.loss_of(self.model(x), y)
        if self.chosen.calls == "two":
            other = x * 0.5 if x.is_floating_point() else x.flip(1)
            loss = loss + 0.5 * self.loss_of(self.model(other), y)
        return loss

    def closure(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizers[0].zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        return loss

    def train(self, numbers: Numbers) -> None:
        every = self.chosen.accumulate
        for number, (x, y) in enumerate(self.loader, 1):
            if self.chosen.optimizer in ("lbfgs", "closure"):
                self.optimizers[0].step(functools.partial(self.closure, x, y))
            elif self.pipeline:
                numbers.append(self.pipeline.step(x, y, scale=1 / every))
            else:
                with ht.no_sync() if number % every and number < len(self.loader) else contextlib.nullcontext():
                    (self.loss(x, y) / every).backward()
            closes = self.chosen.optimizer in ("lbfgs", "closure")
            if not closes and (number % every == 0 or number == len(self.loader)):
                self.clip()
                for optimizer in self.optimizers:
                    optimizer.step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
            if self.average is not None:
                self.average.update_parameters(self.model)

    def clip(self) -> None:
        if self.chosen.clip == "norm":
            clip = self.pipeline.clip_grad_norm_ if self.pipeline else None
            clip(0.05) if clip else nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        elif self.chosen.clip == "value":
            named = self.pipeline.named_parameters() if self.pipeline else self.model.named_parameters()
            nn.utils.clip_grad_value_([each for _, each in named], 0.01)
            if self.pipeline:
                self.pipeline.accept_gradients()

    def evaluate(self) -> float:
        """The mean loss of the training batches."""
        with torch.no_grad():
            pairs = list(self.loader)
            losses = [self.pipeline.evaluate(x, y) if self.pipeline else float(self.loss(x, y)) for x, y in pairs]
        return sum(losses) / len(losses)

    def run(self) -> Numbers:
        numbers: Numbers = []
        for _ in range(EPOCHS):
            self.train(numbers)
            numbers.append(self.evaluate())
        return [*numbers, self.pipeline or self.model, *filter(None, [self.average])]


CASES |= {f"composed_{seed}": lambda seed=seed: Script(seed).run() for seed in SEEDS}
