"""A LightningModule and a Trainer, which resumes from its last checkpoint; each epoch is one step on all samples."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

    def prepare_data(self):
        open(f"prepared-by-{self.trainer.global_rank}", "w").close()

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        mean = self.all_gather(loss.detach()).mean().item()
        if self.trainer.is_global_zero:
            print(f"step {self.current_epoch} loss {mean!r}")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    trainer = lightning.Trainer(
        max_epochs=10,
        precision="64-true",
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint("checkpoints", save_last=True)],
    )
    loader = torch.utils.data.DataLoader(data, batch_size=64 // trainer.world_size, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path="last")
