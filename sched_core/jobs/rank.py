"""One process of a job, as the live core knows it."""

from __future__ import annotations

from enum import Enum

from gpuslice.wire import Progress, Suspended


class RankPhase(Enum):
    """The phases of a rank, from before its Hello to the end of its process."""

    ABSENT = "absent"  # has not said Hello
    PARKED = "parked"  # no state on the device
    COMING = "coming"  # told to resume
    ON = "on"  # on the device, training
    LEAVING = "leaving"  # said Bye
    GONE = "gone"  # its process no longer exists


class Rank:
    """One rank of a gang: its process and what the process has reported.

    Attributes
    ----------
    boundary, step
        The newest counts that it reported: mini-batch boundaries passed, optimizer steps made.
    loss
        The newest training loss that it reported, if any.
    pid
        Its process id, as the kernel told the shell; 0 before its Hello.
    stuck, unleased
        Where its script is, if it passes no boundary; what it holds on GPUs without a lease; else empty.
    went_on_from
        The boundary of the snapshot that its process has gone on from; 0 without one.
    bound
        Why it can resume only on the device that it left, while it is parked; else empty.
    portable, portable_later
        True if it is parked and another process can go on from its snapshot; if not, True if another process
        could go on from the snapshot of a later boundary.
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
        """Note that process ``pid`` is this rank from now on, parked at ``boundary``."""
        self.phase, self.pid, self.boundary = RankPhase.PARKED, pid, boundary

    def come(self) -> None:
        """Note that the rank is told to come to its device."""
        self.phase = RankPhase.COMING

    def stay(self) -> None:
        """Note that the rank could not come to its device: it is parked as before."""
        self.phase = RankPhase.PARKED

    def arrive(self) -> None:
        """Note that the rank is on its device. What was said of its parked state does not count any more."""
        self.phase, self.bound = RankPhase.ON, ""
        self.portable = self.portable_later = False

    def park(self, message: Suspended) -> None:
        """Note that the rank has left its device, and what ``message`` says of its parked state."""
        self.phase, self.stuck, self.bound = RankPhase.PARKED, "", message.bound
        self.portable, self.portable_later = message.restartable, message.restartable_later

    def leave(self) -> None:
        """Note that the rank has said Bye, or is told to end as if it had."""
        self.phase = RankPhase.LEAVING

    def end(self) -> None:
        """Note that the rank's process is gone."""
        self.phase = RankPhase.GONE

    def advance(self, boundary: int, step: int) -> None:
        """Raise the boundaries passed to ``boundary`` and the steps made to ``step``, if they are less."""
        self.boundary, self.step = max(self.boundary, boundary), max(self.step, step)

    def report(self, message: Progress) -> None:
        """Take over what the rank says of its loss, and of why it is stuck or uses a GPU without a lease."""
        self.loss, self.stuck, self.unleased = message.loss, message.stuck, message.unleased

    def went_on(self, boundary: int) -> None:
        """Note that the rank's process has gone on from the snapshot of ``boundary``."""
        self.went_on_from = boundary
