"""Who is where while moves are looked for, and what it costs to have which device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.closest import Price
from gpuslice.sched_core.policy import Decision, Migrate, Start, View

#: A switch that nobody has measured yet is taken to cost as much as one in Tiresias' testbed.
_UNKNOWN_S = 62.0


class Board:
    """The devices of all jobs after a plan, and the jobs that may be moved."""

    def __init__(self, view: View, decisions: Iterable[Decision], movable: Iterable[Job]) -> None:
        self._holders: dict[int, list[str]] = {}
        places = {job.id: job.placement for job in view.running()}
        for decision in decisions:
            if isinstance(decision, Start | Migrate):
                places[decision.job] = tuple(decision.devices)
            else:
                places.pop(decision.job, None)
        for name, devices in places.items():
            for device in devices:
                self._holders.setdefault(device, []).append(name)
        free = FreeDevices.besides(view.cluster, self._holders)
        self._free = {device for devices in free.on_node for device in devices}
        #: Jobs of one device that nobody shares it with, by device.
        self._singles: dict[int, Job] = {
            job.placement[0]: job
            for job in movable
            if len(job.placement) == 1 and len(self._holders[job.placement[0]]) == 1
        }

    def prices(self, gang: Job, view: View) -> dict[int, Price]:
        """Return the cost of each device that ``gang`` could have: its own, free ones, single jobs'."""
        found: dict[int, Price] = dict.fromkeys(self._free, (0.0, 1))
        for device, job in self._singles.items():
            found[device] = (switch_s(job, gang.placement[:1], view), 2)
        return found | dict.fromkeys(gang.placement, (0.0, 0))

    def places(self, gang: Job, devices: Sequence[int]) -> dict[Job, tuple[int, ...]]:
        """Return the new devices of all jobs that move if ``gang`` gets ``devices``.

        Its ranks stay where they can.
        """
        wanted = set(devices)
        left = [device for device in gang.placement if device not in wanted]
        new = iter([device for device in devices if device not in gang.placement])
        places = {gang: tuple(device if device in wanted else next(new) for device in gang.placement)}
        singles = [self._singles[device] for device in devices if device in self._singles]
        return places | {job: (device,) for job, device in zip(singles, left, strict=False)}

    def move(self, places: Mapping[Job, tuple[int, ...]]) -> None:
        """Record that jobs move to ``places``. No job moves twice."""
        self._free |= {device for job in places for device in job.placement}
        for job, devices in places.items():
            self._free -= set(devices)
            self._singles.pop(job.placement[0], None)


def switch_s(job: Job, devices: Sequence[int], view: View) -> float:
    """Return the seconds that a move to ``devices`` costs ``job``."""
    seconds = view.switch_s(job, devices)
    return _UNKNOWN_S if seconds is None else seconds
