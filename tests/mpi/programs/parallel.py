"""Trains a small GPT for 20 steps under many meshes; run alone it is the reference on the full batch.

Over ``nccl`` the ranks train on GPUs; the reference is computed on the CPU.

``python parallel.py OUT BACKEND=CASE,… …`` writes OUT-BACKEND-RANK.npz with each case's whole parameters and losses.
The tests import this file and call :func:`reference`, which is plain PyTorch: no hpctrain in it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

# 4 batches in each of 5 epochs: 7, 7, 7 and 6 samples, of which none divides over 4 ranks.
SAMPLES, BATCH, EPOCHS, SEED = 27, 7, 5, 3
VOCABULARY, CONTEXT, WIDTH, HEAD_SIZE, LAYERS = 16, 6, 16, 4, 4
STEPS = 20
# Where the ranks train.
DEVICE = torch.device("cpu")


class Attention(nn.Module):
    """The number of heads is that of the query's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head_size = HEAD_SIZE
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [
            layer(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A stage of a pipeline lacks some of the blocks, and has None in place of other parts."""

    def __init__(
        self,
        *,
        tied: bool = False,
        frozen: bool = False,
        positions: bool = True,
        bare: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH) if positions else None
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(VOCABULARY)) if bare else None
        if transposed:
            self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous().t())
        if tied:
            self.head.weight = self.tokens.weight
        if frozen:
            for part in (self.tokens, self.blocks["0"], self.blocks["2"].mlp):
                part.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
        if self.positions is not None:
            x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is not None:
            x = self.head(x)
        return x if self.scale is None else x * self.scale


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003, weight_decay=0.1)


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003, weight_decay=0.1, fused=True)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """What is trained, and on which mesh."""

    mesh: dict[str, int]
    optimizer: Callable[..., torch.optim.Optimizer] = _adamw
    network: dict[str, bool] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    clip: float | None = None
    accumulate: int = 1
    overflow_at: int | None = None
    recompute: bool = False
    zero: int = 3
    sequence: bool = False
    precision: torch.dtype | None = None
    schedule: str | None = None
    micro_batches: int = 2

    @property
    def trained(self) -> tuple[Any, ...]:
        """What decides the reference."""
        network = tuple(sorted(self.network.items()))
        return self.optimizer, network, self.dtype, self.clip, self.accumulate, self.overflow_at


def _on(mesh: dict[str, int], prefix: str) -> dict[str, Case]:
    """The features of one mesh."""
    plain = Case(mesh)
    return {
        prefix: plain,
        f"{prefix}_frozen": replace(plain, network={"frozen": True}, optimizer=_sgd),
        f"{prefix}_all": replace(plain, network={"tied": True}, clip=0.05, accumulate=2, recompute=True),
        f"{prefix}_float32": replace(plain, dtype=torch.float32, optimizer=_sgd),
        f"{prefix}_scaler": replace(plain, dtype=torch.float32, optimizer=_sgd, overflow_at=3, clip=0.05),
    }


CASES: dict[str, Case] = {
    **_on({"dp_shard": -1}, "fsdp"),
    **_on({"tp": 2}, "tp"),
    **_on({"dp_shard": 2, "dp_replicate": 2}, "hsdp"),
    **_on({"dp_shard": 2, "tp": 2}, "tp_fsdp"),
    **_on({"dp_replicate": 2, "tp": 2}, "tp_replicas"),
    "fsdp_zero2": Case({"dp_shard": -1}, zero=2, clip=0.05),
    "fsdp_zero1": Case({"dp_shard": -1}, zero=1, clip=0.05, accumulate=2),
    "fsdp_zero1_tied": Case({"dp_shard": -1}, zero=1, optimizer=_sgd, network={"tied": True, "bare": True}),
    "fsdp_zero1_fused": Case({"dp_shard": -1}, zero=1, optimizer=_fused, network={"transposed": True}),
    "hsdp_zero1": Case({"dp_shard": 2, "dp_replicate": 2}, zero=1, recompute=True),
    "replicas_recompute": Case({"dp_replicate": 2}, recompute=True),
    "tp_sequence": Case({"tp": 2}, sequence=True, clip=0.05, network={"positions": False}),
    "tp_bare": Case({"tp": 2}, clip=0.05, network={"bare": True}),
    "tp_fsdp_bare": Case({"tp": 2, "dp_shard": 2}, clip=0.05, network={"bare": True}),
    "fsdp_bare": Case({"dp_shard": -1}, network={"bare": True}),
    "fsdp_bfloat16": Case({"dp_shard": -1}, dtype=torch.float32, precision=torch.bfloat16, optimizer=_sgd),
}


PIPELINES = ("gpipe", "1f1b", "interleaved_1f1b")


def _pipelines(mesh: dict[str, int], prefix: str) -> dict[str, Case]:
    """The features of a mesh with a pipeline."""
    plain = Case(mesh, schedule="1f1b")
    every = replace(plain, network={"tied": True}, clip=0.05, accumulate=2)
    return {
        **{f"{prefix}_{name}": replace(plain, schedule=name) for name in PIPELINES},
        **{f"{prefix}_{name}_all": replace(every, schedule=name) for name in PIPELINES},
        f"{prefix}_recompute": replace(plain, recompute=True),
        f"{prefix}_frozen": replace(plain, network={"frozen": True}, optimizer=_sgd),
        f"{prefix}_scaler": replace(plain, dtype=torch.float32, optimizer=_sgd, overflow_at=3, clip=0.05),
    }


CASES |= {
    **_pipelines({"pp": 2}, "pp"),
    **_pipelines({"pp": 2, "dp_replicate": 2}, "pp_replicas"),
    **_pipelines({"pp": 2, "dp_shard": 2}, "pp_fsdp"),
    **_pipelines({"pp": 2, "tp": 2}, "pp_tp"),
    "pp4": Case({"pp": 4}, schedule="1f1b", micro_batches=4, network={"tied": True}, clip=0.05),
    **_pipelines({"tp": 2, "pp": 2, "dp_shard": 2}, "tp_pp_fsdp"),
    **_pipelines({"tp": 2, "pp": 2, "dp_replicate": 2}, "tp_pp_replicas"),
}


def samples() -> TensorDataset:
    tokens = torch.from_numpy(np.random.default_rng(11).integers(0, VOCABULARY, (SAMPLES, CONTEXT + 1)))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def full_batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole global batches, in the documented order, without hpctrain."""
    order = np.random.default_rng((SEED, epoch)).permutation(SAMPLES)
    data = samples()
    for start in range(0, SAMPLES, BATCH):
        yield data[order[start : start + BATCH]]


def build(case: Case, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = GPT(**case.network).to(DEVICE, case.dtype)
    rest = [p for name, p in model.named_parameters() if not name.startswith("norm")]
    norm = {"params": list(model.norm.parameters()), "lr": 0.01}
    return model, case.optimizer([{"params": rest}, norm])


# The samples of each call of the loss without gradients, since the last evaluation began.
EVALUATED: list[int] = []


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        EVALUATED.append(len(y))
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def train(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: Any, no_sync: Any, rank: int
) -> float:
    """A script like any other: nothing in it knows how many ranks there are."""
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=case.overflow_at is not None, init_scale=8.0, growth_interval=5)
    step, norm = 0, 0.0
    for epoch in range(EPOCHS * case.accumulate):
        for x, y in epochs(epoch):
            step += 1
            last = step % case.accumulate == 0
            with contextlib.nullcontext() if last else no_sync():
                loss = loss_of(model(x.to(DEVICE)), y.to(DEVICE)) / case.accumulate
                if step == case.overflow_at and rank == 0:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
            if not last:
                continue
            if case.overflow_at:
                scaler.unscale_(optimizer)
            if case.clip:
                found = nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                norm = float(found)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert step == STEPS * case.accumulate
    return norm


def batches_of_a_new_run() -> Any:
    import hpctrain as ht

    # Otherwise a loader of the same samples goes on with the orders of the case before.
    torch.manual_seed(SEED)
    return ht.shard(DataLoader(samples(), batch_size=BATCH, shuffle=True), seed=SEED)


def train_pipeline(case: Case, pipeline: Any, optimizer: torch.optim.Optimizer, loader: Any) -> float:
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=case.overflow_at is not None, init_scale=8.0, growth_interval=5)
    step, norm = 0, 0.0
    for _ in range(EPOCHS * case.accumulate):
        for x, y in loader:
            step += 1
            x, y, scale = x.to(DEVICE), y.to(DEVICE), 1 / case.accumulate
            loss = pipeline.step(x, y, scale=torch.inf if step == case.overflow_at else scale, scaler=scaler)
            if step == 1:
                EVALUATED.clear()
                evaluated = pipeline.evaluate(x, y)
                assert sum(EVALUATED) <= len(x), f"the loss of {len(x)} samples was asked for {EVALUATED}"
                assert case.overflow_at or abs(evaluated - loss) < 1e-5, (evaluated, loss)
            if step % case.accumulate:
                continue
            if case.overflow_at:
                scaler.unscale_(optimizer)
            if case.clip:
                norm = pipeline.clip_grad_norm_(case.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return norm


def whole(model: nn.Module) -> dict[str, np.ndarray]:
    """All parameters in full. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        found[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).double().cpu().numpy()
    return found


def reference(name: str) -> dict[str, np.ndarray]:
    case = CASES[name]
    model, optimizer = build(case, seed=5)
    norm = train(case, model, optimizer, full_batches, contextlib.nullcontext, rank=0)
    return {**whole(model), "norm": np.array(norm)}


def plan_of(case: Case) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    import hpctrain as ht

    tensor: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"blocks.*.attention.{layer}": ColwiseParallel() for layer in ("query", "key", "value")},
        "blocks.*.attention.output": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if case.sequence:
        whole_sequence = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        tensor |= {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "blocks.*.attention_norm": SequenceParallel(),
            "blocks.*.attention": whole_sequence,
            "blocks.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.mlp_norm": SequenceParallel(),
            "blocks.*.mlp": whole_sequence,
            "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    return ht.ParallelPlan(
        shard=[Block],
        tensor=tensor if case.mesh.get("tp") else {},
        recompute=["Block"] if case.recompute else [],
        precision=case.precision,
        zero=case.zero,
    )


def check_replicas(comm: Any, model: nn.Module) -> int:
    """Ranks with the same part of a parameter have the same bits. Returns how many parts were compared."""
    own = {}
    for name, parameter in model.named_parameters():
        value, place = parameter.detach(), ()
        if hasattr(value, "to_local"):
            at, placements = value.device_mesh.get_coordinate(), value.placements
            place = tuple(
                where for where, placement in zip(at, placements, strict=True) if not placement.is_replicate()
            )
            value = value.to_local()
        own[name, place] = xxhash.xxh3_64_intdigest(value.contiguous().cpu().numpy().tobytes())
    compared = 0
    seen: dict[Any, int] = {}
    for theirs in comm.allgather_object(own):
        for part, bits in theirs.items():
            compared += part in seen
            assert seen.setdefault(part, bits) == bits, f"{part} differs between ranks that replicate it"
    return compared


def check_overflow(mesh: Any, rank: int) -> None:
    """What overflows in one rank's part of the second gradient lets all ranks leave the step out."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from hpctrain.worker.adapters.torch.parallel.optimizers import agree_on_overflow

    ones = torch.ones(4, device=DEVICE)
    whole_one, divided = (
        nn.Parameter(distribute_tensor(ones, mesh, [placement])) for placement in (Replicate(), Shard(0))
    )
    # A copy, as a whole tensor is taken as it is, and scaling the gradient would scale the parameter.
    whole_one.grad = distribute_tensor(ones.clone(), mesh, [Replicate()])
    overflown = torch.tensor([1.0, 1.0, 1.0, torch.inf], device=DEVICE)
    divided.grad = distribute_tensor(overflown, mesh, [Shard(0)])
    optimizer = torch.optim.SGD([whole_one, divided], lr=0.1)
    agree_on_overflow([optimizer], mesh)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0)
    scaler.scale(torch.tensor(1.0, device=DEVICE))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (float(whole_one.to_local()[0]), scaler.get_scale()) == (1.0, 4.0), f"rank {rank} made the step"


def pipelined(name: str) -> dict[str, np.ndarray]:
    import hpctrain as ht

    case = CASES[name]
    comm = ht.init()
    model, optimizer = build(case, seed=5 + comm.rank)
    pipeline = ht.Pipeline(
        model,
        optimizer,
        loss_of,
        mesh=ht.mesh(**case.mesh),
        plan=plan_of(case),
        schedule=case.schedule,
        micro_batches=case.micro_batches,
    )
    loader = batches_of_a_new_run()
    norm = train_pipeline(case, pipeline, optimizer, loader)
    compared = sum(check_replicas(comm, stage) for stage in pipeline.stages)
    own = {key: value for stage in pipeline.stages for key, value in whole(stage).items()}
    found = {key: value for theirs in comm.allgather_object(own) for key, value in theirs.items()}
    if case.network.get("tied"):
        np.testing.assert_array_equal(found.pop("head.weight"), found["tokens.weight"])
    return {**found, "norm": np.array(norm), "compared": np.array(compared)}


def distributed(name: str) -> dict[str, np.ndarray]:
    import hpctrain as ht

    case = CASES[name]
    comm = ht.init()
    model, optimizer = build(case, seed=5 + comm.rank)  # other weights on each rank: they become rank 0's
    kind, groups = type(optimizer), [len(group["params"]) for group in optimizer.param_groups]
    model, optimizer = ht.distribute(model, optimizer, mesh=ht.mesh(**case.mesh), plan=plan_of(case))
    model.to(DEVICE)  # PyTorch exchanges divided parameters in place, and they train on.
    assert type(optimizer) is kind
    assert [len(group["params"]) for group in optimizer.param_groups] == groups
    loader = batches_of_a_new_run()
    norm = train(case, model, optimizer, lambda _: loader, ht.no_sync, comm.rank)
    compared = check_replicas(comm, model)
    if case.overflow_at and "tp" in case.mesh:
        check_overflow(ht.mesh(**case.mesh)["tp"], comm.rank)
    return {**whole(model), "norm": np.array(norm), "compared": np.array(compared)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, *parts = sys.argv[1:]
    import hpctrain as ht

    for backend, _, names in (part.partition("=") for part in parts):
        ht.shutdown()
        rank = ht.init(backend).rank
        # ht.init() has chosen the GPU that `cuda` means.
        DEVICE = torch.device("cuda" if backend == "nccl" else "cpu")
        results = {}
        for name in names.split(","):
            run = pipelined if CASES[name].schedule else distributed
            results |= {f"{name}/{key}": value for key, value in run(name).items()}
            if rank == 0:
                print(name, flush=True)
            np.savez(f"{out}-{backend}-{rank}.npz", **results)
