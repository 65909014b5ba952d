"""Pipelines whose batches change their shape and whose layers are frozen and unfrozen, against one process.

``python pipeline_shapes.py BACKEND,… OUT SCHEDULE,…`` writes OUT-BACKEND-RANK.json: how far the losses and the
parameters of each case are from those of plain PyTorch on the whole batch.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hpctrain as ht

WORDS, WIDTH, BLOCKS = 20, 8, 4


class Net(nn.Module):
    """The mean over a sequence, or with ``each`` an output for each of its places."""

    def __init__(self, *, each: bool = False) -> None:
        super().__init__()
        self.each = each
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for i in range(BLOCKS)})
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x) if not x.is_floating_point() else x
        for block in self.blocks.values():
            x = block(x)
        if self.head is None:
            return x
        return self.head(x if self.each else x.mean(1))


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if y.is_floating_point():
        return F.mse_loss(logits, y)
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


class Setting:
    """Plain PyTorch on whole batches, or a pipeline."""

    def __init__(self, comm: Any, schedule: str, mesh: dict[str, int], **options: Any) -> None:
        frozen = options.pop("frozen", ())
        self.comm, self.found = comm, SimpleNamespace(losses=[], norms=[])
        torch.manual_seed(3)
        self.model = Net(**options)
        for name in frozen:
            self.model.get_submodule(name).requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.pipeline = None
        if comm is not None:
            self.pipeline = ht.Pipeline(
                self.model, self.optimizer, loss_of, mesh=ht.mesh(**mesh), schedule=schedule, micro_batches=2
            )

    def own(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """This rank's even part of a batch along the ranks that divide samples."""
        parts = 1 if self.comm is None else self.comm.size // 2
        part = 0 if parts == 1 else ht.mesh().get_local_rank("dp_shard")
        return [each.chunk(parts)[part] for each in tensors]

    def step(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> None:
        if self.pipeline:
            self.found.losses.append(self.pipeline.step(*self.own(x, y), scale=scale))
        else:
            loss = loss_of(self.model(x), y)
            (loss * scale).backward()
            self.found.losses.append(float(loss))

    def evaluate(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.pipeline:
            self.found.losses.append(self.pipeline.evaluate(*self.own(x, y)))
        else:
            with torch.no_grad():
                self.found.losses.append(float(loss_of(self.model(x), y)))

    def update(self, clip: float = 0.0) -> None:
        if clip:
            norm = self.pipeline.clip_grad_norm_ if self.pipeline else _clip(self.model)
            self.found.norms.append(float(norm(clip)))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def unfreeze(self) -> None:
        for part in self.pipeline.stages if self.pipeline else [self.model]:
            part.requires_grad_(True)

    def parameters(self) -> dict[str, torch.Tensor]:
        named = self.pipeline.named_parameters() if self.pipeline else self.model.named_parameters()
        own = {name: each.detach() for name, each in named}
        own = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in own.items()}
        everyone = self.comm.allgather_object(own) if self.comm else [own]
        return {name: each for theirs in everyone for name, each in theirs.items()}


def _clip(model: nn.Module) -> Any:
    return lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit)


def batch(rows: int, length: int, *, each: bool = False, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed + 31 * length + rows))
    return x, x.flip(1).contiguous() if each else x[:, 0].contiguous()


def lengths(at: Setting) -> None:
    for length in (7, 5, 3, 7, 9, 5):
        at.step(*batch(8, length))
        at.update()


def lengths_of_targets(at: Setting) -> None:
    for length in (4, 6, 2):
        at.step(*batch(8, length, each=True))
        at.update(clip=0.5)


def rows_and_lengths(at: Setting) -> None:
    for rows, length in ((4, 5), (12, 5), (4, 3), (8, 6), (16, 3), (4, 5)):
        at.step(*batch(rows, length))
        at.update()


