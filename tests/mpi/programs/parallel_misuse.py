"""What a user may get wrong about a mesh, on four ranks; prints the error of each case from rank 0 as JSON.

``python parallel_misuse.py BACKEND``
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading

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


def another_mesh() -> None:
    ht.distribute(*_model(), mesh=init_device_mesh("cpu", (ht.init().size,), mesh_dim_names=("dp",)))


def ranks_that_do_not_fit() -> None:
    ht.mesh(tp=3)


def unknown_axis() -> None:
    ht.mesh(tensor=2)


def stages_in_distribute() -> None:
    ht.distribute(*_model(), mesh=ht.mesh(pp=2))


def context_parallel() -> None:
    ht.distribute(*_model(), mesh=ht.mesh(cp=2))


def tensor_parallel_without_a_plan() -> None:
    ht.distribute(*_model(), mesh=ht.mesh(tp=2))


def no_such_module() -> None:
    ht.distribute(*_model(), mesh=ht.mesh(dp_shard=2), plan=ht.ParallelPlan(shard=["Layer"]))


def fewer_layers_than_stages() -> None:
    model = GPT()
    del model.blocks["1"], model.blocks["2"], model.blocks["3"]
    ht.Pipeline(model, torch.optim.AdamW(model.parameters()), loss_of, mesh=ht.mesh(pp=2))


def unknown_schedule() -> None:
    ht.Pipeline(*_model(), loss_of, mesh=ht.mesh(pp=2), schedule="1b1f")


def optimizer_with_a_state() -> None:
    """Which is divided with the parameters, if it has an element for each of theirs."""
    model = GPT()
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.zeros(1, 6, dtype=torch.int64)).sum().backward()
    optimizer.step()
    ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=2))


def optimizer_of_another_model() -> None:
    ht.distribute(_model()[0], _model()[1], mesh=ht.mesh(dp_shard=2))


def tie_across_units() -> None:
    model = GPT(tied=True)
    plan = ht.ParallelPlan(shard=["head"])
    ht.distribute(model, torch.optim.AdamW(model.parameters()), mesh=ht.mesh(dp_shard=2), plan=plan)


def tie_divided_in_two_ways() -> None:
    model = GPT(tied=True)
    plan = ht.ParallelPlan(tensor={"tokens": ColwiseParallel(), "head": ColwiseParallel()})
    ht.distribute(model, torch.optim.AdamW(model.parameters()), mesh=ht.mesh(tp=2), plan=plan)


def tie_divided_in_two_ways_over_stages() -> None:
    model = GPT(tied=True)
    plan = ht.ParallelPlan(tensor={"tokens": ColwiseParallel(), "head": ColwiseParallel()})
    ht.Pipeline(model, torch.optim.AdamW(model.parameters()), loss_of, mesh=ht.mesh(pp=2, tp=2), plan=plan)


def zero_1_of_a_divided_model() -> None:
    plan = ht.ParallelPlan(zero=1, precision=torch.bfloat16)
    ht.distribute(*_model(), mesh=ht.mesh(dp_shard=2), plan=plan)


def compressed_shards() -> None:
    ht.distribute(*_model(), mesh=ht.mesh(dp_shard=2), compression="fp16")


def divided_already() -> None:
    model, optimizer = _model()
    plan = ht.ParallelPlan(shard=[Block])
    for _ in range(2):
        ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=2), plan=plan)


def other_optimizers_of_a_divided_model() -> None:
    model, _ = ht.distribute(*_model(), mesh=ht.mesh(tp=2), plan=plan_of(Case(mesh={"tp": 2})))
    ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=ht.mesh(dp_shard=2))


def divided_by_pytorch() -> None:
    model, _ = _model()
    fully_shard(model)
    ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=ht.mesh(dp_shard=2))


def _accumulated() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model, optimizer = ht.distribute(*_model(), mesh=ht.mesh(dp_shard=2))
    x = torch.arange(12).reshape(2, 6)
    with ht.no_sync():
        loss_of(model(x), x).backward()
    return model, optimizer, x


def a_step_within_no_sync() -> None:
    _, optimizer, _ = _accumulated()
    optimizer.step()


def gradients_of_no_sync_made_zero() -> None:
    for _ in range(2):
        model, optimizer, x = _accumulated()
        optimizer.zero_grad()
        loss_of(model(x), x).backward()
        optimizer.step()
    model, _, x = _accumulated()
    model.zero_grad(set_to_none=False)
    loss_of(model(x), x).backward()


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


def a_copy_of_what_cannot_be_copied() -> None:
    model, optimizer = _model()
    model.lock = threading.Lock()
    ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=2))
    torch.optim.swa_utils.AveragedModel(model)


def a_penalty_on_divided_weights() -> None:
    model, _ = ht.distribute(*_model(), mesh=ht.mesh(dp_shard=2), plan=ht.ParallelPlan(shard=[Block]))
    x = torch.arange(12).reshape(2, 6)
    (loss_of(model(x), x) + sum(each.abs().sum() for each in model.parameters())).backward()


CASES = [
    *(another_mesh, ranks_that_do_not_fit, unknown_axis, stages_in_distribute),
    *(context_parallel, tensor_parallel_without_a_plan, no_such_module, fewer_layers_than_stages),
    *(unknown_schedule, optimizer_with_a_state, optimizer_of_another_model),
    *(tie_across_units, tie_divided_in_two_ways, zero_1_of_a_divided_model, compressed_shards, divided_already),
    *(a_copy_of_what_cannot_be_copied, a_penalty_on_divided_weights, a_flattened_gradient, divided_by_pytorch),
    other_optimizers_of_a_divided_model,
    *(a_step_within_no_sync, gradients_of_no_sync_made_zero, a_step_after_an_error),
    *(a_clip_of_one_stage, tie_divided_in_two_ways_over_stages, layer_without_a_plan_in_a_divided_sequence),
]


if __name__ == "__main__":
    torch.set_num_threads(1)
    comm = ht.init(sys.argv[1])
    for case in [no_such_module] if comm.backend == "horovod" else CASES:
        try:
            said = refusal(case)
        except RuntimeError as error:
            said = of_divided_tensors(error)
        if comm.rank == 0:
            print(f"{case.__name__}: {json.dumps(said)}", flush=True)
    comm.barrier()
