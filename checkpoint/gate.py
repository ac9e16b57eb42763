"""The gate that stops a process's other threads during a suspend, and one for processes without any."""

from __future__ import annotations

import threading
from typing import Protocol

#: Names of gpuslice's own threads begin with this. These threads pass every gate.
OWN_PREFIX = "gpuslice-"


class Gate(Protocol):
    """The interface of what stops the process's other threads while the job is parked."""

    @property
    def alone(self) -> bool:
        """True if no other thread could read the job's memory without calling torch.

        NumPy arrays share memory with tensors, and no gate stops a thread that reads an array.
        """
        ...

    def close(self) -> None:
        """Stop the other threads. If one cannot be stopped, none is, and ``SuspendRefusedError`` names it."""
        ...

    def open(self) -> None:
        """Let the other threads run. Does nothing if the gate is open."""
        ...

    def shut(self) -> None:
        """Keep the other threads stopped for ever, because the state that they would touch is lost."""
        ...


class NoGate:
    """A gate for processes in which no other thread runs torch code."""

    @property
    def alone(self) -> bool:
        """True if all other threads are gpuslice's own."""
        others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
        return all(thread.name.startswith(OWN_PREFIX) for thread in others)

    def close(self) -> None:
        """Do nothing: there are no threads to stop."""

    def open(self) -> None:
        """Do nothing: no threads were stopped."""

    def shut(self) -> None:
        """Do nothing: there are no threads to stop."""
