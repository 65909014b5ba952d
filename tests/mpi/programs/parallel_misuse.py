"""What a user may get wrong about a mesh, on four ranks; prints the error of each case from rank 0 as JSON.

``python parallel_misuse.py BACKEND``
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from parallel import GPT, Block, Case, loss_of, plan_of
from situations import refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel

import hpctrain as ht
from hpctrain.worker.adapters.torch.parallel.division import of_divided_tensors


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = GPT()
    return model, torch.optim.AdamW(model.parameters())


def optimizer_with_a_state() -> None:
    """Which is divided with the parameters, if it has an element for each of theirs."""
    model = GPT()
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.zeros(1, 6, dtype=torch.int64)).sum().backward()
    optimizer.step()
    ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=2))


def tie_divided_in_two_ways_over_stages() -> None:
    model = GPT(tied=True)
    plan = ht.ParallelPlan(tensor={"tokens": ColwiseParallel(), "head": ColwiseParallel()})
    ht.Pipeline(model, torch.optim.AdamW(model.parameters()), loss_of, mesh=ht.mesh(pp=2, tp=2), plan=plan)


def divided_already() -> None:
    model, optimizer = _model()
    plan = ht.ParallelPlan(shard=[Block])
    for _ in range(2):
        ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=2), plan=plan)


def a_layer_added_to_a_divided_model() -> None:
    model, optimizer = _model()
    ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=2))
    model.head = nn.Sequential(model.head, nn.Linear(model.head.out_features, 2))
    model(torch.zeros(2, 6, dtype=torch.int64))


def a_parameter_replaced_in_a_divided_model() -> None:
    model, optimizer = _model()
    ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=2))
    model.head.weight = model.head.weight  # is the same one
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight.full_tensor()))


def divided_by_pytorch() -> None:
    model, _ = _model()
    fully_shard(model)
    ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=ht.mesh(dp_shard=2))


def a_flattened_gradient() -> None:
    model = nn.Linear(3, 5)
    ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=ht.mesh(dp_shard=4))
    model(torch.ones(2, 3)).sum().backward()
    assert model.weight.grad is not None
    model.weight.grad.reshape(-1)


def a_step_after_an_error() -> None:
    model, optimizer = _model()
    pipeline = ht.Pipeline(model, optimizer, loss_of, mesh=ht.mesh(pp=2))

    def fail() -> None:
        raise RuntimeError("in the middle of a step, on all ranks")

    pipeline._tied.add_up = fail
    x = torch.zeros(5, 6, dtype=torch.int64)
    with contextlib.suppress(RuntimeError):
        pipeline.step(x, x)
    optimizer.step()


def a_clip_of_one_stage() -> None:
    model, optimizer = _model()
    pipeline = ht.Pipeline(model, optimizer, loss_of, mesh=ht.mesh(pp=2))
    x = torch.zeros(4, 6, dtype=torch.int64)
    pipeline.step(x, x)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def layer_without_a_plan_in_a_divided_sequence() -> None:
    model = GPT(positions=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_of(Case(mesh={"tp": 2}, sequence=True))
    del plan.tensor["blocks.*.attention_norm"]
    ht.distribute(model, optimizer, mesh=ht.mesh(tp=2), plan=plan)
    x = torch.arange(12).reshape(2, 6)
    loss_of(model(x), x).backward()
    optimizer.step()


class OwnExpert(nn.Module):
    """Every rank calls another part, of which each is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[ht.init().rank](x)


def parts_that_ranks_gather_alone() -> None:
    model = OwnExpert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = ht.ParallelPlan(shard=["parts.*"])
    model, _ = ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=-1), plan=plan)
    for _ in range(2):
        model(torch.ones(2, 6)).mean().backward()


def _mistake(**mesh: int) -> Callable[[], object]:
    return lambda: ht.distribute(*_model(), mesh=ht.mesh(**mesh))


def _planned(**settings: Any) -> Callable[[], object]:
    return lambda: ht.distribute(*_model(), mesh=ht.mesh(dp_shard=2), **settings)


CASES: dict[str, Callable[[], object]] = {
    "another_mesh": lambda: ht.distribute(
        *_model(), mesh=init_device_mesh("cpu", (ht.init().size,), mesh_dim_names=("dp",))
    ),
    "stages_in_distribute": _mistake(pp=2),
    "context_parallel": _mistake(cp=2),
    "tensor_parallel_without_a_plan": _mistake(tp=2),
    "compressed_shards": _planned(compression="fp16"),
    "optimizer_of_another_model": lambda: ht.distribute(_model()[0], _model()[1], mesh=ht.mesh(dp_shard=2)),
    "unknown_schedule": lambda: ht.Pipeline(*_model(), loss_of, mesh=ht.mesh(pp=2), schedule="1b1f"),
    **{
        each.__name__: each
        for each in (
            *(optimizer_with_a_state, divided_already, divided_by_pytorch),
            *(a_flattened_gradient,),
            *(a_step_after_an_error, a_clip_of_one_stage, tie_divided_in_two_ways_over_stages),
            *(layer_without_a_plan_in_a_divided_sequence, parts_that_ranks_gather_alone),
            *(a_layer_added_to_a_divided_model, a_parameter_replaced_in_a_divided_model),
        )
    },
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    comm = ht.init(sys.argv[1])
    for name in ["compressed_shards"] if comm.backend == "horovod" else CASES:
        try:
            said = refusal(CASES[name])
        except RuntimeError as error:
            said = of_divided_tensors(error)
        if comm.rank == 0:
            print(f"{name}: {json.dumps(said)}", flush=True)
    comm.barrier()
