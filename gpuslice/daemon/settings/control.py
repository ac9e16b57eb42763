"""Changing the settings of a running scheduler: ``gpuslice set``, and the options of the next ``up``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from gpuslice.daemon.device_locks import Locks
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.lifecycle.events import Event, SettingsChanged
from gpuslice.sched_core.live.client_socket import ClientSocket
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.live.status import Overview
from gpuslice.types import DeviceName
from gpuslice.verbs import Settings as Answer

from .present import Settings, fields_of
from .words import change_of, field_of


class Control:
    """The settings of ``scheduler``, and how they are changed.

    Parameters
    ----------
    present
        The settings that hold.
    locks
        The locks of the devices.
    environ
        The variables that every job gets. They follow the devices.

    Attributes
    ----------
    present
        The settings that hold now.
    """

    def __init__(
        self, scheduler: Scheduler, present: Settings, locks: Locks, environ: dict[str, str]
    ) -> None:
        self._scheduler, self._locks, self._environ = scheduler, locks, environ
        self.present = present
        self._follow: Callable[[], object] = lambda: None
        #: Devices that jobs are still to leave before others may have them.
        self._leaving: set[DeviceName] = set()

    def recover(self) -> None:
        """Lock the devices that jobs are still to leave. Call this once the jobs are known."""
        state = self._scheduler.core.state
        left = [
            device
            for device, occupants in zip(state.devices, state.occupants, strict=True)
            if occupants and device not in self.present.setup.devices
        ]
        for device in left:
            with suppress(EnvironmentUnusableError):  # another scheduler has it by now
                self._locks.take([device])
            self._leaving.add(device)

    def start(
        self, overview: Overview, socket: ClientSocket, stated: Sequence[str], warn: Callable[[str], None]
    ) -> None:
        """Take requests of ``socket``, and have it and ``overview`` follow the settings.

        ``stated`` are settings that count over those that were changed while the last scheduler ran. ``warn``
        is told of the others.
        """

        def follow() -> None:
            overview.policy, socket.defaults = self.present.setup.policy, self.present.defaults

        self._follow = follow
        socket.change_settings = self.change
        follow()
        self.change([word for word in stated if field_of(word) in self.present.changed])
        if summary := self.present.summary():
            warn(f"what `gpuslice set` has changed holds: {summary}")

    def change(self, words: Sequence[str]) -> Answer:
        """Change what ``words`` say, each KEY=VALUE: all, or nothing. Return all settings then.

        Raises
        ------
        UsageError
            If one of the changes is impossible.
        EnvironmentUnusableError
            If another scheduler has one of the devices.
        """
        event = change_of(words, self.present)
        if fields_of(event):
            self._apply(event)
        return Answer(settings=self.present.shown())

    def _apply(self, event: SettingsChanged) -> None:
        added = self._added(event)
        self._locks.take(added)
        try:
            self._scheduler.apply_request(event)
        except BaseException:
            for device in added:
                self._locks.release(device)
            raise

    def _added(self, event: SettingsChanged) -> list[DeviceName]:
        """Return the devices that the scheduler does not have yet."""
        there = {*self.present.setup.devices, *self._leaving}
        return [one for one in map(DeviceName.parse, event.devices or ()) if one not in there]

    def see(self, event: Event) -> None:
        """Follow ``event``, which has happened."""
        if isinstance(event, SettingsChanged):
            before = {*self.present.setup.devices, *self._leaving}
            self.present = self.present.after(event)
            self._leaving = before - {*self.present.setup.devices}
            self._environ.update(self.present.setup.environ())
            self._follow()
        state = self._scheduler.core.state
        for device in [one for one in self._leaving if not state.occupants[state.devices.index(one)]]:
            self._leaving.discard(device)
            self._locks.release(device)
