import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

images, labels = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(images[:1440] / 16), torch.tensor(labels[:1440]))

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True))
set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(data, batch_size=48, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(3):
    total = 0.0
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total += accelerator.reduce(loss.detach(), reduction="mean").item()
    accelerator.print(f"epoch {epoch} loss {total / len(loader):.12f}")