def evaluations_between(at: Setting) -> None:
    for rows, length in ((4, 5), (8, 4), (4, 5)):
        at.step(*batch(rows, length))
        at.evaluate(*batch(4 * rows, length + 2))
        at.update()
        at.evaluate(*batch(rows, 3))


def accumulated(at: Setting) -> None:
    for turn in range(2):
        for length in (7, 4, 6):
            at.step(*batch(8, length, seed=turn), scale=1 / 3)
        at.update(clip=0.3)


def frozen_first_stage(at: Setting) -> None:
    for length in (7, 5, 3):
        at.step(*batch(8, length))
        at.update(clip=0.2)


def unfrozen_later(at: Setting) -> None:
    at.step(*batch(8, 5))
    at.update(clip=0.2)
    at.unfreeze()
    for length in (5, 4, 5):
        at.step(*batch(8, length))
        at.update(clip=0.2)


def other_types(at: Setting) -> None:
    """Indices, then embedded sequences; classes, then numbers to be met."""
    at.step(*batch(8, 5))
    at.update()
    at.step(torch.rand(8, 5, WIDTH, generator=torch.Generator().manual_seed(1)), batch(8, 5)[1])
    at.update()
    at.step(batch(8, 5)[0], torch.rand(8, WORDS, generator=torch.Generator().manual_seed(2)))
    at.update()
    at.step(*batch(8, 5))
    at.update()


BOTTOM = ("embed", "blocks.0", "blocks.1")
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lengths": (lengths, {}),
    "lengths_of_targets": (lengths_of_targets, {"each": True}),
    "rows_and_lengths": (rows_and_lengths, {}),
    "evaluations_between": (evaluations_between, {}),
    "accumulated": (accumulated, {}),
    "frozen_first_stage": (frozen_first_stage, {"frozen": BOTTOM}),
    "frozen_last_stage": (frozen_first_stage, {"frozen": ("blocks.2", "blocks.3", "head")}),
    "unfrozen_later": (unfrozen_later, {"frozen": BOTTOM}),
    "other_types": (other_types, {}),
}


def outcome(name: str, comm: Any, schedule: str, mesh: dict[str, int]) -> float:
    """The largest difference from one process."""
    function, options = CASES[name]
    results = []
    for world in (None, comm):
        setting = Setting(world, schedule, mesh, **options)
        function(setting)
        results.append((setting.found, setting.parameters()))
    (alone, parameters), (many, others) = results
    assert parameters.keys() == others.keys()
    pairs = [(parameters[key], others[key]) for key in parameters]
    pairs += [(torch.tensor(alone.losses), torch.tensor(many.losses))]
    pairs += [(torch.tensor(alone.norms), torch.tensor(many.norms))] if alone.norms else []
    return max(float((one - other).abs().max()) for one, other in pairs)


def refusals(comm: Any) -> dict[str, dict[str, Any]]:
    """What is said where the ranks of a pipeline get different batches, or targets that are not those of samples."""
    said = {}
    setting = Setting(comm, "1f1b", {"pp": comm.size})
    setting.step(*batch(8, 5))
    x, y = batch(8, 5)
    wrong = {"different": (batch(8, 5 + comm.rank)[0], y), "flat": (x, x.flatten()), "none": (x[:0], y[:0])}
    for name, given in wrong.items():
        with contextlib.suppress(ht.HpctrainError):
            try:
                setting.pipeline.step(*given)
            except ht.HpctrainError as error:
                said[name] = error.record()
                raise
    return said


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    backends, out, schedules, *names = sys.argv[1:]
    for backend in backends.split(","):
        ht.shutdown()
        comm = ht.init(backend)
        results: dict[str, Any] = {}
        for schedule in schedules.split(","):
            for name in names or CASES:
                print(backend, schedule, name, file=sys.stderr, flush=True)
                results[f"{schedule} {name}"] = outcome(name, comm, schedule, {"pp": 2, "dp_shard": -1})
        if comm.size == 2 and not names:
            results["refused"] = refusals(comm)
        Path(f"{out}-{backend}-{comm.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
