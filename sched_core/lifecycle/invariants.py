"""The invariants that must hold between any two events."""

from __future__ import annotations

from gpuslice.errors import InvariantError
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import HOLDING, JobState

from .state import State

#: Phases that the training ranks of a gang may be in together.
_WHOLE = {
    JobState.QUEUED: {RankPhase.PARKED},
    JobState.SUSPENDED: {RankPhase.PARKED},
    JobState.RUNNING: {RankPhase.ON},
}
_ANY = set(RankPhase)


def check(state: State) -> None:
    """Check every invariant of ``state``.

    Raises
    ------
    InvariantError
        For the first invariant that is broken. The message names the job or the device.
    """
    held: dict[str, tuple[int, ...]] = {}
    for number, (device, occupants) in enumerate(zip(state.devices, state.occupants, strict=True)):
        for name in occupants:
            held[name] = (*held.get(name, ()), number)
        # A job that is told to leave has no entry in the ledger; jobs that shared its device still have.
        # So has one whose node is silent: nobody else can have its devices.
        staying = [job for job in occupants.values() if job.lease == job.wanted and not _is_aside(job)]
        if len(occupants) > 1 and not all(state.ledger.shares(job) for job in staying):
            raise InvariantError(f"{device} is held by {', '.join(occupants)} at once")
        asked = sum(job.spec.device_memory_bytes for job in occupants.values())
        if state.device_memory_bytes and asked > state.device_memory_bytes:
            raise InvariantError(f"jobs on {device} ask for {asked} bytes of {state.device_memory_bytes}")
    for job in state.jobs.values():
        _check_job(state, job, held.get(job.id, ()))


def _check_job(state: State, job: Gang, held: tuple[int, ...]) -> None:
    found = job.state
    if held != tuple(sorted(job.lease)):
        raise InvariantError(f"job {job.id} has a lease on {job.lease} but holds {held}")
    nodes = state.nodes.of(job.lease)
    if job.within and len(set(nodes)) > 1:
        raise InvariantError(f"elastic job {job.id} holds {held}, on several nodes")
    if nodes != job.nodes[: len(job.lease)]:
        raise InvariantError(f"job {job.id} holds {held} and has its processes on nodes {job.nodes}")
    either = found.ended or found is JobState.RELAUNCHING
    if not either and bool(job.lease) != (found in HOLDING):
        raise InvariantError(f"job {job.id} is {found.value} and holds {held}")
    if job.processes_gone and (held or (job.command.launched and not found.ended)):
        raise InvariantError(f"job {job.id} has no process left, is {found.value} and holds {held}")
    phases = {rank.phase for rank in job.training()}
    gathers = job.processes.idle_since_s is not None  # the next processes, of which some may be there
    allowed = {RankPhase.PARKED} if gathers else _WHOLE.get(found, _ANY)
    if not phases <= allowed:
        names = sorted(phase.value for phase in phases)
        raise InvariantError(f"job {job.id} is {found.value} but its ranks are {names}")
    if found is JobState.SUSPENDED and len({rank.boundary for rank in job.training()}) > 1:
        raise InvariantError(f"the ranks of job {job.id} are parked at different boundaries")
    aside = found.ended or job.processes.cut_off
    if not aside and not job.may_have(job.wanted):
        raise InvariantError(
            f"job {job.id} is wanted on {job.wanted}, of which {job.closed} are closed to it"
        )
    for device in job.wanted if not aside and not job.borrowed else ():
        if job not in state.ledger.holders(device):
            raise InvariantError(f"job {job.id} is wanted on device {device} but not entered for it")


def _is_aside(job: Gang) -> bool:
    """Return True if ``job`` has ended or its node is silent, so that the ledger does not have the job."""
    return job.state.ended or job.processes.cut_off
