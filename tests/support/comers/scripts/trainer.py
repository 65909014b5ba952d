"""The Trainer of Transformers with batches per device; each epoch is one step on all samples."""

import os

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs, **further):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step - 1} loss {logs['loss']!r}")


torch.set_default_dtype(torch.float64)
set_seed(0)
x, labels = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [{"x": each, "labels": label} for each, label in zip(x, labels)]
world = int(os.environ.get("WORLD_SIZE", 1))
arguments = TrainingArguments(
    "checkpoints",
    per_device_train_batch_size=64 // world,
    learning_rate=0.1,
    lr_scheduler_type="constant",
    max_grad_norm=0,
    num_train_epochs=10,
    logging_steps=1,
    save_strategy="epoch",
    disable_tqdm=True,
    report_to="none",
)
last = get_last_checkpoint("checkpoints") if os.path.isdir("checkpoints") else None
model = Net()
optimizers = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[PrintLoss()], optimizers=optimizers)
trainer.train(resume_from_checkpoint=last)
