"""A script for DeepSpeed as its users write it: it knows nothing of hpctrain.

``python deepspeed_script.py OUT CASE…``: each case is trained for 20 steps, and rank 0 keeps the weights. Tests call
:func:`plain`: one process on the full batch, without DeepSpeed.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from torch import nn

STEPS, MICRO, RANKS = 20, 8, 2
_RANDOM = np.random.default_rng(0)
X = torch.from_numpy(_RANDOM.random((STEPS, MICRO * RANKS, 24), np.float32))
Y = torch.from_numpy(_RANDOM.integers(0, 10, (STEPS, MICRO * RANKS)))
# DeepSpeed would compile an Adam of its own.
ADAMW = {"torch_adam": True, "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )


def configuration(stage: int = 0, **further: object) -> dict[str, object]:
    return {
        "train_batch_size": MICRO * RANKS,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        # So small a network would else be left whole.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        # Without it DeepSpeed clips at 1.
        "gradient_clipping": 0.0,
        **further,
    }


CASES = {
    "zero1": configuration(1),
    "zero3": configuration(3),
    "accumulated": configuration(2, train_micro_batch_size_per_gpu=MICRO // 2),
    "bf16": configuration(2, bf16={"enabled": True}),
}


def trained(settings: object) -> nn.Module:
    import deepspeed

    model = made()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    rank, parts = engine.global_rank, engine.gradient_accumulation_steps()
    for x, y in zip(X, Y, strict=True):
        own = slice(rank * MICRO, (rank + 1) * MICRO)
        for inputs, labels in zip(x[own].chunk(parts), y[own].chunk(parts), strict=True):
            inputs = inputs.to(engine.device, next(engine.module.parameters()).dtype)
            engine.backward(nn.functional.cross_entropy(engine(inputs).float(), labels.to(engine.device)))
            engine.step()
    return model


def weights(model: nn.Module) -> dict[str, np.ndarray]:
    """The whole parameters, which ZeRO 3 keeps in parts."""
    import deepspeed

    found = {}
    for name, each in model.named_parameters():
        with deepspeed.zero.GatheredParameters([each]):
            found[name] = each.detach().float().cpu().numpy().copy()
    return found


def plain() -> dict[str, np.ndarray]:
    model = made()
    keys = {"lr": ADAMW["lr"], "betas": tuple(ADAMW["betas"]), "eps": ADAMW["eps"]}
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=ADAMW["weight_decay"], **keys)
    for x, y in zip(X, Y, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name: each.detach().numpy() for name, each in model.named_parameters()}


def main(out: str, *cases: str) -> None:
    for case in cases:
        found = weights(trained(CASES[case]))
        if os.environ["RANK"] == "0":
            np.savez(f"{out}-{case}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
