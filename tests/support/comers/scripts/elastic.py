"""Under torchrun's `record`, after timm's train.py: a group made twice, averaged weights, a sampler without epochs."""

import copy
import os

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ModelEmaV2(torch.nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            average.copy_(self.decay * average + (1.0 - self.decay) * value)


def train(model, ema, optimizer, data, steps):
    """The wrapper lives as long as its group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(
        data, batch_size=64 // world, sampler=DistributedSampler(data), persistent_workers=True, num_workers=1
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    for step in steps:
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(wrapped(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ema.update(model)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item()!r}")


@record
def main():
    world = int(os.environ["WORLD_SIZE"])
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    ema = ModelEmaV2(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for steps in (range(5), range(5, 10)):
        dist.init_process_group(backend="gloo", init_method="env://")
        train(model, ema, optimizer, data, steps)
        averages = [None] * world
        dist.all_gather_object(averages, [value.tolist() for value in ema.module.state_dict().values()])
        assert all(each == averages[0] for each in averages)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
