"""The next step of a job towards the devices that it is to have, or what the job waits for.

Rules
-----
- A step under way is carried through. A job that was told to stop parks, even if it could stay by now.
- Leaving never waits for entering. A job enters once all jobs that do not share its devices have left them.
- A job whose command was started for another number of devices, or on another node, parks first. Then its
  processes are ended and others are started.
- A job that goes to another node trains on until its process there has started, if that can be started ahead.
- A refused suspend or resume is tried again when its pause is over.
- A job that is to be moved to other processes again and again before it has trained waits ever longer. So it
  trains where its processes are as soon as its devices are there.
- A job whose node is silent takes no step: what it is told cannot arrive, and it may have no node to go to.
- ``next_step`` changes nothing. The core calls it again after each step, until it returns ``Waits``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Protocol

from gpuslice.sched_core.jobs.facts import Keep
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import IN_TRANSIT, JobState, Trigger

#: The most steps of one job at one moment, for example to give up its devices and to enter others.
MOST_STEPS = 4


class Step(Enum):
    """A step that can be taken with a job."""

    STOP = "stop"  # all ranks at one boundary
    KEEP = "keep"  # its devices, in the plan too: processes that train beside its rank keep it from stopping
    GIVE_UP = "give up"  # its devices, on which it has no process
    RELAUNCH = "relaunch"  # for another number of devices
    RELOCATE = "relocate"  # its processes to the nodes of its devices
    ENTER = "enter"  # its devices
    STOP_LATER = "stop later"  # ranks that parked too early train on to the common boundary
    PUT_AWAY = "put away"  # end its processes, to start others when it is not kept any more
    COME_AGAIN = "come again"  # tell ranks whose resume was refused to resume once more
    START_AHEAD = "start ahead"  # its next process, on the node that it goes to
    GIVE_UP_AHEAD = "give up ahead"  # the process that was started on a node that it does not go to


class For(Enum):
    """The things that a job can wait for."""

    NOTHING = "nothing"  # the job is where it is to be, or has ended
    MOMENT = "a moment"
    PLAN = "devices of the plan"
    RANKS = "its ranks"
    DEVICE = "a device"
    NODE = "the node of its state, or of its processes"


@dataclass(frozen=True, slots=True)
class Waits:
    """Why a job takes no step.

    Attributes
    ----------
    on
        What the job waits for.
    until_s
        When the job is looked at again at the latest. Infinite if only an event can change the answer.
    reason
        A sentence without a subject: "waits for ...".
    device, other
        The device that the job waits for, and the other job that is still on the device.
    """

    on: For
    until_s: float = inf
    reason: str = ""
    device: int | None = None
    other: Gang | None = None


class World(Protocol):
    """What ``next_step`` asks about other jobs and about nodes."""

    def blocker(self, job: Gang) -> tuple[int, Gang] | None:
        """Return a device of ``job.wanted`` and a job that must leave it first. None if there is none."""
        ...

    def misplaced(self, job: Gang) -> bool:
        """Return True if ``job`` should have devices on nodes where it has no processes."""
        ...

    def can_leave(self, job: Gang) -> bool:
        """Return True if new processes on another node could continue ``job`` from its state now."""
        ...

    def is_awaiting(self, job: Gang) -> bool:
        """Return True if ``job`` cannot go on without a node that does not answer."""
        ...

    def is_to_start_ahead(self, job: Gang) -> bool:
        """Return True if the next process of ``job``, which is to leave, is to be started before."""
        ...

    def is_ahead_in_vain(self, job: Gang) -> bool:
        """Return True if ``job`` does not go to the node where a process of it was started ahead."""
        ...


_SETTLED = Waits(For.NOTHING)


def next_step(job: Gang, world: World, now: float) -> Step | Waits:
    """Return the step that ``job`` takes now, or what it waits for.

    Parameters
    ----------
    job
        The job, with the facts known of it. ``job.wanted`` are the devices that it is to have.
    world
        The other jobs and the nodes.
    """
    if job.state.ended:
        return _SETTLED
    if job.relocation.ahead is not None and world.is_ahead_in_vain(job):
        return Step.GIVE_UP_AHEAD
    if world.is_awaiting(job):
        return Waits(For.NODE, reason="waits for a node that is silent")
    if job.relocating and job.lease:
        return _ranks("waits for its processes to end, to go on without its node")
    if job.processes.idle_since_s is not None and job.lease and job.lease != job.wanted:
        return Step.GIVE_UP
    if job.keep is Keep.END and job.state in (JobState.QUEUED, JobState.SUSPENDED):
        return _put_away(job)
    if now < job.not_before_s:
        return Waits(For.MOMENT, job.not_before_s, "waits for its next attempt")
    if job.state is JobState.RUNNING and job.lease != job.wanted:
        return _leave(job, world, now)
    if job.needs_relaunch and job.command.launched and job.allows(Trigger.RELAUNCH):
        return _relaunch(job, now)
    if job.state in (JobState.QUEUED, JobState.SUSPENDED):
        return _enter(job, world, now)
    if job.state in IN_TRANSIT:
        return _go_on(job, now)
    return _SETTLED if job.state is JobState.RUNNING else _ranks("waits for its processes to end")


def _put_away(job: Gang) -> Step | Waits:
    """Return the next step of a parked job whose processes are to end, or what the job waits for."""
    if job.relocating or not job.command.runs:
        return _ranks("waits for its processes to end")
    return Step.PUT_AWAY


def _leave(job: Gang, world: World, now: float) -> Step | Waits:
    """Return the next step of a job that trains on devices it must leave, or what the job waits for."""
    refused = job.refusals.suspend
    if refused.pauses(now):
        return Waits(For.MOMENT, refused.until_s, "waits to be told again to stop")
    if job.processes.beside:
        return Step.KEEP
    if world.is_to_start_ahead(job):
        return Step.START_AHEAD
    if job.relocation.ahead is not None and now < job.relocation.trains_until_s:
        return Waits(For.MOMENT, job.relocation.trains_until_s, "trains until its next process has started")
    return Step.STOP


def _relaunch(job: Gang, now: float) -> Step | Waits:
    """Return the step of a job that needs another number of processes, or what the job waits for."""
    if job.state is JobState.SUSPENDING:
        return _ranks("parks, to be started anew")
    if now < job.relocation.again_s:
        return Waits(For.MOMENT, job.relocation.again_s, "waits to be started anew: it has not trained since")
    return Step.RELAUNCH


def _enter(job: Gang, world: World, now: float) -> Step | Waits:
    """Return the next step of a job without devices (enter or relocate), or what the job waits for."""
    if not job.wanted:
        return Waits(For.PLAN, reason="waits for devices")
    if job.relocating:
        return _ranks("waits for its processes to end")
    if not job.training() or not job.ready:
        return _ranks("waits for its processes")
    if (blocker := world.blocker(job)) is not None:
        device, other = blocker
        return Waits(For.DEVICE, reason=f"waits for job {other.id} to leave", device=device, other=other)
    if not world.misplaced(job):
        return Step.ENTER
    if not world.can_leave(job):
        return Waits(For.NODE, reason="waits for devices where its state is")
    if now < job.relocation.again_s:
        return Waits(For.MOMENT, job.relocation.again_s, "waits to change its node: it has not trained since")
    return Step.RELOCATE


def _go_on(job: Gang, now: float) -> Step | Waits:
    """Return the next step of a job whose ranks are entering or parking, or what the job waits for."""
    refused, parked = job.refusals.resume, job.present(RankPhase.PARKED)
    if refused.pauses(now):
        return Waits(For.MOMENT, refused.until_s, "waits to be told again to come")
    if job.processes.idle_since_s is not None or not parked:
        return _ranks("waits for its ranks")
    if job.state is not JobState.SUSPENDING:
        return Step.COME_AGAIN
    early = any(rank.boundary < job.asked.stop_at for rank in parked)
    return Step.STOP_LATER if early else _ranks("waits for its ranks to park")


def _ranks(reason: str) -> Waits:
    return Waits(For.RANKS, reason=reason)
