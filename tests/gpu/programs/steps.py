"""Trains a small network on the digits for some steps, in this process alone or on the ranks of a run.

``python steps.py OUT.json '{"alone": true, …}'``, or ``hpctrain run steps.py -- OUT.json '{…}'``. Both train on the
same global batches, so that their losses have to agree.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import hpctrain as ht

STEPS = 24
# Whole numbers of samples a rank on 1, 2, 3, 4, 6 and 8 GPUs.
BATCH = 48
_COMPUTED_IN = {"bf16": torch.bfloat16, "fp16": torch.float16}


def network() -> nn.Module:
    """For images (N, 1, 8, 8); without batch norm, whose statistics would depend on the division of a batch."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10)
    )


def digits(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The images (1797, 1, 8, 8) from 0 to 1, in an order drawn once, and their labels."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(images).view(-1, 1, 8, 8)[order] / 16
    return x.to(device, dtype), torch.from_numpy(labels)[order].to(device)


class Run:
    """One training.

    Args:
        options: ``device``; ``precision`` of float64, float32, bf16 and fp16; ``compile``, a mode of torch.compile;
            ``graphs``, whether CUDA graphs replay the network; ``corrupt``, whether the last rank's parameters are
            changed in the middle; ``alone``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.rank, self.size = 0, 1
        alone = options.get("alone", False)
        self.comm = None if alone else ht.init()
        local_rank = 0
        if self.comm:
            self.rank, self.size, local_rank = self.comm.rank, self.comm.size, self.comm.local_rank
        self.device = torch.device("cpu")
        if options["device"] == "cuda":
            # Ranks may share a GPU, but not over NCCL.
            self.device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        # TensorFloat-32 is another precision, and other algorithms add up in another order.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
        self.precision = options["precision"]
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        self.x, self.y = digits(self.device, dtype)
        self.model = network().to(self.device, dtype)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if self.comm:
            self.model, self.optimizer = ht.distribute(self.model, self.optimizer, guard_every=1)
        self.forward: Any = self.model
        if options.get("compile"):
            self.forward = torch.compile(self.model, mode=options["compile"])
        if options.get("graphs"):
            self.forward = torch.cuda.make_graphed_callables(self.model, (self.x[: BATCH // self.size].clone(),))
        self._corrupts = options.get("corrupt", False) and self.rank == self.size - 1
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def autocast(self) -> AbstractContextManager[None]:
        """The context of the forward pass."""
        if self.precision not in _COMPUTED_IN:
            return nullcontext()
        return torch.autocast(self.device.type, _COMPUTED_IN[self.precision])

    def step(self, number: int) -> float:
        """Train on this rank's part of a global batch; returns its mean loss before the update."""
        share = BATCH // self.size
        first = number * BATCH + self.rank * share
        if self._corrupts and number == STEPS // 2:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0] += 1e-3
        self.optimizer.zero_grad()
        with self.autocast():
            logits = self.forward(self.x[first : first + share])
            loss = nn.functional.cross_entropy(logits, self.y[first : first + share])
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


def main(out: str, options: str) -> None:
    run = Run(json.loads(options))
    losses = np.array([run.step(number) for number in range(STEPS)])
    gpu = str(torch.cuda.get_device_properties(run.device).uuid) if run.device.type == "cuda" else ""
    backend, places = "", [(sorted(os.sched_getaffinity(0)), gpu)]
    if run.comm:
        backend, places = run.comm.backend, run.comm.allgather_object(places[0])
        losses = run.comm.allreduce(losses)
    if run.rank == 0:
        cores, gpus = zip(*places, strict=True)
        found = {"losses": losses.tolist(), "ranks": run.size, "backend": backend, "cores": cores, "gpus": gpus}
        Path(out).write_text(json.dumps({**found, "device": str(run.device)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
