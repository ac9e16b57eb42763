"""The random number generators that a whole process shares: random, numpy's legacy one, torch, every GPU.

Generators in variables are not among them. No other code can draw from those while their owner is parked, and
a job that restarts in another process names them like the rest of its state.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gpuslice.errors import RefusedSnapshotError

from .generators import NO_STATE, Generator, check_generator_state, generator_state, set_generator_state

#: The objects whose methods ``random`` and ``np.random`` offer as functions.
_RANDOM, _NUMPY = random._inst, np.random.mtrand._rand


def capture() -> dict[str, object]:
    """Return the states of the generators of random, numpy, torch and every GPU, as `generator_state` does.

    Keys: ``random``, ``numpy``, ``torch``, and ``cuda`` (one state per device) if CUDA is in use.
    """
    states: dict[str, object] = {
        "random": generator_state(_RANDOM)[1],
        "numpy": generator_state(_NUMPY)[1],
        "torch": generator_state(torch.default_generator)[1],
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = list(torch.cuda.get_rng_state_all())
    return states


def check(states: Any, gpus: Mapping[int, int]) -> None:
    """Check that generator states from a file can be restored. Changes nothing.

    Parameters
    ----------
    states, gpus
        As for `restore`.

    Raises
    ------
    RefusedSnapshotError
        If they are no such states, or no generator could continue from them.
    """
    try:
        pairs = _paired(states, gpus)
    except NO_STATE as error:
        raise RefusedSnapshotError(f"the process's random states cannot be used: {error}") from error
    for generator, state in pairs:
        check_generator_state(generator, state, "the process")


def restore(states: Mapping[str, Any], gpus: Mapping[int, int] | None = None) -> None:
    """Restore the states that `capture` returned.

    Parameters
    ----------
    states
        What `capture` returned; what comes from a file must have passed `check`.
    gpus
        In another process: the index here of what was GPU ``i`` there. GPUs that are not here, and are
        not among these, are left out: the job does not use them.
    """
    for generator, state in _paired(states, gpus):
        set_generator_state(generator, state)


def _paired(states: Mapping[str, Any], gpus: Mapping[int, int] | None) -> list[tuple[Generator, Any]]:
    """Return each generator of this process with its state."""
    numpy = states["numpy"]
    if not isinstance(numpy, Mapping):  # as it was saved before generators had one form
        kind, keys, position, has_gauss, gauss = numpy
        twister = {"key": keys.numpy(), "pos": position}
        numpy = {"bit_generator": kind, "state": twister, "has_gauss": has_gauss, "gauss": gauss}
    cuda = dict(enumerate(states.get("cuda", [])))
    if cuda and gpus is not None:
        visible = torch.cuda.device_count()
        here = {index: state for index, state in cuda.items() if index < visible}
        cuda = here | {gpus[index]: state for index, state in cuda.items() if index in gpus}
    if cuda:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    on_gpus = [(torch.cuda.default_generators[index], state) for index, state in cuda.items()]
    ours = ((_RANDOM, states["random"]), (_NUMPY, numpy), (torch.default_generator, states["torch"]))
    return [*ours, *on_gpus]
