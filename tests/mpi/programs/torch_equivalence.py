"""Trains small networks for 20 steps; run alone it is the reference, under mpirun it uses hpctrain.

``python torch_equivalence.py OUT BACKEND=CASE,… …`` writes OUT-BACKEND-RANK.npz with each case's parameters. The
tests import this file and call :func:`reference`, which is plain PyTorch on the full batch: no hpctrain in it.
The ranks train on PyTorch's default device, and the reference on the CPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, EPOCHS = 70, 17, 4  # batches of 17, 17, 17, 17 and 2: none divides over 2, 3 or 4 ranks, bar the last
UPDATES = 20  # 5 batches in each of 4 epochs
SEED = 3
CPU = torch.device("cpu")
# The sum of a batch in another order: rounding, and what 20 steps make of it.
TOLERANCE = {"float32": 1e-5, "scaler_overflow": 1e-5, "bfloat16": 0.05, "wire_fp16": 2e-3, "wire_bf16": 2e-2}


class Network(nn.Module):
    """No batch norm, so that a batch's gradient is the mean of its samples'."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.hidden = nn.Linear(4 * 36, 12)
        self.out = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.convolution(x.view(-1, 1, 8, 8))).flatten(1)
        return self.out(torch.tanh(self.hidden(x)))


class Odd(Network):
    """Everything that trips a gradient reducer: a shared, a frozen, an unused and a sometimes used parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(self.again(torch.tanh(self.first(super().forward(x)))))
        # a branch that the data decide: ranks disagree on whether this layer is used
        return y + self.sometimes(y) * (x[:, :1] > 0.9) if (x[:, 0] > 0.9).any() else y


class Tied(nn.Module):
    """The embedding's weight is the output layer's too, so its gradient is dense although the embedding is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6, sparse=True)
        self.out = nn.Linear(6, 50, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.table((x[:, :7] * 49).long()).mean(1)))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6, sparse=True)
        self.out = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.table((x[:, :7] * 49).long()).mean(1)))


@dataclass(frozen=True)
class Case:
    optimizer: Callable[..., torch.optim.Optimizer | list[torch.optim.Optimizer]]
    network: Callable[[], nn.Module] = Network
    dtype: torch.dtype = torch.float64
    clip: float | None = None
    accumulate: int = 1
    compiled: bool = False
    overflow_at: int | None = None
    bucket_mb: float = 0.002
    compression: str = "none"
    keep_gradients: bool = False
    channels_last: bool = False


def _sgd(p, **k):
    return torch.optim.SGD(p, lr=0.1, **k)


def _two(p):
    first, *rest = list(p)
    return [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


def _momentum(p):
    return _sgd(p, momentum=0.9)


CASES: dict[str, Case] = {
    "momentum": Case(_momentum),
    "adamw": Case(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    "clip": Case(_momentum, clip=0.05),
    "accumulate3": Case(lambda p: torch.optim.AdamW(p, lr=0.01), accumulate=3, clip=0.1),
    "float32": Case(_momentum, dtype=torch.float32),
    "one_bucket": Case(_momentum, bucket_mb=25.0),
    "keep_gradients": Case(_momentum, keep_gradients=True),
    "channels_last": Case(_momentum, channels_last=True),
    "two_optimizers": Case(_two),
    "odd": Case(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01), network=Odd),
    "sparse_embedding": Case(lambda p: _sgd(p), network=Embedded),
    "tied_embedding": Case(lambda p: _sgd(p), network=Tied),
    "scaler_overflow": Case(_momentum, overflow_at=7, dtype=torch.float32),
    "bfloat16": Case(_sgd, dtype=torch.bfloat16),
    "wire_fp16": Case(_momentum, dtype=torch.float32, compression="fp16"),
    "wire_bf16": Case(_momentum, dtype=torch.float32, compression="bf16"),
    "compiled": Case(_momentum, compiled=True),
}


def samples(dtype: torch.dtype) -> TensorDataset:
    random = np.random.default_rng(11)
    x = torch.from_numpy(random.random((SAMPLES, 64))).to(dtype)
    return TensorDataset(x, torch.from_numpy(random.integers(0, 5, SAMPLES)))


def full_batches(data: TensorDataset, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole global batches, in the documented order, without hpctrain."""
    order = np.random.default_rng((SEED, epoch)).permutation(SAMPLES)
    for start in range(0, SAMPLES, BATCH):
        x, y = data[order[start : start + BATCH]]
        yield x, y


def build(
    case: Case, seed: int, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer | list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    with CPU:  # whose random numbers are not a GPU's
        model = case.network()
    model = model.to(device, case.dtype)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model, case.optimizer(model.parameters())


def steps(case, model, optimizers, epochs, no_sync, rank, device) -> None:
    """A training script like any other: nothing in it knows how many ranks there are."""
    scaler = torch.amp.GradScaler(device.type, enabled=case.overflow_at is not None, init_scale=8.0, growth_interval=5)
    forward = torch.compile(model) if case.compiled else model
    step = 0
    for epoch in range(EPOCHS * case.accumulate):
        for x, y in epochs(epoch):
            step += 1
            last = step % case.accumulate == 0
            with contextlib.nullcontext() if last else no_sync():
                loss = nn.functional.cross_entropy(forward(x.to(device)), y.to(device)) / case.accumulate
                if step == case.overflow_at and rank == 0:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
            if not last:
                continue
            for optimizer in optimizers:
                scaler.unscale_(optimizer) if case.overflow_at else None
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad(set_to_none=not case.keep_gradients)


def state(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()]).cpu().numpy()


def reference(name: str) -> np.ndarray:
    case = CASES[name]
    model, optimizer = build(case, seed=5, device=CPU)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    data = samples(case.dtype)
    # without a message to send, an accumulated gradient is the same in one backward or in two
    steps(case, model, optimizers, lambda epoch: full_batches(data, epoch), contextlib.nullcontext, 0, CPU)
    return state(model)


def distributed(name: str) -> np.ndarray:
    import hpctrain as ht

    case, device = CASES[name], torch.get_default_device()
    comm = ht.init()
    # other weights on each rank: the broadcast must mend that
    model, optimizer = build(case, seed=5 + comm.rank, device=device)
    kind = type(optimizer)
    model, optimizer = ht.distribute(model, optimizer, bucket_mb=case.bucket_mb, compression=case.compression)
    assert type(optimizer) is kind
    loader = ht.shard(DataLoader(samples(case.dtype), batch_size=BATCH, shuffle=True), seed=SEED)
    loader.set_epoch(0)  # a loader of the same data goes on where that of another case ended
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    steps(case, model, optimizers, lambda _: loader, ht.no_sync, comm.rank, device)
    return state(model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, *parts = sys.argv[1:]
    import hpctrain as ht

    for backend, _, names in (part.partition("=") for part in parts):
        ht.shutdown()
        rank = ht.init(backend).rank
        np.savez(f"{out}-{backend}-{rank}.npz", **{name: distributed(name) for name in names.split(",")})
