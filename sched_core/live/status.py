"""The status, for people: the core and the job history as the structs that users are answered with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.core.device_verbs import device_info, reservations
from gpuslice.sched_core.core.expected_starts import expected_start
from gpuslice.sched_core.ends.record import NOTIFY, ON_END, Delivery
from gpuslice.sched_core.jobs import places
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.types import shortened
from gpuslice.verbs import (
    ArrayInfo,
    AttemptInfo,
    EndInfo,
    JobInfo,
    NodeInfo,
    SchedulerStatus,
    SliceInfo,
    StartInfo,
)
from gpuslice.wire import MAX_MESSAGE_BYTES

from .blockers import Blockers
from .job_history import Account, Attempt, JobHistory

#: The most jobs in one answer. With the limits that follow, it stays well below the longest message.
JOBS_AT_ONCE = 200
_JOBS_BYTES = MAX_MESSAGE_BYTES // 2
_COMMAND_CHARACTERS = 1000
_PROCESSES_CHARACTERS = 200
_WHY_CHARACTERS = 1000


class Overview:
    """The status of the scheduler, its devices and its jobs, as answers for users.

    Parameters
    ----------
    core, job_history
        The sources of the status.
    policy, pid
        The name of the policy, which may change, and the scheduler's process id.
    """

    def __init__(self, core: Core, job_history: JobHistory, *, policy: str, pid: int) -> None:
        self._core = core
        self._job_history = job_history
        self.policy, self._pid = policy, pid
        #: Returns the nodes.
        self.nodes: Callable[[], tuple[NodeInfo, ...]] = tuple
        #: Returns how far the transfer of a job's state has come; see ``Blockers``.
        self.progress: Callable[[str], tuple[int, int] | None] = lambda job: None

    def status(
        self, after: int, now_s: float, endpoints: tuple[str, ...] = (), *, fold: bool = False
    ) -> SchedulerStatus:
        """Return the status of everything, with the jobs that follow the first ``after``.

        With ``fold`` the jobs of arrays do not count.
        """
        state = self._core.state
        jobs = [job for job in self._core.jobs.values() if not (fold and job.spec.array)]
        return SchedulerStatus(
            pid=self._pid,
            policy=self.policy,
            now_s=now_s,
            devices=tuple(device_info(state, device) for device in state.present),
            jobs=tuple(self._some(jobs[after : after + JOBS_AT_ONCE], now_s)),
            job_count=len(jobs),
            endpoints=endpoints,
            nodes=self.nodes(),
            arrays=() if after else tuple(self._arrays(now_s)),
            reservations=reservations(state),
        )

    def _arrays(self, now_s: float) -> Iterator[ArrayInfo]:
        """Yield each array, in order of submission."""
        place, places, arrays = 0, dict[str, int](), dict[str, list[Gang]]()
        for job in self._core.jobs.values():
            if not job.spec.array:
                place += 1
            else:
                places.setdefault(job.spec.array, place)
                arrays.setdefault(job.spec.array, []).append(job)
        for name, jobs in arrays.items():
            yield ArrayInfo(
                id=name,
                tenant=jobs[0].spec.tenant,
                devices=self._names(tuple(sorted({device for job in jobs for device in job.lease}))),
                executed_s=sum(job.executed_at(_ended_s(job, now_s)) for job in jobs),
                states=dict(Counter(job.state.value for job in jobs)),
                place=places[name],
            )

    def _some(self, jobs: Sequence[Gang], now_s: float) -> Iterator[JobInfo]:
        """Yield the status of as many of ``jobs``, at least one, as fit into an answer."""
        left_bytes = _JOBS_BYTES
        blockers = self._blockers(now_s)
        for job in jobs:
            info = self.job(job, now_s, blockers)
            size_bytes = len(msgspec.msgpack.encode(info))
            if size_bytes > left_bytes < _JOBS_BYTES:
                return
            left_bytes -= size_bytes
            yield info

    def job(self, job: Gang, now_s: float, blockers: Blockers | None = None) -> JobInfo:
        """Return the status of one job. ``blockers`` are those of the moment ``now_s``, if they exist."""
        blockers = blockers or self._blockers(now_s)
        brought = blockers.brought(job)
        account = self._job_history.accounts[job.id]
        then_s = _ended_s(job, now_s)
        executed_s = job.executed_at(then_s)
        delays = self._core.allocation.waits.delays(job, now_s)
        steps = job.steps_so_far
        others = {name: None for device in job.lease for name in self._core.state.occupants[device]}
        copy = self._job_history.copies.newest(job)
        slower = self._core.allocation.throughput.slowdown(job) if len(others) > 1 else None
        return JobInfo(
            id=job.id,
            state=job.state.value,
            held=job.held,
            devices=self._names(job.lease),
            moving_to=self._names(job.requested_devices),
            not_moved=job.relocation.refused or None,
            copy_on=None if copy is None else copy.targets,
            copy_age_s=None if copy is None else now_s - copy.taken_s,
            demand=job.demand,
            tenant=job.spec.tenant,
            weight=job.spec.weight,
            memory_bytes=job.spec.device_memory_bytes or None,
            level=self._core.allocation.planning.level(job),
            steps=steps,
            total_steps=job.spec.steps or None,
            steps_per_s=_steps_per_s(job, steps, executed_s),
            executed_s=executed_s,
            service_s=job.service_at(then_s),
            setup_s=job.setup_at(then_s),
            age_s=then_s - job.spec.submit_s,
            deadline_s=job.spec.last_deadline_s,
            deadline_missed=None if job.spec.last_deadline_s is None else job.deadline_missed,
            guaranteed=job.guaranteed,
            eta_s=_eta_s(job, steps, now_s),
            waited_s=job.without_devices_at(then_s),
            held_s=job.held_at(then_s),
            switching_s=job.switching_at(then_s),
            fair_share_delay_s=delays.fair_share_s,
            fragmentation_delay_s=delays.fragmentation_s,
            slices=account.given,
            suspends=job.preemptions,
            migrations=job.migrations,
            switches=account.switches,
            blackout_s=account.blackout_s + _still_s(job, now_s),
            blackout_mean_s=account.blackout_s / account.switches if account.switches else None,
            recent=self._recent(account),
            switch_predicted_s=job.switch.predicted_s,
            switch_s=job.switch.cost_s,
            skew=job.skew,
            missed_boundaries=job.lateness.missed,
            stuck=_stuck(job),
            unleased=_unleased(job),
            processes=_processes(job),
            trial=_trial(job),
            restarts=job.failures,
            max_restarts=job.spec.max_restarts,
            exit_code=job.command.exit_code,
            failure=job.verdict.failure or None,
            reason=job.verdict.reason,
            why=_why(job, blockers),
            state_arrived_bytes=None if brought is None else brought[0],
            state_bytes=None if brought is None else brought[1],
            command=_shortened(job.program.argv),
            started=job.command.launched,
            shares_with=tuple(name for name in others if name != job.id),
            slowdown=None if slower is None else slower.mean,
            peak_bytes=job.peak_bytes or None,
            slowdown_interval=None if slower is None else (slower.low, slower.high),
            priority=job.spec.priority,
            time_limit_s=job.spec.time_limit_s or None,
            begin_unix_s=job.conditions.begin_unix_s or None,
            after=job.conditions.after,
            most_devices=job.spec.ranks if job.spec.elastic else None,
            array=job.spec.array or None,
            attempts=tuple(map(_attempt, account.attempts)),
            directory=shortened(job.program.directory, _WHY_CHARACTERS),
            at_end=self._at_end(job, now_s),
            start=self._start(job, now_s),
        )

    def _start(self, job: Gang, now_s: float) -> StartInfo | None:
        """Return when ``job``, which waits, is expected to start. Return None if that is not known."""
        found = expected_start(self._core, job, now_s)
        return None if found is None else StartInfo(found.when_s - now_s, found.bound, found.reason)

    def _at_end(self, job: Gang, now_s: float) -> tuple[EndInfo, ...]:
        """Return what is done when ``job`` has ended, and how far that has come."""
        if not (job.spec.on_end or job.spec.notify):
            return ()
        if found := self._job_history.ends.newest(job):
            return tuple(_delivery(one, now_s) for one in found)
        asked = ((ON_END, job.spec.on_end), (NOTIFY, job.spec.notify))
        return tuple(EndInfo(what, "waits", 0, "", None) for what, wanted in asked if wanted)

    def _blockers(self, now_s: float) -> Blockers:
        return Blockers(self._core, now_s, self._job_history.copies, self.progress)

    def _recent(self, account: Account) -> tuple[SliceInfo, ...]:
        return tuple(
            SliceInfo(devices=self._names(one.devices), since_s=one.since_s, until_s=one.until_s)
            for one in account.slices
        )

    def _names(self, devices: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(str(self._core.devices[device]) for device in devices)


def _attempt(one: Attempt) -> AttemptInfo:
    return AttemptInfo(
        number=one.number,
        since_s=one.since_s,
        until_s=one.until_s,
        exit_code=one.exit_code,
        failure=shortened(one.failure, _WHY_CHARACTERS) or None,
    )


def _delivery(one: Delivery, now_s: float) -> EndInfo:
    state = "owed" if one.owed else "given up" if one.error else "done"
    again_s = max(0.0, one.again_s - now_s) if one.owed and one.tries else None
    return EndInfo(one.kind, state, one.tries, shortened(one.error, _WHY_CHARACTERS), again_s)


def _ended_s(job: Gang, now_s: float) -> float:
    """Return when ``job`` ended, or ``now_s`` if it has not."""
    return now_s if job.verdict.ended_s is None else job.verdict.ended_s


def _why(job: Gang, blockers: Blockers) -> str | None:
    """Return why ``job`` does not train, cut to a length for answers of many jobs. None if it trains."""
    said = blockers.why(job)
    return None if said is None else shortened(said, _WHY_CHARACTERS)


def _still_s(job: Gang, now_s: float) -> float:
    """Return for how long ``job`` has stood still by now for a move to other nodes that is under way."""
    left_s = job.relocation.left_s
    return 0.0 if left_s is None or job.state.ended else now_s - left_s


def _unleased(job: Gang) -> str | None:
    """Return what the ranks of ``job`` hold on GPUs that are not theirs. Return None if nothing."""
    found = [rank.unleased for rank in job.there() if rank.unleased]
    return None if job.state.ended or not found else "; ".join(found)


def _stuck(job: Gang) -> str | None:
    """Return why a job cannot be suspended: what trains beside it, or where it passes no boundary."""
    if job.processes.beside and not job.state.ended:
        return shortened(places.obstacle(job), _PROCESSES_CHARACTERS)
    stuck = next((rank for rank in job.there() if rank.stuck), None)
    if stuck is None or job.state.ended:
        return None
    return stuck.stuck if len(job.ranks) == 1 else f"{stuck.stuck} (rank {stuck.number})"


def _processes(job: Gang) -> str | None:
    """Return what is unusual about the processes of a job that has not ended: none, or too many."""
    if job.state.ended or not job.command.launched or job.command.exit_code is not None:
        return None
    if not job.processes.line:
        return None if job.processes.idle_since_s is None else "between two trainings"
    behind = sorted({job.ranks[hello.rank].pid for hello in job.processes.line})
    line = [hello.pid for hello in job.processes.line]
    waiting, first = (", ".join(map(str, pids)) for pids in (line, behind))
    return shortened(f"process {waiting} waits for the end of {first}", _PROCESSES_CHARACTERS)


def _trial(job: Gang) -> str | None:
    """Return the state of a job's trial, such as ``running``; None if the job has no trial."""
    if not job.spec.trial_batches:
        return None
    if job.tried or job.state is JobState.SUCCEEDED:
        return "passed"
    if job.state.ended:
        return str(job.state.value)
    return "running" if job.borrowed else "waiting"


def _steps_per_s(job: Gang, steps: int, executed_s: float) -> float | None:
    """Return the steps per second on the device: of late, if that was measured, else from the beginning."""
    if job.step_time.step_s is not None:
        return 1.0 / job.step_time.step_s
    return steps / executed_s if executed_s > 0 else None


def _eta_s(job: Gang, steps: int, now_s: float) -> float | None:
    """Return in how many seconds a job will have made all its steps, at its pace since its first slice."""
    if job.state.ended or not job.spec.steps or not steps or job.first_start_s is None:
        return None
    steps_per_s = steps / max(now_s - job.first_start_s, 1e-9)
    return max(0, job.spec.steps - steps) / steps_per_s


def _shortened(argv: tuple[str, ...]) -> tuple[str, ...]:
    words: list[str] = []
    left = _COMMAND_CHARACTERS
    for word in argv:
        if len(word) > left:
            return (*words, word[:left] + "...")
        words.append(word)
        left -= len(word)
    return tuple(words)
