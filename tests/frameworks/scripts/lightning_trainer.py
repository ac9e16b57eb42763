"""Lightning's Trainer, on one process or several: validation, checkpoints, averaged weights."""

from __future__ import annotations

import sys
import tempfile

import digest
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn

lightning.seed_everything(5, workers=True)
devices = int(sys.argv[1])


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(40, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Dropout(0.3), nn.Linear(128, 5))
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return self.loss(batch, "train_loss")

    def validation_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return self.loss(batch, "loss")

    def loss(self, batch: list[torch.Tensor], name: str) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log(name, loss)
        return loss

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)]


rows = torch.utils.data.TensorDataset(torch.randn(400, 40), torch.randint(0, 5, (400,)))
training = torch.utils.data.DataLoader(rows, batch_size=20, shuffle=True)
validation = torch.utils.data.DataLoader(rows, batch_size=50)
model = Classifier()
with tempfile.TemporaryDirectory() as directory:
    averaging = [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)] if devices == 1 else []
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=devices,
        strategy="auto" if devices == 1 else "ddp",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(dirpath=directory, every_n_train_steps=7), *averaging],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, training, validation)
if trainer.global_rank == 0:
    digest.tell(model.state_dict(), trainer.optimizers[0].state_dict())
