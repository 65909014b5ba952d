"""What a step costs more with whole batches than with this rank's rows of them.

    hpctrain run benchmarks/whole_batches.py -np 2 [-- --rounds N --steps N]

A small network is trained in turn with batches and with their local rows, as a script that divides its data itself has
them, in rounds of equal steps. Rank 0 prints the median of the rounds' time for a step, and of their differences, for a
plain loop and for one that also counts right answers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hpctrain as ht

SAMPLES = 32


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    comm = ht.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 64), torch.randint(0, 10, (SAMPLES,)))
    ((x, y),) = list(ht.shard(torch.utils.data.DataLoader(data, batch_size=SAMPLES)))
    own = x.local, y.local

    def step(x: Any, y: Any, accuracy: bool) -> None:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        if accuracy:
            (out.argmax(1) == y).float().mean()

    for accuracy in (False, True):
        loops = {"whole": partial(step, x, y, accuracy), "local": partial(step, *own, accuracy)}
        times = _in_turn(loops, options.rounds, options.steps)
        if comm.rank == 0:
            _report("with accuracy" if accuracy else "plain loop", times)


def _in_turn(loops: dict[str, Callable[[], None]], rounds: int, steps: int) -> dict[str, list[float]]:
    """The milliseconds of a step in each round."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name, loop in list(loops.items())[:: 1 if number % 2 else -1]:
            begin = time.perf_counter()
            for _ in range(steps):
                loop()
            if number:  # the first one warms up
                times[name].append((time.perf_counter() - begin) / steps * 1e3)
    return times


def _report(title: str, times: dict[str, list[float]]) -> None:
    whole, local = times["whole"], times["local"]
    more = statistics.median(a - b for a, b in zip(whole, local, strict=True))
    ratio = statistics.median(a / b for a, b in zip(whole, local, strict=True))
    print(
        f"{title}: {statistics.median(whole):.3f} ms with batches, {statistics.median(local):.3f} ms with local rows, "
        f"{more:.3f} ms more, ratio {ratio:.3f}"
    )


if __name__ == "__main__":
    main()
