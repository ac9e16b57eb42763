"""Lightning's Trainer with dropout, random changes in the data set, validation, and a callback that counts.

Words: the package, loader workers, accumulated batches. While there is a file ``slowly``, a step takes half a
second.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import digest
import torch
from torch import nn

lightning = importlib.import_module(sys.argv[1])
workers, accumulated = int(sys.argv[2]), int(sys.argv[3])
callbacks = importlib.import_module(f"{sys.argv[1]}.callbacks")


class Rows(torch.utils.data.Dataset):
    """Rows to which noise is added anew whenever they are fetched."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(400, 40), torch.randint(0, 5, (400,))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[number] + 0.1 * torch.randn(40), self.y[number]


class Tell(lightning.Callback):
    """Prints each step, and keeps a count that changes the weight decay."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer, model, *words) -> None:  # type: ignore[no-untyped-def]
        if trainer.global_step > self.steps:
            self.steps += 1
            print("step", trainer.global_step, self.steps, flush=True)
            time.sleep(0.5 if Path("slowly").exists() else 0)
            for group in trainer.optimizers[0].param_groups:
                group["weight_decay"] = 0.01 * (self.steps % 5)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(40, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 5))
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch, number):  # type: ignore[no-untyped-def]
        return self.loss(batch, "train_loss")

    def validation_step(self, batch, number):  # type: ignore[no-untyped-def]
        return self.loss(batch, "loss")

    def loss(self, batch, name):  # type: ignore[no-untyped-def]
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log(name, loss)
        return loss

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)]


lightning.seed_everything(5)
rows = Rows()
training = torch.utils.data.DataLoader(rows, batch_size=20, shuffle=True, num_workers=workers)
validation = torch.utils.data.DataLoader(rows, batch_size=50)
model = Classifier()
# No loss improves by 100: the training stops at its fifth validation, amid the third epoch.
stop = callbacks.EarlyStopping("loss", min_delta=100.0, patience=4)
with tempfile.TemporaryDirectory() as directory:
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=0.5,
        val_check_interval=0.5,
        callbacks=[
            callbacks.ModelCheckpoint(dirpath=directory, every_n_train_steps=7),
            stop,
            Tell(),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, training, validation)
assert trainer.global_step == 50 // accumulated, "it did not stop early"
digest.tell(model.state_dict(), trainer.optimizers[0].state_dict())
