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

from .generators import NO_STATE, check_generator_state

#: The generator behind ``np.random`` unless ``np.random.set_bit_generator`` has put another one there.
_OF_NUMPY = "MT19937"
#: What the functions of ``np.random`` are methods of.
_SHARED = np.random.mtrand._rand


def capture() -> dict[str, object]:
    """All states, as plain values and CPU tensors that ``tree.py`` can store.

    Keys: ``random``, ``numpy``, ``torch``, and ``cuda`` (one state per device) if CUDA is in use.
    """
    states: dict[str, object] = {
        "random": random.getstate(),
        "numpy": _of_numpy(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = list(torch.cuda.get_rng_state_all())
    return states


def _of_numpy() -> object:
    """NumPy's state: five values of its own generator; of one that was put there instead, a dict."""
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != _OF_NUMPY:
        return state
    words = state["state"]
    return _OF_NUMPY, torch.from_numpy(words["key"]), words["pos"], state["has_gauss"], state["gauss"]


def check(states: Any, gpus: Mapping[int, int]) -> None:
    """See whether states that a file held can be put back; changes nothing.

    Parameters
    ----------
    states, gpus
        As for `restore`.

    Raises
    ------
    RefusedSnapshotError
        If they are no such states, or nobody could go on from them.
    """
    try:
        own, numpy, cpu, cuda = _unpacked(states, gpus)
    except NO_STATE as error:
        raise RefusedSnapshotError(f"the process's random states cannot be used: {error}") from error
    check_generator_state(random.Random(), own, "the process")
    check_generator_state(_SHARED, numpy, "the process")
    check_generator_state(torch.Generator(), cpu, "the process")
    for index, state in cuda.items():
        check_generator_state(torch.Generator(torch.device("cuda", index)), state, "the process")


def restore(states: Mapping[str, Any], gpus: Mapping[int, int] | None = None) -> None:
    """Put the states of `capture` back.

    Parameters
    ----------
    states
        What `capture` returned; what comes from a file must have passed `check`.
    gpus
        In another process: the index here of what was GPU ``i`` there. GPUs that are not here, and are
        not among these, are left out: the job does not use them.
    """
    own, numpy, cpu, cuda = _unpacked(states, gpus)
    random.setstate(own)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    for index, state in cuda.items():
        torch.cuda.set_rng_state(state, index)


def _unpacked(
    states: Mapping[str, Any], gpus: Mapping[int, int] | None
) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor, dict[int, torch.Tensor]]:
    """As the libraries take them: of random, NumPy, torch, and torch on the GPUs here."""
    version, words, gauss_next = states["random"]
    numpy = states["numpy"]
    if not isinstance(numpy, Mapping):
        kind, keys, position, has_gauss, gauss = numpy
        twister = {"key": keys.numpy(), "pos": position}
        numpy = {"bit_generator": kind, "state": twister, "has_gauss": has_gauss, "gauss": gauss}
    cuda = dict(enumerate(states.get("cuda", [])))
    if cuda and gpus is not None:
        visible = torch.cuda.device_count()
        here = {index: state for index, state in cuda.items() if index < visible}
        cuda = here | {gpus[index]: state for index, state in cuda.items() if index in gpus}
    own = (version, tuple(words), gauss_next)
    return own, dict(numpy), states["torch"], cuda
