"""What must hold in every world, by what its ranks really do: checked whenever one of them does something."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from .ground import Ground
from .orders import NEVER
from .own_time import OwnTime
from .scenario import JobPlan
from .windows import Closed

if TYPE_CHECKING:
    from .launchers import Command, Run
    from .ranks import RankProcess

#: A rank that is told to stop passes at most so many boundaries before it does.
_STOPS_WITHIN = 60
#: Slow messages to a fast gang take many boundaries. The distance is doubled for each order that comes too
#: late, once more if it was late for another rank, and once more where the rank cannot park.
_PER_LATE = 7


class Safety:
    """Two are never on a device but by packing, nobody is started twice, and no state is dropped.

    Parameters
    ----------
    ground
        The world.
    """

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._plans: dict[str, JobPlan] = {plan.spec.id: plan for plan in ground.scenario.jobs}
        self._runs: dict[tuple[str, int], Run] = {}
        self._ranks: dict[tuple[str, int], list[RankProcess]] = defaultdict(list)
        self._expected: dict[tuple[str, int], int] = {}
        self._steps: Counter[str] = Counter()
        self.closed = Closed(ground.loop, ground.record, ground.orders)
        self.own_time = OwnTime(ground.loop, ground.record)

    def add(self, plan: JobPlan) -> None:
        """Another job is to be submitted."""
        self._plans[plan.spec.id] = plan

    def requeue(self, job: str) -> None:
        """The owner of ``job``, which has ended, wants another attempt: it begins where it is said to."""
        for key in [key for key in self._expected if key[0] == job]:
            del self._expected[key]

    def run(self, job: str, attempt: int, ranks: int) -> Run:
        """Return that attempt of ``job``, which the launchers of all its nodes share."""
        from .launchers import Run

        if (job, attempt) not in self._runs:
            self._runs[job, attempt] = Run(self._ground, self, self._plans[job], attempt, ranks)
        return self._runs[job, attempt]

    def runs_with(self, node: str) -> list[Run]:
        """Return the attempts with a command on ``node``, which may have ended."""
        return [
            run
            for run in self._runs.values()
            if any(one.machine.name == node for one in run.commands.values())
        ]

    def launched(self, command: Command, again: bool) -> None:
        """A node was told to start a command."""
        self._ground.record.note(command.job, command.attempt, "launched", command.machine.name)
        self.own_time.launched(self._plans[command.job])
        if again:
            raise self._violated("an attempt was launched twice on a node", command.job, command.attempt)

    def started(self, process: RankProcess) -> None:
        """A rank has begun: no process of another attempt is that rank, but one that can do nothing.

        It is stopped, or nobody reaches its node and it holds still.
        """
        ours = self._ranks[process.job, process.rank]
        ours[:] = [other for other in ours if other.alive]
        for other in ours:
            still = other.command.frozen or (other.device is None and not other.command.machine.serves)
            if other.attempt != process.attempt and not still:
                raise self._violated("two processes are one rank", process.name, other.name)
        ours.append(process)

    def entered(self, process: RankProcess) -> None:
        """A rank has something on its device from now on."""
        self.closed.entered(process, self._plans[process.job])
        self._entered_array(process)
        shares = self._ground.scenario.shares
        others = [
            other
            for ours in self._ranks.values()
            for other in ours
            if other is not process and other.device == process.device
        ]
        if any(other.job == process.job for other in others):
            raise self._violated("two ranks of a job are on one device", process.name, *others)
        # A job enters beside another on one device only, also if it could have more.
        packs = shares and len({other.job for other in others}) == 1 and not self._is_spread(process)
        if others and not packs:
            raise self._violated(
                "two jobs are on one device", process.name, *(other.name for other in others)
            )
        twins = [
            one
            for one in self._ranks[process.job, process.rank]
            if one is not process and one.device and not one.command.frozen
        ]
        if twins:
            raise self._violated(
                "two processes of one rank train", process.name, *(one.name for one in twins)
            )

    def _entered_array(self, process: RankProcess) -> None:
        """No more jobs of an array than its owner wants have devices, unless they are told to leave.

        What counts is what the scheduler has said: a rank may hear it after the next job has come.
        """
        spec = self._plans[process.job].spec
        if not (spec.array and spec.at_once):
            return
        there = {
            one.job
            for ours in self._ranks.values()
            for one in ours
            if one.plan.spec.array == spec.array and one.device is not None
            if not self._ground.orders.is_to_leave(one.job, one.orders.epoch, one.attempt)
        }
        if len(there) > spec.at_once:
            raise self._violated("too many jobs of an array have devices", process.name, *sorted(there))

    def _is_spread(self, process: RankProcess) -> bool:
        """Return True if other ranks of the process's job have something on a device."""
        return any(
            one is not process and one.device
            for (job, _), ours in self._ranks.items()
            if job == process.job
            for one in ours
        )

    def parked(self, process: RankProcess, boundary: int) -> None:
        """A rank has left its device: between two switches it has passed a boundary."""
        if boundary <= process.parked_at:
            raise self._violated("two switches without a boundary in between", process.name, boundary)
        process.parked_at, process.told_at = boundary, None

    def told_to_stop(self, process: RankProcess, stop_at: int) -> None:
        """A rank has got an order to stop, or one that calls it off."""
        count = process.boundaries.count
        if stop_at >= NEVER:
            process.told_at = None
        elif process.told_at is None:
            process.told_at, process.late_by = count, 0
        elif count >= stop_at:
            process.late_by = count - process.told_at

    def passed(self, process: RankProcess) -> None:
        """A rank has passed a boundary; it is not told to stop again and again where it cannot."""
        self._steps[process.job] += 1
        if not process.connected:
            process.told_at = None  # whatever it answered, nobody may have heard
        within = _STOPS_WITHIN + _PER_LATE * process.late_by
        if process.told_at is not None and process.boundaries.count > process.told_at + within:
            raise self._violated("told to stop it goes on and on", process.name, process.told_at)

    def told_to_end(self, command: Command) -> None:
        """A node was told to end a command: if that is for its next attempt, its state is not to be lost."""
        run = command.run
        key = run.job, run.attempt
        if run.harmed or run.plan.spec.kill_when_late or key in self._expected:
            return
        ranks = [process for one in run.commands.values() for process in one.processes.values()]
        if not any(rank.alive for rank in ranks):
            return  # it has just ended by itself
        if run.plan.spec.relaunch:
            if run.newest > run.start or run.start:
                self._expected[key] = run.newest
            return
        keepers = [rank for rank in ranks if not run.plan.spec.elastic or rank.rank == 0]
        parked = {rank.standing.boundary if rank.alive and rank.standing else 0 for rank in keepers}
        if parked and 0 not in parked:
            self._expected[key] = max(parked)

    def begins(self, run: Run) -> None:
        """The ranks of an attempt are started."""
        self._ground.record.note(run.job, run.attempt, "begins", run.start)
        before = self._runs.get((run.job, run.attempt - 1))
        expected = self._expected.get((run.job, run.attempt - 1))
        if any(one.code is not None for one in run.commands.values()):
            return  # its machine has crashed meanwhile, with the state that was brought there
        if before is not None and expected is not None and not before.harmed and run.start < expected:
            raise self._violated(
                "the only copy of a state was dropped", run.job, run.attempt, run.start, expected
            )

    def newest(self, job: str) -> int:
        """Return the newest boundary that an attempt of ``job`` has passed."""
        return max((run.newest for run in self._runs.values() if run.job == job), default=0)

    def steps(self, job: str) -> int:
        """Return how many boundaries all ranks of ``job`` have passed."""
        return self._steps[job]

    def judged(self, job: str, failed: bool, restarts: int, *, in_time: bool = True) -> None:
        """A job has ended for good: it has not failed unless something has gone wrong.

        A node that does not answer costs a job no restart. The job fails for it only if it had begun there,
        and may not begin anew. ``in_time`` is false if it was ended at its time limit.
        """
        plan, record = self._plans[job], self._ground.record
        runs = [run for run in self._runs.values() if run.job == job]
        if plan.spec.kill_when_late or (job, "not brought") in record.faults:
            return
        faults = sum(run.failed for run in runs)
        lost = not plan.spec.max_restarts and any(run.absent and run.newest > run.start for run in runs)
        if not in_time and not (plan.spec.time_limit_s or job in self.own_time.limited):
            raise self._violated("a job without a time limit was ended at one", job)
        if failed and in_time and not lost and not faults:
            raise self._violated("a job failed though nothing went wrong", job)
        if restarts > faults:
            raise self._violated("a restart was spent on no failure", job, restarts, faults)

    def left_over(self) -> list[str]:
        """Return the ranks that still exist."""
        return [one.name for ours in self._ranks.values() for one in ours if one.alive]

    def _violated(self, what: str, *names: object) -> Exception:
        return self._ground.record.violated(what, *names)
