"""A recipe's model and optimizer in PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch.nn import functional as F

from hpctrain import models
from hpctrain.adapters.torch import distribute, no_sync, statistics
from hpctrain.adapters.torch.distribute import guard_of
from hpctrain.comm import Communicator
from hpctrain.data.samples import Samples
from hpctrain.recipes.schema import Optimizer, Recipe
from hpctrain.train.checkpoint import State
from hpctrain.train.trainer import Timeline

_MODEL, _OPTIMIZER, _RANDOM = "model.", "optimizer.", "random.torch."
# To be undone: the number of updates before, and what was changed since.
_NOTHING: tuple[int, dict[str, torch.Tensor]] = (-1, {})


class TorchTrainer:
    """The PyTorch side of :class:`hpctrain.train.trainer.Trainer`."""

    framework = "torch"

    def __init__(self, recipe: Recipe, comm: Communicator) -> None:
        torch.manual_seed(recipe.seed)
        # A GPU a rank or none at all: NCCL does not let two ranks share one. The MPI engine reduces in host memory.
        gpus = comm.backend != "mpi" and torch.cuda.device_count() >= comm.local_size
        self._device = torch.device("cuda", comm.local_rank) if gpus else torch.device("cpu")
        model: torch.nn.Module = models.build(recipe.model.name, "torch").to(self._device)
        self._clip_norm = recipe.optimizer.clip_norm
        self.updates = 0
        self.loss = 0.0
        optimizer = make_optimizer(recipe.optimizer, list(model.parameters()))
        # Before those of distribute, of which one may find that a rank died, after the update.
        optimizer.register_step_post_hook(self._count)
        self.model, self._optimizer = distribute(
            model,
            optimizer,
            comm=comm,
            bucket_mb=recipe.communication.bucket_mb,
            compression=recipe.communication.compression,
            guard_every=recipe.guard.every,
        )
        self._statistics = statistics(self.model)
        self._remembers = recipe.fault_tolerance.heals
        self._before = _NOTHING
        self.parameters = sum(parameter.numel() for parameter in model.parameters())

    @property
    def communication_seconds(self) -> float:
        return self._statistics.communication_seconds

    @property
    def timeline(self) -> Timeline:
        return self._statistics.timeline

    def step(self, parts: Iterable[Samples], count: int, scale: float, learning_rate: float) -> float:
        if self._remembers:
            self._before = (self.updates, self._of_forward())
        self.model.train()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad()
        losses = [self._backward(part, scale, last=number == count) for number, part in enumerate(parts, start=1)]
        if self._clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.loss = sum(loss.item() for loss in losses)
        self._optimizer.step()
        return self.loss

    def rebuild(self) -> None:
        self._statistics.rebuild()
        guard_of(self._optimizer).restart()
        updates, state = self._before
        if updates == self.updates:
            self._undo_forward(state)

    def average_statistics(self) -> None:
        pass

    @torch.no_grad()
    def evaluate(self, samples: Samples) -> tuple[float, int]:
        self.model.eval()
        images, labels = self._tensors(samples)
        logits = self.model(images)
        loss_sum = F.cross_entropy(logits, labels, reduction="sum")
        return loss_sum.item(), int((logits.argmax(dim=1) == labels).sum())

    def state(self) -> State:
        tensors = {f"{_MODEL}{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, values in self._optimizer.state_dict()["state"].items():
            tensors |= {f"{_OPTIMIZER}{index}.{name}": v for name, v in values.items() if torch.is_tensor(v)}
        return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()} | self._random_state()

    def restore(self, state: State) -> None:
        self._before = _NOTHING
        tensors = {name: torch.from_numpy(value) for name, value in state.items()}
        self.model.load_state_dict(_under(_MODEL, tensors))
        values: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in _under(_OPTIMIZER, tensors).items():
            index, _, name = key.partition(".")
            values.setdefault(int(index), {})[name] = tensor
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": values})
        self._set_random_state(tensors)

    def _random_state(self) -> State:
        state = {f"{_RANDOM}cpu": torch.get_rng_state().numpy()}
        if self._device.type == "cuda":
            state[f"{_RANDOM}cuda"] = torch.cuda.get_rng_state(self._device).numpy()
        return state

    def _set_random_state(self, tensors: dict[str, torch.Tensor]) -> None:
        for kind, tensor in _under(_RANDOM, tensors).items():
            if kind == "cpu":
                torch.set_rng_state(tensor)
            elif self._device.type == "cuda":
                torch.cuda.set_rng_state(tensor, self._device)

    def _count(self, *_: object) -> None:
        self.updates += 1

    def _of_forward(self) -> dict[str, torch.Tensor]:
        """What a step changes before its update: statistics of batch normalisation, and random states."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return buffers | {name: torch.from_numpy(value) for name, value in self._random_state().items()}

    @torch.no_grad()
    def _undo_forward(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, buffer in self.model.named_buffers():
            if name in tensors:
                buffer.copy_(tensors[name])
        self._set_random_state(tensors)

    def _backward(self, samples: Samples, scale: float, *, last: bool) -> torch.Tensor:
        images, labels = self._tensors(samples)
        with contextlib.nullcontext() if last else no_sync():
            loss = F.cross_entropy(self.model(images), labels, reduction="sum") * scale
            loss.backward()
        return loss.detach()

    def _tensors(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Images as (N, channels, height, width), labels as (N,)."""
        images, labels = torch.from_numpy(samples.images), torch.from_numpy(samples.labels)
        return images.to(self._device).movedim(-1, 1), labels.to(self._device)


def _under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def make_optimizer(settings: Optimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that a recipe names; sgd's decay is an L2 term, adamw's is decoupled."""
    rate, decay = settings.learning_rate, settings.weight_decay
    match settings.name:
        case "sgd":
            return torch.optim.SGD(
                parameters, rate, momentum=settings.momentum, nesterov=settings.nesterov, weight_decay=decay
            )
        case "adam":
            return torch.optim.Adam(parameters, rate)
        case "adamw":
            return torch.optim.AdamW(parameters, rate, weight_decay=decay)
        case _:
            raise NotImplementedError
