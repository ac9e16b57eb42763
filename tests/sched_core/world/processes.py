"""A process as such: it lives, may be stopped, and has a connection to its node that may be cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuslice import wire

from .ground import Ground

if TYPE_CHECKING:
    from .launchers import Command


class Process(ABC):
    """See above.

    Parameters
    ----------
    ground
        The world.
    command
        Who has started it.
    key
        What chance knows it by.

    Attributes
    ----------
    alive, connected
        Whether it exists, and whether somebody hears it.
    up, down
        Its lines to its node and back.
    """

    def __init__(self, ground: Ground, command: Command, key: tuple[object, ...]) -> None:
        self.ground, self.key, self._command = ground, key, command
        self.up, self.down = ground.line(key, "up"), ground.line(key, "down")
        self.alive, self.connected = True, False
        self._cuts = 0
        self._deferred: list[Callable[[], object]] = []

    @abstractmethod
    def connect(self) -> None:
        """Begin a new connection."""

    @abstractmethod
    def obey(self, message: wire.ToAgent) -> None:
        """Do what the scheduler says."""

    @abstractmethod
    def frame(self, message: wire.FromAgent) -> None:
        """Have the node hear ``message``, which has arrived."""

    def say(self, message: wire.FromAgent) -> None:
        """Send ``message``, if there is a connection."""
        if self.connected:
            self.up.send(lambda: self.frame(message))

    def tell(self, frame: bytes) -> None:
        """Take in ``frame``, when it has arrived."""
        if self.connected:
            self.down.send(lambda: self.do(lambda: self.obey(wire.decode_to_agent(frame))))

    def disconnect(self) -> None:
        """Lose what is on its way; what is said from now on reaches nobody."""
        self.connected = False
        self.up.cut()
        self.down.cut()

    def lose_connection(self) -> None:
        """Be cut off for a moment."""
        if self.alive and self.connected:
            self._cuts += 1
            self.disconnect()
            self.after(
                self.ground.draws.between(0.02, 0.6, *self.key, "reconnects", self._cuts), self.connect
            )

    def after(self, delay_s: float, act: Callable[[], object]) -> None:
        """Do ``act`` after ``delay_s``, unless the process has ended by then."""
        self.ground.loop.after(delay_s, lambda: self.do(act))

    def do(self, act: Callable[[], object]) -> None:
        """Do ``act`` now, or when the process runs on that is stopped."""
        if not self.alive:
            return
        if self._command.frozen:
            self._deferred.append(act)
        else:
            act()

    def thaw(self) -> None:
        """Go on with what the process was about to do when it was stopped."""
        deferred, self._deferred = self._deferred, []
        for act in deferred:
            self.do(act)
