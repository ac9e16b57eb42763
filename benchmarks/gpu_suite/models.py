"""``python models.py MODEL``: one of the trainings of `trainings`, with nothing of gpuslice in it.

Prints a digest of what was learnt. Needs torchvision, transformers or Lightning.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 24
DEVICE = torch.device("cuda:0")


def finish(model: nn.Module, losses: list[float], *more: torch.Tensor) -> None:
    """Print a digest of the losses, the model, the generator and ``more``."""
    found = hashlib.sha256(repr(losses).encode())
    for value in (*model.state_dict().values(), torch.cuda.get_rng_state(DEVICE), *more):
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    print(found.hexdigest())


def resnet() -> None:
    """ResNet-18 in channels-last, AMP with a scaler, a loader with workers and page-locked memory."""
    import torchvision

    model = torchvision.models.resnet18(num_classes=10).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler, losses = torch.amp.GradScaler("cuda"), []
    data = TensorDataset(torch.randn(STEPS * 16, 3, 64, 64), torch.randint(0, 10, (STEPS * 16,)))
    for images, labels in DataLoader(data, batch_size=16, shuffle=True, pin_memory=True, num_workers=2):
        images = images.to(DEVICE, non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels.to(DEVICE, non_blocking=True))
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    finish(model, losses)


def gpt(compile_mode: str | None = None) -> None:
    """A GPT-2 of six layers in bf16 with fused AdamW; compiled if there is a mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6, n_head=8, n_embd=512, vocab_size=8192, n_positions=256)
    model = GPT2LMHeadModel(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    run, losses = (torch.compile(model, mode=compile_mode) if compile_mode else model), []
    data = TensorDataset(torch.randint(0, 8192, (STEPS * 8, 256)))
    for (tokens,) in DataLoader(data, batch_size=8, shuffle=True):
        tokens = tokens.to(DEVICE)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    finish(model, losses)


class Recurrent(nn.Module):
    """Three layers of LSTM with dropout, whose state goes on from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 256, num_layers=3, dropout=0.3, batch_first=True)
        self.head = nn.Linear(256, 1)

    def forward(
        self, batch: torch.Tensor, state: tuple[torch.Tensor, ...] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        out, state = self.lstm(batch, state)
        return self.head(out[:, -1]), tuple(value.detach() for value in state)


def lstm() -> None:
    """By cuDNN."""
    model = Recurrent().to(DEVICE)
    optimizer, losses = torch.optim.Adam(model.parameters()), []
    state: tuple[torch.Tensor, ...] = ()
    for (batch,) in DataLoader(TensorDataset(torch.randn(STEPS * 8, 20, 32)), batch_size=8):
        out, state = model(batch.to(DEVICE), state or None)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    finish(model, losses, *state)


def lightning() -> None:
    """Lightning's trainer in bf16."""
    import lightning.pytorch as pl

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses: list[float] = []

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 1))

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    model, quiet = Model(), ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        max_epochs=1, accelerator="gpu", devices=1, precision="bf16-mixed", **dict.fromkeys(quiet, False)
    )
    data = TensorDataset(torch.randn(STEPS * 8, 64))
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
    finish(model.to(DEVICE), losses)


MODELS: dict[str, Callable[[], None]] = {
    "resnet": resnet,
    "gpt": gpt,
    "gpt-compiled": lambda: gpt("default"),
    "gpt-reduce-overhead": lambda: gpt("reduce-overhead"),
    "lstm": lstm,
    "lightning": lightning,
}

if __name__ == "__main__":
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    MODELS[sys.argv[1]]()
