"""What a training has come to, as one line."""

from __future__ import annotations

import hashlib
import os

import torch


def tell(*states: object) -> None:
    """Print the digest of tensors and numbers in nested dicts and lists, and of torch's generator."""
    found = hashlib.sha256()

    def add(state: object) -> None:
        if isinstance(state, torch.Tensor):
            found.update(f"{state.dtype} {tuple(state.shape)} ".encode())
            found.update(state.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(state, dict):
            for key, value in state.items():
                found.update(f"{key} ".encode())
                add(value)
        elif isinstance(state, list | tuple):
            for value in state:
                add(value)
        else:
            found.update(f"{state!r} ".encode())

    add([*states, torch.get_rng_state()])
    os.write(1, f"digest {found.hexdigest()}\n".encode())  # at once: another rank may print, too
