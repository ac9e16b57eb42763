"""What switching costs: learnt from the ranks' reports, predicted for the next switch.

A switch is a suspend and the resume that follows. Its cost is a fixed part and a part in proportion to the
bytes that move, in both directions; both are learnt from the stages that ranks report, newer ones counting
more. Waiting for a boundary is not part of it: the job makes progress meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuslice.wire import Resumed, Suspended

from .events import Notice
from .gang import Gang

#: How much of what was learnt before is kept when something new is.
_MEMORY = 0.8
#: Stages that take longer the more bytes there are.
_MOVING = frozenset({"copy_out_s", "publish_s", "reserve_s", "verify_s", "copy_in_s"})
#: Stage of a resume that is somebody else's time.
_PARKED = "parked_s"


class Line:
    """A cost that is a fixed part and a part in proportion to bytes."""

    __slots__ = ("_bytes", "_fixed_s", "_moving_s", "_weight")

    def __init__(self) -> None:
        self._weight = 0.0
        self._fixed_s = 0.0
        self._bytes = 0.0
        self._moving_s = 0.0

    def learn(self, nbytes: int, stages_s: Mapping[str, float]) -> None:
        """Take a measurement in."""
        moving_s = sum(seconds for name, seconds in stages_s.items() if name in _MOVING)
        self._weight = self._weight * _MEMORY + 1.0
        self._fixed_s += (sum(costs_s(stages_s).values()) - moving_s - self._fixed_s) / self._weight
        self._bytes = self._bytes * _MEMORY + nbytes
        self._moving_s = self._moving_s * _MEMORY + moving_s

    def predict_s(self, nbytes: int) -> float:
        """The cost of ``nbytes``, in seconds."""
        return self._fixed_s + (nbytes * self._moving_s / self._bytes if self._bytes else 0.0)


class Switching:
    """The cost model of one scheduler.

    Parameters
    ----------
    share
        Part of the time that switching may take at most; 0: no matter.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._out, self._in = Line(), Line()
        #: Bytes of each rank when it was suspended last, by job; unfinished jobs only.
        self._bytes: dict[str, dict[int, int]] = {}
        #: The most that any rank moves; ``None``: to be looked up again.
        self._most: int | None = 0
        #: The present switch of each job: seconds by rank.
        self._present: dict[str, dict[int, float]] = {}

    def predict_s(self, job: Gang) -> float | None:
        """The cost of suspending and resuming ``job``; ``None`` before it was suspended once."""
        sizes = self._bytes.get(job.id)
        return None if sizes is None else self._cost_s(max(sizes.values()))

    def least_slice_s(self) -> float:
        """How long a slice must last for switching to stay below its share, whoever is switched."""
        if not self._share or not self._bytes:
            return 0.0
        if self._most is None:
            self._most = max(max(sizes.values()) for sizes in self._bytes.values())
        return self._cost_s(self._most) / self._share

    def begun(self, job: Gang) -> None:
        """``job`` is told to stop."""
        job.switch_predicted_s = self.predict_s(job)
        self._present[job.id] = {}

    def parked(self, job: Gang, rank: int, message: Suspended) -> None:
        """A rank has been suspended."""
        self._out.learn(message.nbytes, message.stages_s)
        sizes = self._bytes.setdefault(job.id, {})
        if self._most is not None and (message.nbytes >= self._most or sizes.get(rank) == self._most):
            self._most = message.nbytes if message.nbytes >= self._most else None
        sizes[rank] = message.nbytes
        self._add(job, rank, message.stages_s)

    def resumed(self, job: Gang, rank: int, message: Resumed) -> None:
        """A rank is back on its device; one that had nothing to bring back teaches nothing."""
        if message.stages_s:
            self._in.learn(self._bytes.get(job.id, {}).get(rank, 0), message.stages_s)
            self._add(job, rank, message.stages_s)

    def ended(self, job: Gang) -> Notice | None:
        """``job`` runs again; what to say of its switch, if it was one."""
        seconds = self._present.pop(job.id, None)
        if not seconds:
            return None
        job.switch_s = max(seconds.values())
        details = {
            "predicted_s": job.switch_predicted_s,
            "actual_s": job.switch_s,
            "bytes": sum(self._bytes.get(job.id, {}).values()),
        }
        return Notice("switched", job.id, details)

    def forget(self, job: Gang) -> None:
        """``job`` has no state any more."""
        if self._most in self._bytes.pop(job.id, {}).values():
            self._most = None
        self._present.pop(job.id, None)

    def _add(self, job: Gang, rank: int, stages_s: Mapping[str, float]) -> None:
        seconds = self._present.setdefault(job.id, {})
        seconds[rank] = seconds.get(rank, 0.0) + sum(costs_s(stages_s).values())

    def _cost_s(self, nbytes: int) -> float:
        return self._out.predict_s(nbytes) + self._in.predict_s(nbytes)


def costs_s(stages_s: Mapping[str, float]) -> dict[str, float]:
    """Of the stages of half a switch those that cost the job time, in seconds."""
    return {name: seconds for name, seconds in stages_s.items() if name != _PARKED}
