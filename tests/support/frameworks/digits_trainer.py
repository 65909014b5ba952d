import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

images, labels = load_digits(return_X_y=True)
data = [{"x": torch.tensor(x / 16), "labels": int(y)} for x, y in zip(images[:1440], labels[:1440], strict=True)]


class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).double()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs, **further):
        if state.is_world_process_zero and "loss" in logs:
            print(f"epoch {logs['epoch']:.0f} loss {logs['loss']:.12f}")


set_seed(0)
arguments = TrainingArguments(
    "checkpoints",
    per_device_train_batch_size=48,
    accelerator_config={"split_batches": True},
    learning_rate=0.01,
    num_train_epochs=3,
    logging_strategy="epoch",
    save_strategy="epoch",
    disable_tqdm=True,
    report_to="none",
)
Trainer(Digits(), arguments, train_dataset=data, callbacks=[PrintLoss()]).train()
