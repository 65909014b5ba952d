"""``python framework_misuse.py FOLDER``: asks for what a run of two ranks is not, and writes what it is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from situations import refusal

import hpctrain as ht

CPU = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def wrapped_twice() -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def ask_anew(backend: str, **settings: int) -> None:
    """Ask for a default group where there is none any more."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, **settings)


CASES: dict[str, Callable[[], object]] = {
    "trainer": lambda: lightning.Trainer(**CPU, max_steps=1, strategy="ddp", devices=3).fit(BoringModel()),
    "fabric": lambda: lightning.Fabric(accelerator="cpu", devices=3, strategy="ddp").launch(),
    "twice": wrapped_twice,
    "nccl": lambda: ask_anew("nccl"),
    "size": lambda: ask_anew("gloo", world_size=5),
}


def main(folder: str) -> None:
    told = {}
    for name, case in CASES.items():
        try:
            told[name] = refusal(case)
        except ValueError as error:
            told[name] = {"code": "ValueError", "values": {"text": str(error)}}
    Path(folder, f"told-{ht.init().rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
