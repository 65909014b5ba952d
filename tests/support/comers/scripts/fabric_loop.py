"""Lightning's Fabric, which takes the loop as it is; each epoch is one step on all samples."""

import lightning
import torch

torch.set_default_dtype(torch.float64)
fabric = lightning.Fabric(precision="64-true")
fabric.launch()
fabric.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=64 // fabric.world_size, shuffle=True))
for epoch in range(10):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        fabric.print(f"step {epoch} loss {fabric.all_reduce(loss.detach(), reduce_op='mean').item()!r}")
