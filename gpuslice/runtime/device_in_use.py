"""Knows the device on which a process computes: named by its user, leased, or found by the script's state."""

from __future__ import annotations

import os
from collections.abc import Callable

from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError, SuspendRefusedError
from gpuslice.kernels import Device, open_device
from gpuslice.kernels.cuda import allocator_memory, runtime_calls
from gpuslice.launch.device_choice import HOST, found_device, named_device
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.launch.visible_gpus import VISIBLE, VisibleGpus, hides_all
from gpuslice.types import DeviceName, Route


class DeviceInUse:
    """The device of one rank, opened on first use.

    Parameters
    ----------
    settings
        The settings that the launcher handed down.
    identity
        The rank of this process.
    leaving
        Called before another device takes the place of the present one.

    Attributes
    ----------
    known
        True if the device was named, leased or found. If False, every suspend looks for the script's state.
    gpus
        How this process numbers the scheduler's GPUs. Without a scheduler, the numbers are the same.
    """

    def __init__(self, settings: Settings, identity: RankIdentity, leaving: Callable[[], None]) -> None:
        named = named_device(settings.device, Route(settings.route))
        self.known = named is not None
        self.gpus = VisibleGpus()
        self._settings = settings
        self._leaving = leaving
        self._of_rank_0 = named or HOST
        self._chosen = identity.device(self._of_rank_0)
        self._opened: Device | None = None

    @property
    def device(self) -> Device:
        """The device, opened if it is not open yet."""
        if self._opened is None:
            self._opened = open_device(self._chosen, cpu_slots=self._settings.cpu_slots)
        return self._opened

    @device.setter
    def device(self, device: Device) -> None:
        """Note that the state came back to ``device``."""
        self._opened = device

    @property
    def name(self) -> DeviceName:
        """The name of the device, which is not opened for it."""
        return self._chosen if self._opened is None else self._opened.name

    def set_rank(self, identity: RankIdentity) -> None:
        """Change to the device of rank ``identity``. A device that a scheduler leases stays."""
        if self.known and not self._settings.socket:
            name = identity.device(self._of_rank_0)
            if name != self._chosen:
                self.move_in(name)

    def move_in(self, name: DeviceName | None = None) -> None:
        """Compute on device ``name`` from now on; if it is None, on the device that was chosen before.

        Call this before there is any state to move.
        """
        if name is not None:
            self._settle_on(name)
        # The script already runs on the whole host. Pinning would change its number of threads.
        if self._chosen.index is not None:
            self.device.pin()

    def take_lease(self, name: DeviceName, local_rank: int) -> None:
        """Compute on the scheduler's device ``name`` from now on. Refused if the script has hidden it.

        The first leased GPU becomes the one that the script's names mean (``launch.visible_gpus``).
        """
        self.gpus = _show_first(name, self._settings.visible_gpus, local_rank)
        self.move_in(self.gpus.inside(name))

    def look_for_state(self) -> None:
        """Change to the GPU that the script has begun to use, if no device is known yet."""
        held = None if self.known else allocator_memory.held_by_gpu()
        if held is not None and (found := found_device(*held)) != HOST:
            self._settle_on(found)

    def _settle_on(self, name: DeviceName) -> None:
        self._leaving()
        self.known = True
        self._chosen = name
        self._opened = None


def open_target(name: DeviceName | None, home: Device, cpu_slots: int) -> Device | None:
    """Open and return the device to move to. Return None if ``name`` is None or the ``home`` device's name.

    Raises
    ------
    SuspendRefusedError
        If the device is not there.
    """
    if name is None or name == home.name:
        return None
    try:
        # The slot may have been added to the scheduler's devices since this process was started.
        slots = max(cpu_slots, (name.index or 0) + 1) if cpu_slots else 0
        return open_device(name, cpu_slots=slots)
    except EnvironmentUnusableError as error:
        raise SuspendRefusedError(error.message, error.remedy) from error


def _show_first(leased: DeviceName, all_gpus: str, local_rank: int) -> VisibleGpus:
    """Show the leased GPU to this process where its script looks for it, unless CUDA has begun already.

    Parameters
    ----------
    leased
        The device's name, as the scheduler calls it.
    all_gpus
        The GPUs that the scheduler shows its jobs; empty if it does not know.

    Returns
    -------
    VisibleGpus
        How the process numbers the scheduler's GPUs.
    """
    if leased.kind != "cuda" or not all_gpus:
        return VisibleGpus()
    shown = os.environ.get(VISIBLE)
    if runtime_calls.driver_has_begun():
        return VisibleGpus.as_begun(all_gpus, shown)
    own = all_gpus if shown is None else shown
    if hides_all(own):
        return VisibleGpus()
    gpus = VisibleGpus.for_lease(all_gpus, leased.index or 0, local_rank=local_rank, own=own)
    if gpus.variable:
        runtime_calls.show_gpus(VISIBLE, gpus.variable, hides_all)
    return gpus
