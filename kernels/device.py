"""``Device``: everything that gpuslice asks of a place where tensors live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.types import DeviceName

from .transfer import Checksums, Inspector, Pairs, Transfer, Watchers


class Way(Enum):
    """How one storage leaves the device during a suspend."""

    #: ``resize_(0)``: the memory goes back to the allocator and comes from it again, at another address.
    FREED = "freed"
    #: The pages are given back to the kernel, the address stays reserved and valid.
    DISCARDED = "discarded"
    #: It stays where it is. Exact, because a parked process does not touch it, but nothing is gained.
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class Hold:
    """How one storage is emptied, and why if its memory is not simply freed."""

    way: Way
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device in bytes.

    Attributes
    ----------
    total_bytes, used_bytes
        Memory of the whole device, used by all processes.
    allocated_bytes
        What this process's tensors hold by the allocator's own count, or ``None`` if it keeps none.
    reserved_bytes
        What this process holds, caches included.
    """

    total_bytes: int
    used_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int


class Device(ABC):
    """A place where tensors live and from which they can be taken away.

    ``holds`` decides, ``copy_out`` saves, ``free`` and ``discard`` empty; ``reserve`` and ``copy_in``
    bring back. Storages are raw bytes here: shapes, views and dtypes are the business of the tensors
    over them, which stay valid all the time. Between ``free`` and ``copy_in`` no code may touch them
    (``storage_access`` has torch raise then).

    Attributes
    ----------
    torch_device
        The ``torch.device`` of the storages it owns.
    obstacles
        Types whose live instances forbid emptying the device storage by storage, and why.
    """

    name: DeviceName
    torch_device: torch.device
    obstacles: Mapping[type, str] = MappingProxyType({})

    @property
    def memory_node(self) -> int | None:
        """NUMA node of the host's memory next to the device; None if unknown, or for the host itself."""
        return None

    @abstractmethod
    def pin(self) -> None:
        """Bind this process to the device: CPU affinity and thread count, or the current GPU."""

    def synchronize(self) -> None:  # noqa: B027 - on the host nothing is ever queued
        """Wait until everything that this process has queued on the device, on all streams, is done."""

    def check_idle(self) -> None:  # noqa: B027 - the host can be interrupted at every boundary
        """Raise ``SuspendRefusedError`` if the device is in a state that cannot be interrupted."""

    @abstractmethod
    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Return True if the storage's memory is on this device."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return how much of the device's memory is in use."""
        ...

    def held(self, gone_bytes: int) -> dict[str, int]:
        """Return the bytes that this process keeps on the device while it is parked, by what keeps them.

        Parameters
        ----------
        gone_bytes
            What the allocator still counts though it has left the device (the vmm route).
        """
        return {}

    @abstractmethod
    def holds(
        self, storages: Sequence[torch.UntypedStorage], *, fixed: Set[int], exposed: Set[int] = frozenset()
    ) -> list[Hold]:
        """Return how each of these storages will be emptied. Touches nothing.

        Parameters
        ----------
        fixed
            ``_cdata`` of storages whose address other code may know, so that it must not change.
        exposed
            ``_cdata`` of storages whose memory other code could read behind torch's back meanwhile.
        """

    def copy_out(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        """Copy storages into ``arena``, each to its offset, and return when all bytes have arrived.

        Storages of the host are accepted on every device. Bytes of the arena between the end of a small
        storage and the next multiple of 256 may be overwritten, no others.

        Parameters
        ----------
        inspect
            Sees every chunk: on its way, and then it may say that it need not be copied, or in the arena
            after that. Raises what it raises.
        checksums
            Told of chunks, which are then not inspected, by a device that needs not move the bytes for that.
        """
        return self._copy(pairs, arena, (inspect, checksums), out=True)

    def copy_in(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        """Copy from offsets in ``arena`` into storages, and return when all bytes have arrived.

        Neither direction bumps a tensor's version counter, so pending autograd graphs stay valid.

        Parameters
        ----------
        inspect
            Sees every chunk in the arena before it is copied. Raises what it raises; the storages then
            hold anything.
        checksums
            Told of chunks that have arrived, which are then not inspected. Raises what it raises, likewise.
        """
        return self._copy(pairs, arena, (inspect, checksums), out=False)

    @abstractmethod
    def _copy(self, pairs: Pairs, arena: memoryview, watchers: Watchers, *, out: bool) -> Transfer:
        """Copy storages to (``out``) or from their offsets in ``arena``, and return the statistics."""

    @abstractmethod
    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Free the memory of storages that are held as ``Way.FREED``. Empty ones stay empty."""

    def discard(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Drop the pages of storages held as ``Way.DISCARDED``. Reading them gives zeros or old bytes."""
        if storages:
            raise EnvironmentUnusableError(f"{self.name} cannot drop pages under a tensor")

    @abstractmethod
    def reserve(self, pairs: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        """Give freed storages their memory back: all of them, or none and raise ``DeviceMemoryError``.

        A storage that already has its size is left alone. If its pages were dropped, there must be memory for
        them, too.
        """

    def allocate(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        """Return new storages of these sizes: all, or none and raise ``DeviceMemoryError``."""
        storages = [torch.UntypedStorage(0, device=self.torch_device) for _ in sizes]  # type: ignore[no-untyped-call]
        self.reserve(list(zip(storages, sizes, strict=True)))
        return storages

    @abstractmethod
    def release_caches(self, *, workspaces: bool = True) -> None:
        """Give memory that the allocator caches back to the system.

        Parameters
        ----------
        workspaces
            Also those of libraries, which captured graphs may know by their addresses.
        """

    @property
    def registrations(self) -> int:
        """Number of mappings that this process has page-locked so far."""
        return 0

    def register(self, arena: memoryview) -> bool:
        """Page-lock a mapping once, and prepare what its first copy needs. Return True if that worked.

        May be called from any thread. If the system refuses, copies are slower, and say why
        (``Transfer.fallbacks``).
        """
        return True

    def unregister(self, arena: memoryview) -> None:  # noqa: B027 - copies of the host need no locks
        """Undo ``register``. Must be called before the mapping goes away."""

    def rng_state(self) -> torch.Tensor | None:
        """Return the state of the device's own default generator, or None if it has no generator."""
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of the device's own default generator."""
        raise EnvironmentUnusableError(f"{self.name} has no generator besides the host's")
