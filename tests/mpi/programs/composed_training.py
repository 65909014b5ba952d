"""Trains a composed script: alone, in one process of plain PyTorch; or as one of the ranks, compared at each update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from composed_networks import IGNORED, SEQUENCES, Criterion, Network, data_of, network_of, plan_of
from composition import DIVISIONS, Composition
from pattern_runs import SEED, Whole
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.data import DataLoader

import hpctrain as ht

EPOCHS, TOLERANCE = 2, 1e-10
# Llama normalises in float32, whatever the type of its parameters.
_OF_LLAMA = 1e-4
State = dict[str, torch.Tensor]


class WrongError(Exception):
    """The ranks have other numbers than one process."""


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


class Alone:
    """One process with whole batches, without hpctrain."""

    def __init__(self) -> None:
        self.states: list[State] = []

    rank = 0
    no_sync = staticmethod(contextlib.nullcontext)

    def loader(self, loader: DataLoader, *, evaluation: bool) -> Any:
        return Whole(loader, shuffled=not isinstance(loader.sampler, torch.utils.data.SequentialSampler))

    def mean(self, value: float, weight: float) -> float:
        return value

    @staticmethod
    def mean_loss(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return total / count

    @staticmethod
    def sum_loss(total: torch.Tensor) -> torch.Tensor:
        return total

    def note(self, state: State) -> None:
        """What a script has computed by now."""
        self.states.append(state)


class Ranks(Alone):
    """One of the ranks, which compares all that it computes with what one process has computed."""

    no_sync = staticmethod(ht.no_sync)
    mean_loss = staticmethod(ht.mean_loss)
    sum_loss = staticmethod(ht.sum_loss)

    def __init__(self, expected: list[State]) -> None:
        self.rank, self.noted, self._expected = ht.init().rank, 0, expected
        self.tolerance = TOLERANCE

    def loader(self, loader: DataLoader, *, evaluation: bool) -> Any:
        return ht.shard(loader, evaluation=evaluation, seed=SEED)

    def mean(self, value: float, weight: float) -> float:
        return ht.mean(value, weight=weight)

    def note(self, state: State) -> None:
        expected = self._expected[self.noted]
        for name, value in state.items():
            error = float((value - expected[name]).abs().max()) if value.numel() else 0.0
            if not error <= self.tolerance:
                raise WrongError(f"{name} after {self.noted} right results: {error:.3g} off")
        self.noted += 1


class Training:
    """A script: the same lines in either world, but for those that hpctrain's pages add to a script."""

    def __init__(self, composition: Composition, world: Alone) -> None:
        self.composition, self.world = composition, world
        # hpctrain gives all ranks the weights of rank 0; a copy that was made before has its own.
        torch.manual_seed(5 if composition.average == "before" else 5 + world.rank)
        self.loss_of = Criterion(composition, world.mean_loss, world.sum_loss)
        self.model = network_of(composition, self.loss_of)
        self.optimizers = optimizers_of(composition, self.model)
        self.average = self._averaged() if composition.average == "before" else None
        if isinstance(world, Ranks):
            world.tolerance = _OF_LLAMA if composition.network == "llama" else TOLERANCE
            self.compile("before")
            self.distribute()
            self.compile("after")
        if composition.average == "after":
            self.average = self._averaged()
        self.schedules = [schedule_of(composition, each) for each in self.optimizers]
        samples, batch, drop_last = DIVISIONS[composition.division]
        data = DataLoader(data_of(composition, samples, 11), batch, shuffle=composition.shuffled, drop_last=drop_last)
        self.train_loader = world.loader(data, evaluation=False)

    def distribute(self) -> None:
        optimizers = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        if self.composition.layout.sizes:
            mesh, plan = ht.mesh(**dict(self.composition.layout.sizes)), plan_of(self.composition)
            self.model, _ = ht.distribute(self.model, optimizers, mesh=mesh, plan=plan)
        else:
            self.model, _ = ht.distribute(self.model, optimizers)

    def compile(self, when: str) -> None:
        if self.composition.compiled == when:
            self.model.compile(backend="aot_eager")

    def _averaged(self) -> swa_utils.AveragedModel:
        return swa_utils.AveragedModel(self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))

    def run(self) -> None:
        for _ in range(EPOCHS):
            self.model.train()
            self.train_epoch()
            metric = self.evaluate() if self.composition.evaluate else 0.0
            self.world.note({"metric": torch.tensor(metric, dtype=torch.float64)})
            for schedule in self.schedules:
                if schedule is not None:
                    schedule.step(*[metric] if self.composition.schedule == "plateau" else [])
        if self.average is not None:
            self.world.note({name: full(value) for name, value in self.average.named_parameters()})
            self.average.eval()
            with torch.no_grad():
                x = data_of(self.composition, 5, 12).tensors[0]
                self.world.note({"outputs of the average": full(self._logits(x, self.average.module))})

    def train_epoch(self) -> None:
        every, batches = self.composition.accumulate, len(self.train_loader)
        for number, (x, y) in enumerate(self.train_loader, 1):
            if self.composition.lengths:
                length = (6, 4, 5)[number % 3]
                x, y = x[:, :length], y[:, :length]
            if self.composition.optimizer in ("lbfgs", "closure"):
                self.optimizers[0].step(lambda x=x, y=y: self.closure(x, y))
                self.updated()
                continue
            last = number % every == 0 or number == batches
            self.backward(x, y, last)
            if last:
                self.clip()
                for optimizer in self.optimizers:
                    optimizer.step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                self.updated()

    def closure(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizers[0].zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        return loss

    def backward(self, x: torch.Tensor, y: torch.Tensor, last: bool) -> None:
        with contextlib.nullcontext() if last else self.world.no_sync():
            (self.loss(x, y) / self.composition.accumulate).backward()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.composition.calls == "parts":
            for part in self.model.parts():
                x = part(x)
            return self.loss_of(x, y)
        loss = self._loss_of_call(x, y)
        if self.composition.calls == "two":
            other = x.flip(1) if self.composition.network in SEQUENCES else x * 0.5
            loss = loss + 0.5 * self._loss_of_call(other, y)
        return loss

    def _loss_of_call(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inside = self.composition.loss_inside
        found = self.model(x, y) if inside else self.model(x)
        if self.composition.output == "tensor":
            return found if inside else self.loss_of(found, y)
        if self.composition.output == "dict":
            found = tuple(found.values())
        elif self.composition.output == "dataclass":
            found = tuple(vars(found).values())
        loss = found[2] if inside else self.loss_of(found[0], y)
        return loss + 0.01 * found[1].pow(2).mean()

    def clip(self) -> None:
        if self.composition.clip == "norm":
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        elif self.composition.clip == "value":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.01)

    def updated(self) -> None:
        self.world.note(dict(self.state()))
        if self.average is not None:
            self.average.update_parameters(self.model)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            yield name, full(parameter)

    def evaluate(self) -> float:
        """The mean loss over all test samples; every sample is on one rank."""
        total, seen = 0.0, 0
        data = DataLoader(data_of(self.composition, self.composition.test_samples, 12), 4)
        self.model.eval()
        with torch.no_grad():
            for x, y in self.world.loader(data, evaluation=True):
                logits = self._logits(x)
                total += F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum").item()
                seen += (y != IGNORED).sum().item()
        return self.world.mean(total / max(seen, 1), seen)

    def _logits(self, x: torch.Tensor, model: nn.Module | None = None) -> torch.Tensor:
        found = (model or self.model)(x)
        kinds = {"tensor": lambda: found, "dict": lambda: found["logits"], "tuple": lambda: found[0]}
        return kinds.get(self.composition.output, lambda: found.logits)()


class PipelineTraining(Training):
    """The lines of a script that cuts its model into stages."""

    def distribute(self) -> None:
        layout = self.composition.layout
        optimizers = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        counted = self.composition.counted
        self.pipeline = ht.Pipeline(
            *(self.model, optimizers, self.loss_of.total if counted else self.loss_of),
            mesh=ht.mesh(**dict(layout.sizes)),
            plan=plan_of(self.composition),
            schedule=layout.schedule,
            micro_batches=self.composition.micro_batches,
            **{"count": self.loss_of.count} if counted else {},
        )

    def backward(self, x: torch.Tensor, y: torch.Tensor, last: bool) -> None:
        self.pipeline.step(x, y, scale=1 / self.composition.accumulate)

    def clip(self) -> None:
        if self.composition.clip == "norm":
            self.pipeline.clip_grad_norm_(0.05)
        elif self.composition.clip == "value":
            nn.utils.clip_grad_value_([each for _, each in self.pipeline.named_parameters()], 0.01)
            self.pipeline.accept_gradients()

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for stage in self.pipeline.stages:
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                yield name, full(parameter)

    def evaluate(self) -> float:
        data = DataLoader(data_of(self.composition, 12, 12), 4)
        return sum(self.pipeline.evaluate(x, y) for x, y in self.world.loader(data, evaluation=False)) / 3


class WholePipelineTraining(Training):
    """What :class:`PipelineTraining` has to equal."""

    def evaluate(self) -> float:
        data = DataLoader(data_of(self.composition, 12, 12), 4)
        with torch.no_grad():
            return sum(float(self.loss_of(self.model(x), y)) for x, y in data) / 3


def train(composition: Composition, world: Alone) -> None:
    kind: type[Training] = Training
    if composition.layout.schedule:
        kind = PipelineTraining if isinstance(world, Ranks) else WholePipelineTraining
    kind(composition, world).run()


def optimizers_of(composition: Composition, model: Network) -> list[torch.optim.Optimizer]:
    optim, every = torch.optim, [p for p in model.parameters() if p.requires_grad]
    half = len(every) // 2
    kinds: dict[str, Any] = {
        "sgd": lambda: optim.SGD(every, 0.1),
        "closure": lambda: optim.SGD(every, 0.1, momentum=0.9),
        "momentum": lambda: optim.SGD(every, 0.1, momentum=0.9),
        "nesterov": lambda: optim.SGD(every, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        "adam": lambda: optim.Adam(every, 0.01),
        "adamw": lambda: optim.AdamW(every, 0.01, weight_decay=0.1),
        # Gradients that are 0 but for rounding, such as those of a key's bias, are to stay so.
        "adagrad": lambda: optim.Adagrad(every, 0.05, eps=1e-6),
        "rmsprop": lambda: optim.RMSprop(every, 0.01, eps=1e-6),
        "lbfgs": lambda: optim.LBFGS(every, 0.1, max_iter=4),
        "several": lambda: [optim.SGD(every[:half], 0.1, momentum=0.9), optim.AdamW(every[half:], 0.01)],
        "groups": lambda: optim.AdamW(
            [{"params": every[:half], "weight_decay": 0.1}, {"params": every[half:], "lr": 0.003}], 0.01
        ),
    }
    made = kinds[composition.optimizer]()
    return made if isinstance(made, list) else [made]


def schedule_of(composition: Composition, optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    kinds: dict[str, Any] = {
        "": lambda: None,
        "step": lambda: schedulers.StepLR(optimizer, 1, 0.5),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, EPOCHS),
        "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
    }
    return kinds[composition.schedule]()
