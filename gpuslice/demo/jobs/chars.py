"""Train a small transformer to write like Lewis Carroll, one character at a time."""

from __future__ import annotations

import argparse
import hashlib
import io
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CONTEXT = 48
WIDTH = 96


class Passages(Dataset[tuple[Tensor, Tensor]]):
    """The dataset of all stretches of ``CONTEXT`` characters, each with the stretch one character later."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self.codes = torch.tensor([self.alphabet.index(letter) for letter in text])

    def __len__(self) -> int:
        return len(self.codes) - CONTEXT

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        piece = self.codes[start : start + CONTEXT + 1]
        return piece[:-1], piece[1:]


class Writer(nn.Module):
    """A model of two causal transformer blocks between an embedding and a head with shared weights."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        block = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, letters, bias=False)
        self.head.weight = self.letters.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, codes: Tensor) -> Tensor:
        hidden = self.blocks(self.letters(codes) + self.places, mask=self.mask, is_causal=True)
        return self.head(hidden) / WIDTH**0.5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(1865)
    torch.use_deterministic_algorithms(True)
    data = Passages(Path(__file__).with_name("alice.txt").read_text(encoding="utf-8"))
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    model = Writer(len(data.alphabet)).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    step = 0
    while step < options.steps:
        for codes, following in loader:
            logits = model(codes.to(options.device))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.to(options.device).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.6f}", flush=True)
            if step == options.steps:
                break
    state = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], state)
    print("digest", hashlib.sha256(state.getvalue()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
