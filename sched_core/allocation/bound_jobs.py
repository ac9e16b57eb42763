"""The jobs whose state can come back only on the devices that it left."""

from __future__ import annotations

from gpuslice.sched_core.jobs.gang import Gang


class BoundJobs:
    """The suspended jobs that can resume only on the devices that they left.

    They are kept here so that the core need not look at every job after every event.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, Gang] = {}

    def add(self, job: Gang) -> None:
        """Add ``job``, which has parked and can resume only on the devices that it left."""
        self._jobs[job.id] = job

    def away_from_home(self) -> list[Gang]:
        """Return the jobs that are to run by the plan where they cannot resume, in order of arrival."""
        for job in [job for job in self._jobs.values() if job.state.ended or not job.bound]:
            del self._jobs[job.id]
        found = [job for job in self._jobs.values() if job.shown and is_away(job)]
        return sorted(found, key=lambda job: job.number)


def home_placement(job: Gang) -> tuple[int, ...]:
    """Return as many devices as ``job`` is to have, beginning with those that its ranks left last."""
    home = job.home[: len(job.placement)]
    others = [device for device in job.placement if device not in home]
    return (*home, *others[: len(job.placement) - len(home)])


def is_away(job: Gang) -> bool:
    """Return True if ``job`` is to run on devices on which it cannot resume."""
    return job.running and job.placement != home_placement(job) and job.bound
