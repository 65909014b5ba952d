import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

images, labels = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(images / 16), torch.tensor(labels))


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def train_dataloader(self):
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = torch.utils.data.DistributedSampler(data, ranks, rank, seed=0)
        return torch.utils.data.DataLoader(data, batch_size=48 // ranks, sampler=sampler)

    def training_step(self, batch, index):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch} loss {self.trainer.callback_metrics['loss']:.12f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=4,
        limit_train_batches=30,
        use_distributed_sampler=False,
        logger=False,
        callbacks=[ModelCheckpoint("checkpoints", save_last=True)],
    )
    trainer.fit(Digits(), ckpt_path="last")
