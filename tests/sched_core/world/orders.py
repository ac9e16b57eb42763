"""What schedulers have told ranks and nodes, by when. These hear it later, or never."""

from __future__ import annotations

from collections import defaultdict

from .loop import Loop

#: A stop from here on calls the last one off.
NEVER = 2**62


class Orders:
    """See above.

    Parameters
    ----------
    loop
        Virtual time.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._granted_s: dict[tuple[str, int], float] = {}
        #: The devices of each lease, by job and epoch, in order.
        self._leases: dict[str, dict[int, tuple[str, ...]]] = defaultdict(dict)
        #: The epoch of the lease that each job is to leave; the last attempt of each job that is to end.
        self._leaving: dict[str, int] = {}
        self._ending: dict[str, int] = {}

    def grant(self, job: str, epoch: int, devices: tuple[str, ...]) -> None:
        """Note that a rank of ``job`` is told to come to a lease of ``devices``."""
        self._granted_s.setdefault((job, epoch), self._loop.now_s)
        self._leases[job].setdefault(epoch, devices)

    def stop(self, job: str, epoch: int, stop_at: int) -> None:
        """Note that a rank of ``job`` is told to leave its lease, or, by a later order, to stay."""
        if stop_at < NEVER:
            self._leaving[job] = epoch
        else:
            self._leaving.pop(job, None)

    def end(self, job: str, attempt: int) -> None:
        """Note that nodes are told to end all processes of ``job`` up to ``attempt``."""
        self._ending[job] = attempt

    def granted_s(self, job: str, epoch: int) -> float:
        """Return when the first rank of ``job`` was told to come to that lease."""
        return self._granted_s.get((job, epoch), self._loop.now_s)

    def former_lease(self, job: str, epoch: int) -> tuple[str, ...]:
        """Return the devices of the last lease of ``job`` before ``epoch``; empty if there was none."""
        former = [devices for number, devices in self._leases[job].items() if number < epoch]
        return former[-1] if former else ()

    def is_to_leave(self, job: str, epoch: int, attempt: int) -> bool:
        """Return True if ranks of ``job`` with that lease, of that attempt, were told to leave or to end."""
        return epoch <= self._leaving.get(job, -1) or attempt <= self._ending.get(job, -1)
