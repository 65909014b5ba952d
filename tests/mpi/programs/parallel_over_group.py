"""What is built on process groups, over hpctrain's on four ranks: the parameters of one process after some steps.

PyTorch's own parts: DistributedDataParallel, FSDP2, hybrid sharding, tensor parallel with FSDP2, two schedules of a
pipeline. All in float64, and without a word of hpctrain but for the groups.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hpctrain as ht
from hpctrain.worker.comm.process_group import require_default_group

WIDTH, BATCH, STEPS, BLOCKS = 17, 24, 5, 4
comm = ht.init("mpi")
require_default_group(comm)
rank, size = comm.rank, comm.size
assert dist.get_backend() == "hpctrain"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 32, dtype=torch.float64)
        self.down = nn.Linear(32, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(BLOCKS)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


random = torch.Generator().manual_seed(1)
x, y = (torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=random) for _ in range(2))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def train_alone() -> dict[str, torch.Tensor]:
    model = Net()
    train(model, x, y)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def compare(what: str, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        found = parameter.detach()
        if isinstance(found, DTensor):
            found = found.full_tensor()
        torch.testing.assert_close(found, wanted[name.removeprefix("module.")], rtol=0, atol=1e-12)
    print(f"{what} agrees", flush=True)


def mine(tensor: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    return tensor.chunk(parts)[part]


def ddp() -> None:
    model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.01)
    train(model, mine(x, rank, size), mine(y, rank, size))
    compare("ddp", model)


def joined() -> None:
    """Rank r has r + 1 batches, and the mean is over the ranks that still have one."""
    alone, model = Net(), nn.parallel.DistributedDataParallel(Net())
    optimizer, optimizers = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model))
    for step in range(size):
        optimizer.zero_grad()
        for part in range(step, size):
            loss = nn.functional.mse_loss(alone(mine(x, part, size)), mine(y, part, size))
            (loss / (size - step)).backward()
        optimizer.step()
    with model.join(divide_by_initial_world_size=False):
        for _ in range(rank + 1):
            optimizers.zero_grad()
            nn.functional.mse_loss(model(mine(x, rank, size)), mine(y, rank, size)).backward()
            optimizers.step()
    for found, one in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, one, rtol=0, atol=1e-12)
    print("joined agrees", flush=True)


def fsdp() -> None:
    model = Net()
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
    train(model, mine(x, rank, size), mine(y, rank, size))
    compare("fsdp", model)


def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, mine(x, rank, size), mine(y, rank, size))
    compare("hsdp", model)


def narrow() -> None:
    """bfloat16 on the way, as mixed precision has it: only that it runs, and that ranks agree."""
    model = Net().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    train(model, mine(x, rank, size).float(), mine(y, rank, size).float())
    totals = comm.allgather_object([p.full_tensor().double().sum().item() for p in model.parameters()])
    assert all(total == totals[0] for total in totals)
    print("narrow agrees", flush=True)


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    for block in model.blocks.values():
        parallelize_module(
            block,
            mesh["tp"],
            {
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0)),
            },
        )
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh["dp"])
    # sequence parallel: of a rank's rows each of the two has a half between the blocks
    part = mesh.get_local_rank("dp")
    inputs, targets = (mine(mine(t, part, 2), mesh.get_local_rank("tp"), 2) for t in (x, y))
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        # the halves of the rows are added up, where those of the batch are averaged
        (nn.functional.mse_loss(model(inputs), targets) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    compare("tensor parallel", model)


def pipeline(schedule: type, name: str) -> None:
    model = Net()
    for number in range(BLOCKS):
        if number * size // BLOCKS != rank:
            del model.blocks[str(number)]
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    steps = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if rank == 0:
            steps.step(x)
        elif rank == size - 1:
            steps.step(target=y, losses=[])
        else:
            steps.step()
        total = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
        dist.all_reduce(total)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, total.sqrt())
        optimizer.step()
    compare(name, model)


wanted = train_alone()
ddp()
joined()
fsdp()
hsdp()
narrow()
tensor_parallel()
pipeline(ScheduleGPipe, "gpipe")
pipeline(Schedule1F1B, "1f1b")
