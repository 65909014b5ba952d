"""After Horovod's pytorch_mnist.py and pytorch_imagenet_resnet50.py: DistributedSampler, broadcasts, checkpoints."""

import os

import horovod.torch as hvd
import torch

hvd.init()
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=64 // hvd.size(), sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
if hvd.rank() > 0:
    # What the broadcast has to put right.
    torch.nn.init.zeros_(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
resume_from_epoch = 0
if hvd.rank() == 0 and os.path.exists("checkpoint.pt"):
    checkpoint = torch.load("checkpoint.pt", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    resume_from_epoch = checkpoint["epoch"]
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(resume_from_epoch, 10):
    if epoch == 4 and hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "saving.pt")
        os.replace("saving.pt", "checkpoint.pt")
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"step {epoch} loss {mean.item()!r}")
