"""Make torch raise, in every thread, when code touches a storage without memory, instead of crashing.

torch has two flags for this in each storage (``StorageImpl``, since 2.5; for fake tensors and CUDA graph
trees). Everything that asks for the memory's address looks at them. A build without CUDA has no function that
sets both, so they are written in memory. Their place is found with torch's own functions for two other flags
beside them, and used only if a test tensor then behaves as expected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from .host.process_memory import address_space

#: torch's message when code asks for an address that it must not give.
REFUSAL = "Cannot access data pointer of Storage"
#: Largest offset of torch's flags in a storage, in bytes.
_REACH_BYTES = 128


class _Flags(NamedTuple):
    """Offsets of the two flags, in bytes from the start of a storage.

    ``checked`` makes torch look at the others before it gives the address for writing; ``refused`` forbids
    access.
    """

    checked: int
    refused: int


def forbid(storages: Iterable[torch.UntypedStorage]) -> None:
    """Make torch raise ``RuntimeError`` when code touches the memory of these storages, if `supported`."""
    flags, memory = _flags(), address_space()
    if flags is None:
        return
    for storage in storages:
        memory[storage._cdata + flags.refused] = 1
        memory[storage._cdata + flags.checked] = 1


def permit(storages: Iterable[torch.UntypedStorage]) -> None:
    """Undo `forbid`. Storages that are not forbidden stay as they are."""
    flags, memory = _flags(), address_space()
    if flags is None:
        return
    for storage in storages:
        # The other flag only makes torch check. It may have been set before, and a resize computes it anew.
        memory[storage._cdata + flags.refused] = 0


def supported() -> bool:
    """Return True if this version of torch can be made to raise."""
    return _flags() is not None


@functools.cache
def _flags() -> _Flags | None:
    """Find the flags in a test storage, try them on another, and return their offsets; None if that fails."""
    probe = torch.ones(1)
    states = [_state(probe)]
    for change in ("_set_throw_on_mutable_data_ptr", "_set_warn_deprecated_on_mutable_data_ptr"):
        getattr(torch._C, change, id)(probe)
        states.append(_state(probe))
    changed = [
        [at for at, (before, after) in enumerate(zip(*pair, strict=True)) if before != after]
        for pair in (states[:2], states[1:])
    ]
    match changed:
        case [[checked, writing], [warning]] if (writing, warning) == (checked + 1, checked + 3):
            flags = _Flags(checked, checked + 2)
            return flags if _holds(flags) else None
    return None


def _state(tensor: torch.Tensor) -> bytes:
    start = tensor.untyped_storage()._cdata
    return bytes(address_space()[start : start + _REACH_BYTES])


def _holds(flags: _Flags) -> bool:
    """Return True if setting the flags makes a storage refuse all access, and clearing them ends that."""
    probe, memory = torch.ones(1), address_space()
    start = probe.untyped_storage()._cdata
    before = memory[start + flags.checked], memory[start + flags.refused]
    if before != (0, 0):
        return False
    memory[start + flags.checked] = memory[start + flags.refused] = 1
    refused = [_refuses(probe.clone), _refuses(probe.zero_), _refuses(probe.untyped_storage().data_ptr)]
    memory[start + flags.checked] = memory[start + flags.refused] = 0
    return all(refused) and probe.item() == 1


def _refuses(touch: Callable[[], object]) -> bool:
    """Return True if the call raises ``RuntimeError``."""
    try:
        touch()
    except RuntimeError:
        return True
    return False
