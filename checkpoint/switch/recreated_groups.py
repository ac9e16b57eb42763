"""Backends of process groups that are shut down while their rank is parked, and made anew when it comes back.

For communicators whose memory NCCL cannot release otherwise. Whoever uses a group holds the ``ProcessGroup``
(DDP's reducer in C++, meshes, FSDP), so that object stays, and only the backend in it is another one.

Torch never replaces the backend of a type in a group, but a group uses, for each kind of device, the backend
that was registered last (``ProcessGroup::setBackend``). So each backend is registered under a number that is
no type of torch's and that the group has not had: a byte, and 192 of them are free for sure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gpuslice.errors import SwitchFailedError
from gpuslice.kernels.nccl import Communicator

#: Of a byte, those that are no types of torch's.
_NUMBERS = range(64, 256)


@dataclass(frozen=True, slots=True)
class GroupBackend:
    """A backend of gloo or NCCL in a process group of this process.

    Attributes
    ----------
    devices
        The kinds of device whose tensors it takes.
    backend
        The one that communicates.
    wrapped
        Whether the group has it inside of another one (``TORCH_DISTRIBUTED_DEBUG=DETAIL``).
    """

    group: Any
    devices: tuple[torch.device, ...]
    backend: Any
    wrapped: bool

    @property
    def nccl(self) -> bool:
        """Whether it is NCCL's."""
        return bool(self.backend._get_backend_name() == "nccl")

    def communicator(self, gpu: torch.device) -> Communicator | None:
        """NCCL's on this GPU; not those between two ranks alone, which torch does not tell."""
        with torch.cuda.device(gpu):
            address = self.backend._comm_ptr()
        return Communicator(address) if address else None

    def obstacle(self) -> str:
        """Why it cannot be made anew, or an empty string."""
        if self.wrapped:
            return "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps its process groups"
        if _unused_type(self.group) is None:
            return "its process groups were made anew as often as torch has room for"
        return ""


def backends() -> list[GroupBackend]:
    """Those that this process has, in the order in which all ranks have made them."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    found: dict[int, GroupBackend] = {}
    for group in dist.distributed_c10d._world.pg_map:
        for device in group._device_types:
            outer: Any = group._get_backend(device)
            backend = getattr(outer, "wrapped_pg", outer)
            if backend._get_backend_name() in ("gloo", "nccl"):
                devices = found[id(backend)].devices if id(backend) in found else ()
                found[id(backend)] = GroupBackend(group, (*devices, device), backend, backend is not outer)
    return list(found.values())


class ShutDown:
    """An NCCL backend that is shut down. All ranks of its group do that, and all come back by `resume`.

    Parameters
    ----------
    whole
        It, with no collective under way.
    generation
        A name that all ranks give this shutdown and no other one.
    device
        This rank's GPU.

    Raises
    ------
    SwitchFailedError
        If NCCL fails; the group is of no use any more.
    """

    def __init__(self, whole: GroupBackend, generation: str, device: torch.device) -> None:
        self._whole, self._generation, self._device = whole, generation, device
        self._connected = whole.communicator(device) is not None
        try:
            whole.backend.shutdown()
        except RuntimeError as error:
            raise self._failure("shut down", error) from error

    def resume(self) -> None:
        """Make it anew: the same ranks, name, options and time limit. Returns when all ranks have met.

        Raises
        ------
        SwitchFailedError
            If NCCL or the store fails; the group is of no use any more.
        """
        group, old = self._whole.group, self._whole.backend
        store_of_group, kind = dist.distributed_c10d._world.pg_map[group][1], _unused_type(group)
        store = dist.distributed_c10d.PrefixStore(f"cuda/{self._generation}/", store_of_group)
        options = old.options
        options.split_from = None  # that one's communicator is gone, too
        try:
            new = dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
            new._set_sequence_number_for_group()
            for device in self._whole.devices:
                group._register_backend(device, kind, new)
            group._set_group_name(group.group_name)  # hands both on to the backend
            group._set_group_desc(group.group_desc)
            if self._connected:
                new.eager_connect_single_device(self._device)
        except (RuntimeError, dist.DistError) as error:
            raise self._failure("made anew", error) from error

    def _failure(self, what: str, error: Exception) -> SwitchFailedError:
        text = " ".join(str(error).split())
        return SwitchFailedError(
            f"process group {self._whole.group.group_name!r} could not be {what}: {text}",
            "end the job's ranks and start the job again from its snapshot",
        )


def _unused_type(group: Any) -> Any:
    """A number of which the group has no backend, or nothing."""
    of_number: Any = dist.ProcessGroup.BackendType
    for kind in map(of_number, _NUMBERS):
        try:
            group._backend_id(kind)
        except RuntimeError:
            return kind
    return None
