"""Accelerate's loop, with batches per process and its own samplers; each epoch is one step on all samples."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

torch.set_default_dtype(torch.float64)
accelerator = Accelerator()
set_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(data, batch_size=64 // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first = 0
if os.path.exists("state/step"):
    accelerator.load_state("state")
    first = int(open("state/step").read())
for epoch in range(first, 10):
    if epoch == 4:
        accelerator.save_state("state")
        if accelerator.is_main_process:
            with open("state/step", "w") as file:
                file.write(str(epoch))
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print(f"step {epoch} loss {accelerator.gather(loss.detach()).mean().item()!r}")
