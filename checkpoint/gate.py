"""What stops a process's other threads during a suspend, and what stands in where there are none."""

from __future__ import annotations

import threading
from typing import Protocol

#: Threads of gpuslice's own carry names that begin so; they pass every gate.
OWN_PREFIX = "gpuslice-"


class Gate(Protocol):
    """Stops the process's other threads while the job is parked."""

    @property
    def alone(self) -> bool:
        """Whether no other thread exists that could read the job's memory without calling torch.

        NumPy arrays share memory with tensors, and no gate stops a thread that reads one.
        """
        ...

    def close(self) -> None:
        """Stop them; ``SuspendRefusedError`` names one that cannot be stopped, and then none is."""
        ...

    def open(self) -> None:
        """Let them go on. Does nothing if the gate is open."""
        ...

    def shut(self) -> None:
        """Never let them go on: the state that they would touch is lost."""
        ...


class NoGate:
    """For processes in which nobody else runs torch code."""

    @property
    def alone(self) -> bool:
        others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
        return all(thread.name.startswith(OWN_PREFIX) for thread in others)

    def close(self) -> None:
        """There is nobody to stop."""

    def open(self) -> None:
        """Nobody was stopped."""

    def shut(self) -> None:
        """There is nobody to keep away."""
