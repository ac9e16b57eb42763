"""The host as a device: state leaves the process's own memory and comes back, as on a GPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence, Set
from pathlib import Path

import psutil
import torch

from gpuslice.errors import DeviceMemoryError, EnvironmentUnusableError
from gpuslice.kernels.device import Device, DeviceMemory, Hold, Way
from gpuslice.kernels.transfer import Pairs, Transfer, Watchers
from gpuslice.kernels.undo import undone_by
from gpuslice.memory import available_bytes
from gpuslice.types import DeviceName

from . import copies
from .memory_files import no_address_space
from .process_memory import (
    PAGE_BYTES,
    AddressSpace,
    absent_bytes,
    drop_pages,
    resident_anonymous_bytes,
    trim,
    whole_pages,
)
from .slots import check_slot, slot_cores

_HOST = torch.device("cpu")
_FREED = Hold(Way.FREED)
_DISCARDED = Hold(Way.DISCARDED, "its address must stay, so its pages are dropped instead")
#: Dropping fewer pages is not worth two system calls and the faults afterwards.
_MIN_DISCARD_BYTES = 4 * PAGE_BYTES


@functools.cache
def _host_cores() -> tuple[int, ...]:
    """Return the cores that this process was given. They are read before ``pin`` narrows them."""
    return tuple(sorted(os.sched_getaffinity(0)))


class CpuDevice(Device):
    """``cpu`` (the whole host) or ``cpu:N``, one of equal slots of the host's cores.

    Parameters
    ----------
    slots
        Into how many slots the cores are divided; 0 means one per core. All slots have the same
        number of cores, because the number of threads decides how torch splits reductions and with
        it the last bits of the results.

    Raises
    ------
    EnvironmentUnusableError
        If the host has no such slot.
    """

    def __init__(self, name: DeviceName, *, slots: int = 0) -> None:
        self.name = name
        self.torch_device = torch.device("cpu")
        cores = _host_cores()
        self.cores = frozenset(cores)
        if name.index is not None:
            self.cores = slot_cores(name.index, check_slot(name, slots, len(cores)), cores)

    def pin(self) -> None:
        """Bind every thread of the process to the slot's cores. For the whole host nothing changes."""
        if self.name.index is None:
            return
        for thread in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(thread.name), self.cores)
            except ProcessLookupError:
                continue  # a thread that has ended meanwhile
        if torch.get_num_threads() > len(self.cores):
            torch.set_num_threads(len(self.cores))

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage.device == _HOST

    def memory(self) -> DeviceMemory:
        """Return the machine's memory, or zeros if unknown; reserved is RssAnon of this process."""
        try:
            machine = psutil.virtual_memory()
            total_bytes, used_bytes = machine.total, machine.total - machine.available
        except (OSError, LookupError, ValueError, RuntimeError, psutil.Error):
            total_bytes = used_bytes = 0
        return DeviceMemory(total_bytes, used_bytes, None, resident_anonymous_bytes())

    def holds(
        self, storages: Sequence[torch.UntypedStorage], *, fixed: Set[int], exposed: Set[int] = frozenset()
    ) -> list[Hold]:
        space = AddressSpace()
        keys = [storage._cdata for storage in storages]
        return [
            _hold(storage, key in fixed, key in exposed, space)
            for storage, key in zip(storages, keys, strict=True)
        ]

    def _copy(self, pairs: Pairs, arena: memoryview, watchers: Watchers, *, out: bool) -> Transfer:
        """Copy by threads of this process. The inspector sees every chunk; checksums are not used."""
        return (copies.copy_out if out else copies.copy_in)(pairs, arena, watchers[0], len(self.cores))

    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        for storage in storages:
            storage.resize_(0)

    def discard(self, storages: Sequence[torch.UntypedStorage]) -> None:
        for storage in storages:
            drop_pages(storage.data_ptr(), storage.nbytes())

    def reserve(self, pairs: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        missing = [one for one in pairs if one[0].nbytes() != one[1]]
        missing_bytes = sum(nbytes for _, nbytes in missing)
        there = [one for one in pairs if one[0].nbytes() == one[1]]
        needed_bytes = missing_bytes + sum(absent_bytes(one.data_ptr(), nbytes) for one, nbytes in there)
        # Linux grants more memory than there is, and kills processes later.
        found_bytes = _available_bytes()
        if found_bytes is not None and needed_bytes > found_bytes:
            raise DeviceMemoryError(
                f"{self.name} lacks the memory to take back {needed_bytes} bytes: "
                f"{found_bytes} are available",
                "free some and resume again; the snapshot is kept",
            )

        def give_back() -> None:
            self.free([storage for storage, _ in missing])
            self.release_caches()

        try:
            with undone_by(give_back, f"taking memory of {self.name}"):
                for storage, nbytes in missing:
                    storage.resize_(nbytes)
        except RuntimeError as error:
            # There was enough memory, so the process has run out of addresses.
            raise DeviceMemoryError(*no_address_space(missing_bytes)) from error

    def release_caches(self, *, workspaces: bool = True) -> None:
        trim()


def _available_bytes() -> int | None:
    """Return how much memory new pages may take, or None if unknown: a job must be able to come back."""
    try:
        return available_bytes()
    except EnvironmentUnusableError:
        return None


def _over(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor over a storage: the storage's own ``is_pinned`` makes torch warn."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _hold(storage: torch.UntypedStorage, fixed: bool, exposed: bool, space: AddressSpace) -> Hold:
    """Return how a storage of the host is emptied."""
    if storage.is_shared():
        return Hold(Way.RESIDENT, "shared memory or a mapped file")
    if torch.cuda.is_initialized() and _over(storage).is_pinned():  # type: ignore[no-untyped-call]
        return Hold(Way.RESIDENT, "page-locked host memory")
    if storage.resizable() and not fixed:
        return _FREED
    first, nbytes = whole_pages(storage.data_ptr(), storage.nbytes())
    if nbytes < _MIN_DISCARD_BYTES:
        return Hold(Way.RESIDENT, "its address must stay and it is too small to drop pages")
    if exposed:
        return Hold(Way.RESIDENT, "other code could read its memory meanwhile, as a NumPy array does")
    if not space.is_private_anonymous(first, nbytes):
        return Hold(Way.RESIDENT, "its memory is not private, anonymous and writable")
    return _DISCARDED
