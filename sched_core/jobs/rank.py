"""One process of a job as the live core knows it."""

from __future__ import annotations

from enum import Enum

from gpuslice.wire import Progress, Suspended


class RankPhase(Enum):
    """Where one rank is."""

    ABSENT = "absent"  # has not said Hello
    PARKED = "parked"  # no state on the device
    COMING = "coming"  # told to resume
    ON = "on"  # on the device, training
    LEAVING = "leaving"  # said Bye
    GONE = "gone"  # its process no longer exists


class Rank:
    """One process of a gang.

    Attributes
    ----------
    boundary, step
        The newest it reported: mini-batch boundaries passed, optimizer steps done.
    loss
        The newest training loss that it reported, if any.
    pid
        Its process, as the kernel told the shell; 0 before its Hello.
    stuck, unleased
        Where its script is, if it passes no boundary; what it holds on GPUs without a lease; else empty.
    went_on_from
        The boundary of the snapshot that its process has gone on from; 0 without one.
    bound
        While it is parked: why it can only resume on the device that it left; else empty.
    portable, portable_later
        While it is parked: whether another process can go on from its snapshot; if not, whether one can from
        that of a later boundary.
    """

    __slots__ = (
        "bound",
        "boundary",
        "loss",
        "number",
        "phase",
        "pid",
        "portable",
        "portable_later",
        "step",
        "stuck",
        "unleased",
        "went_on_from",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.phase = RankPhase.ABSENT
        self.boundary = self.went_on_from = 0
        self.loss: float | None = None
        self.pid = 0
        self.step = 0
        self.stuck = self.bound = self.unleased = ""
        self.portable = self.portable_later = False

    def enter(self, pid: int, boundary: int) -> None:
        """Process ``pid`` has this place from now on, parked at ``boundary``."""
        self.phase, self.pid, self.boundary = RankPhase.PARKED, pid, boundary

    def come(self) -> None:
        """It is told to come to its device."""
        self.phase = RankPhase.COMING

    def stay(self) -> None:
        """It could not come, and is parked as before."""
        self.phase = RankPhase.PARKED

    def arrive(self) -> None:
        """It is on its device; what was said of its parked state does not count any more."""
        self.phase, self.bound = RankPhase.ON, ""
        self.portable = self.portable_later = False

    def park(self, message: Suspended) -> None:
        """It has left its device."""
        self.phase, self.stuck, self.bound = RankPhase.PARKED, "", message.bound
        self.portable, self.portable_later = message.restartable, message.restartable_later

    def leave(self) -> None:
        """It has said Bye, or is told to end as if it had."""
        self.phase = RankPhase.LEAVING

    def end(self) -> None:
        """Its process is gone."""
        self.phase = RankPhase.GONE

    def advance(self, boundary: int, step: int) -> None:
        """It has passed so many boundaries and made so many steps, if not more."""
        self.boundary, self.step = max(self.boundary, boundary), max(self.step, step)

    def report(self, message: Progress) -> None:
        """It says how it is."""
        self.loss, self.stuck, self.unleased = message.loss, message.stuck, message.unleased

    def went_on(self, boundary: int) -> None:
        """Its process has gone on from the snapshot of ``boundary``."""
        self.went_on_from = boundary
