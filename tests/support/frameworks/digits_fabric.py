import lightning
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

images, labels = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(images / 16), torch.tensor(labels))

fabric = lightning.Fabric(accelerator="cpu", precision="64-true")
fabric.launch()
fabric.seed_everything(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=48 // fabric.world_size))

for epoch in range(3):
    total = 0.0
    for step, (x, y) in enumerate(loader):
        if step == 30:
            break
        loss = cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total += fabric.all_reduce(loss.detach(), reduce_op="mean").item()
    fabric.print(f"epoch {epoch} loss {total / 30:.12f}")
