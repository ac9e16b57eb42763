"""Storages without memory that raise where torch would read it, in every thread, instead of crashing.

torch has a switch for this in each storage (``StorageImpl``, since 2.5; for fake tensors and CUDA graph
trees): two flags, which everything that asks for the address of the memory looks at anyway. A build without
CUDA has no function that sets both, so they are written where they are. Where that is, torch's own functions
for two other flags beside them show, and it is used only if a tensor made for this then behaves as expected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from .host.process_memory import address_space

#: What torch says when it is asked for an address that it must not give.
REFUSAL = "Cannot access data pointer of Storage"
#: How far into a storage torch's flags may be, in bytes.
_REACH_BYTES = 128


class _Flags(NamedTuple):
    """Where the flags are, in bytes from the start of a storage.

    ``checked`` has torch look at the others before it gives the address for writing; ``refused`` forbids it.
    """

    checked: int
    refused: int


def forbid(storages: Iterable[torch.UntypedStorage]) -> None:
    """Have torch raise ``RuntimeError`` where it is asked for the memory of these, if `supported`."""
    flags, memory = _flags(), address_space()
    if flags is None:
        return
    for storage in storages:
        memory[storage._cdata + flags.refused] = 1
        memory[storage._cdata + flags.checked] = 1


def permit(storages: Iterable[torch.UntypedStorage]) -> None:
    """Undo `forbid`. Those that are not forbidden stay as they are."""
    flags, memory = _flags(), address_space()
    if flags is None:
        return
    for storage in storages:
        # The other flag only makes torch look; it may have been set before, and is computed anew by a resize.
        memory[storage._cdata + flags.refused] = 0


def supported() -> bool:
    """Return True if this version of torch can be made to raise."""
    return _flags() is not None


@functools.cache
def _flags() -> _Flags | None:
    """Find the flags in a storage that is made for this, and try them on another one."""
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
    """Return True if a storage with the flags set refuses to be read and written, and later does not."""
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
    try:
        touch()
    except RuntimeError:
        return True
    return False
