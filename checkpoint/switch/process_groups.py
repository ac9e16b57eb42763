"""Process groups of ``torch.distributed`` while their rank is parked: timeouts, memory of communicators.

A parked rank has no collective under way, so no timeout runs for it. NCCL's watchdog, a thread that is not
stopped, keeps its heartbeat. But ranks come back one after another: the first collective of an early rank
already waits for the others. Its time limit is therefore extended until a collective has completed.

NCCL 2.29.7 and newer can release the memory of a communicator. All ranks have to call that, and all have to
call for its return; a rank that calls alone waits for ever. So they first agree, through the group's store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gpuslice.checkpoint.discover import pending_collectives
from gpuslice.config import format_size
from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device
from gpuslice.kernels.nccl import Communicator

from .record import Stages, SwitchRecord

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: Time by which a rank may come back later than another.
EXTENSION = timedelta(hours=1)
#: More bytes than this that stay on a GPU are reported: the buffers of NVLS take hundreds of MiB.
_NOTABLE_BYTES = 64 << 20
#: How long a parked rank waits until the others are parked, and a returning one until they return.
_PATIENCE_PARKED, _PATIENCE_BACK = timedelta(seconds=10), timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class _Extended:
    """A backend with an extended timeout, and how many collectives it had begun at that time."""

    backend: Any
    timeout: timedelta
    begun: int

    def put_back(self) -> bool:
        """Restore the timeout if a collective has completed since. Return True if it was restored."""
        if self.backend._get_sequence_number_for_group() == self.begun or pending_collectives.unfinished():
            return False
        self.backend._set_default_timeout(self.timeout)
        return True


class ParkedGroups:
    """Handles the process groups of one rank around each of its suspends and resumes.

    Parameters
    ----------
    at_next_boundary
        Schedules a function for the process's next boundary, where timeouts are restored.
    tell
        Called once with a sentence about the memory of NCCL that stays on the GPU.
    """

    def __init__(
        self,
        at_next_boundary: Callable[[Callable[[int], None]], None],
        *,
        tell: Callable[[str], object] = lambda what: None,
    ) -> None:
        self._at_next_boundary = at_next_boundary
        self._tell: Callable[[str], object] | None = tell
        self._extended: list[_Extended] = []
        self._released: list[Communicator] = []
        self._record = SwitchRecord(0)
        #: Boundary of the last suspend, number of suspends begun there, and of resumes tried since.
        self._boundary = self._suspends = self._resumes = 0
        #: Names of the two questions in the group's store: are all parked; are all back (empty once agreed).
        self._parked = self._back = ""

    @contextmanager
    def parking(self, boundary: int, device: Device) -> Iterator[Callable[[SwitchRecord], None]]:
        """Extend timeouts around a suspend. If the block fails, no rank releases its communicators.

        Yields a function to call when the state is away: it releases the communicators' memory.
        """
        self._extend()
        self._begin(boundary)
        try:
            yield lambda record: self._release(record, device)
        except BaseException:
            self.back()
            self._decline(device)
            raise

    def pass_by(self, boundary: int, device: Device) -> None:
        """Tell the other ranks that this one cannot be suspended here, so that none releases anything."""
        self._begin(boundary)
        self._decline(device)

    def _begin(self, boundary: int) -> None:
        self._suspends = self._suspends + 1 if boundary == self._boundary else 1
        self._boundary = boundary
        self._parked = f"gpuslice/parked/{boundary}/{self._suspends}"

    def _decline(self, device: Device) -> None:
        if _communicators(device):
            _agreed(self._parked, timedelta(), consent=False)

    def _release(self, record: SwitchRecord, device: Device) -> None:
        """Release the communicators that all ranks (which have the same ones) can, and record what stays."""
        found = _communicators(device)
        if not found:
            return
        with Stages(record).stage("free_s"):
            gone_bytes, held_bytes = self._suspend(found, device)
        if self._released:
            self._back, self._resumes = f"{self._parked}/back", 0
        record.leave_communicators(gone_bytes, held_bytes)
        self._record = record

    def _suspend(self, found: Sequence[Communicator], device: Device) -> tuple[int, int]:
        """Have NCCL release memory. Return the bytes that are released, and those that stay."""
        memory = [(one, one.memory()) for one in found]
        known = [(one, nbytes) for one, nbytes in memory if nbytes is not None]
        if known and _agreed(self._parked, _PATIENCE_PARKED):
            self._released = [one for one, _ in memory if one.suspend()]
        gone = sum(nbytes.suspendable_bytes for one, nbytes in known if one in self._released)
        kept = sum(nbytes.persistent_bytes for _, nbytes in known)
        if len(known) < len(memory):
            what = "this NCCL cannot release the memory of its communicators (2.29.7 and newer can)"
            self._say(f"{what}: it stays on {device.name} while the job is parked")
        elif kept >= _NOTABLE_BYTES:
            what = "NCCL cannot release what it keeps as persistent, such as the buffers of NVLS"
            self._say(f"{what}: {format_size(kept)} stay on {device.name} while the job is parked")
        return gone, kept + sum(nbytes.suspendable_bytes for _, nbytes in known) - gone

    def _say(self, what: str) -> None:
        """Report a sentence once for all ranks."""
        tell, self._tell = self._tell, None
        if tell is not None and dist.get_rank() == 0:
            tell(what)

    def restore(self, device: Device, *, moves: bool) -> None:
        """Take the memory of released communicators again, before a resume.

        Parameters
        ----------
        device
            The device that the state has left.
        moves
            True if it is to resume on another device.

        Raises
        ------
        DeviceMemoryError
            If there is no room for them. The rank is parked as before.
        SuspendRefusedError
            If other ranks do not come back, or it cannot move. The rank is parked as before.
        SwitchFailedError
            If a communicator is lost.
        """
        if moves and (bound := self.obstacle_to_moves(device)):
            raise SuspendRefusedError(
                f"this rank cannot move to another device: {bound}",
                "resume on the device it was suspended from, or start the job again from its snapshot",
            )
        if not self._released:
            return
        with Stages(self._record).stage("reserve_s"):
            self._await_others()
            while self._released:
                self._released[0].resume()
                del self._released[0]

    def _await_others(self) -> None:
        """Wait until all ranks agree to resume.

        After they have agreed, none asks again: in a second try the others wait inside NCCL.
        """
        if not self._back:
            return
        self._resumes += 1
        if not _agreed(f"{self._back}/{self._resumes}", _PATIENCE_BACK):
            raise SuspendRefusedError(
                f"the other ranks did not come back within {_PATIENCE_BACK.seconds} s, and the memory of "
                "the NCCL communicators that they share with this one is released",
                "resume all ranks of the job",
            )
        self._back = ""

    def back(self) -> None:
        """Restore timeouts at the next boundaries. Call after a resume, or a suspend that failed."""
        if self._extended:
            self._at_next_boundary(self._put_back)

    def obstacle_to_moves(self, device: Device) -> str:
        """Return why this rank cannot resume on another device, or an empty string."""
        if self._released or _communicators(device):
            return f"an NCCL communicator of its process group belongs to {device.name}"
        return ""

    def _extend(self) -> None:
        known = {id(extended.backend) for extended in self._extended}
        for backend in _backends():
            if hasattr(backend, "_add_ephemeral_timeout"):
                backend._add_ephemeral_timeout(EXTENSION)  # NCCL: torch itself restores it
            elif id(backend) not in known:
                timeout = backend.options._timeout
                begun = backend._get_sequence_number_for_group()
                self._extended.append(_Extended(backend, timeout, begun))
                backend._set_default_timeout(timeout + EXTENSION)

    def _put_back(self, boundary: int) -> None:
        self._extended = [extended for extended in self._extended if not extended.put_back()]
        self.back()


def _agreed(question: str, patience: timedelta, *, consent: bool = True) -> bool:
    store = dist.distributed_c10d._get_default_store()
    return agree(store, question, dist.get_world_size() if consent else VETO, patience)


#: A number of ranks that means: this rank refuses, so the answer is no.
VETO = 0


def agree(store: Store, name: str, ranks: int, patience: timedelta) -> bool:
    """Return True if all ranks have called this within their patience. All ranks get the same answer.

    A rank that refuses (``VETO``), or has lost the store, makes the answer no for ranks that have none yet.
    """
    try:
        if ranks and store.add(f"{name}/ranks", 1) == ranks:
            return bool(store.compare_set(name, "", "yes") == b"yes")
        if ranks:
            with suppress(dist.DistStoreError):  # later ranks get the answer no
                store.wait([name], patience)
        return bool(store.compare_set(name, "", "no") == b"yes")
    except dist.DistError:
        return False


def _backends() -> list[Any]:
    """Return the backends of gloo and NCCL here, in the order in which all ranks have made them."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    found: dict[int, Any] = {}
    for group in dist.distributed_c10d._world.pg_map:
        for device in group._device_types:
            outer: Any = group._get_backend(device)
            backend = getattr(outer, "wrapped_pg", outer)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            if backend._get_backend_name() in ("gloo", "nccl"):
                found[id(backend)] = backend
    return list(found.values())


def _communicators(device: Device) -> list[Communicator]:
    """Return NCCL's communicators on ``device``, in all ranks' order, but for those between two ranks."""
    found = [one for one in _backends() if one._get_backend_name() == "nccl"]
    if device.torch_device.type != "cuda" or not found:
        return []  # CUDA may not have begun
    with torch.cuda.device(device.torch_device):
        addresses = [one._comm_ptr() for one in found]
    return [Communicator(address) for address in addresses if address]
