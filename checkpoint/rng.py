"""The random number generators that a whole process shares: random, numpy's legacy one, torch, every GPU.

Generators that somebody holds in a variable are not among them: nobody else can draw from those while
their owner is parked, and a job that restarts in another process names them like the rest of its state.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gpuslice.errors import RefusedSnapshotError


def capture() -> dict[str, object]:
    """All states, as plain values and CPU tensors that ``tree.py`` can store.

    Keys: ``random``, ``numpy``, ``torch``, and ``cuda`` (one state per device) if CUDA is in use.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, object] = {
        "random": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = list(torch.cuda.get_rng_state_all())
    return states


def restore(states: Mapping[str, Any], gpus: Mapping[int, int] | None = None) -> None:
    """Put the states of `capture` back.

    Parameters
    ----------
    states
        What `capture` returned.
    gpus
        In another process: the index here of what was GPU ``i`` there. GPUs that are not here, and are
        not among these, are left out: the job does not use them.

    Raises
    ------
    RefusedSnapshotError
        If they are from a process with more GPUs than this one has, or not states at all.
    """
    cuda = dict(enumerate(states.get("cuda", [])))
    visible = torch.cuda.device_count() if cuda else 0
    if gpus is not None:
        here = {index: state for index, state in cuda.items() if index < visible}
        cuda = here | {gpus[index]: state for index, state in cuda.items() if index in gpus}
    elif len(cuda) > visible:
        raise RefusedSnapshotError(
            f"the snapshot has random states of {len(cuda)} GPUs, this process sees {visible}",
            "restore where at least as many GPUs are visible",
        )
    try:
        version, words, gauss_next = states["random"]
        kind, keys, position, has_gauss, gauss = states["numpy"]
        random.setstate((version, tuple(words), gauss_next))
        np.random.set_state((kind, keys.numpy(), position, has_gauss, gauss))
        torch.set_rng_state(states["torch"])
        for index, state in cuda.items():
            torch.cuda.set_rng_state(state, index)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise RefusedSnapshotError(f"the random states cannot be used: {error}") from error
