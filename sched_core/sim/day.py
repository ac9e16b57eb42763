"""Simulations of what people do in a day: the live core decides, over ranks that do as they are told at once.

Jobs that wait for a moment, their owner or other jobs, that have time limits, priorities or places in an
array, and devices that are reserved, paused or drained: the core of the live scheduler decides on all of
that, under any policy. Its ranks reach a boundary as soon as they are told to stop, lose what ``SwitchCost``
says when they come back, and end when their work is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf, isnan

import msgspec

from gpuslice import wire
from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Bring,
    Brought,
    Clocked,
    Command,
    Compute,
    Computed,
    Drained,
    Event,
    Exited,
    FindPort,
    Kill,
    Launch,
    Notice,
    Paused,
    PortFound,
    RankGone,
    Released,
    Reported,
    Reserved,
    Submitted,
    Tell,
    Undrained,
    WakeAt,
    Woken,
)
from gpuslice.sched_core.policy import Policy, PolicyError
from gpuslice.sched_core.switch_cost_model import SWITCH_SHARE
from gpuslice.sched_core.traces.day import Window
from gpuslice.sched_core.traces.trace import Trace
from gpuslice.types import DeviceName

from .engine import Progress, Simulation
from .ideal_ranks import Ranks
from .interrupts import Interrupts
from .model import SpeedModel, SwitchCost

_PROGRAM = Program(("job",), "/")
_PORT = 1024
#: A stop from here on calls the last one off.
_NEVER = 2**62
#: How often the core may be woken in a row while nothing runs and nothing is to come; and how much may
#: happen at one moment, besides arrivals.
_PATIENCE = 2_000
_PROGRESS_EVERY = 256
#: Of what happens at one instant, completions come first, then what was put off, then arrivals.
_COMPLETES, _PUT_OFF, _ARRIVES, _WAKES = range(4)


class Day(Simulation):
    """A trace on a cluster under a policy, with conditions of jobs and with closed devices.

    The cluster is one node.

    Parameters
    ----------
    trace, cluster, policy, speed, cost, keep_spans, switch_share
        As of ``Simulation``.
    windows
        When devices are reserved, paused or drained.
    """

    def __init__(
        self,
        trace: Trace,
        cluster: Cluster,
        policy: Policy,
        *,
        speed: SpeedModel | None = None,
        cost: SwitchCost | None = None,
        keep_spans: bool = False,
        switch_share: float = SWITCH_SHARE,
        windows: Sequence[Window] = (),
    ) -> None:
        super().__init__(
            trace, cluster, policy, speed=speed, cost=cost, keep_spans=keep_spans, switch_share=switch_share
        )
        self._windows = windows
        names = [
            DeviceName("sim", index).on(f"n{node}" if node else "")
            for node, size in enumerate(cluster.node_sizes)
            for index in range(size)
        ]
        self._core = Core(names, policy, switch_share=switch_share)
        # What the trace says of durations does not change with time.
        self._core.allocation.planning.asks_again_s = inf
        self._ranks: dict[str, Ranks] = {}
        self._heap: list[tuple[float, int, int, Callable[[], object]]] = []
        self._order, self._next_pid, self._wakes = count(), count(1), 0
        self._queue: deque[Event] = deque()
        self._unfinished: dict[str, None] = {}
        self._idle_wakes = 0

    def _loop(self, interrupts: Interrupts, progress: Progress | None) -> None:
        self._begin()
        total, handled, here = len(self.trace), 0, 0
        while (self._unfinished or len(self._ranks) < total) and not interrupts.came:
            if not self._heap or self._idle_wakes > _PATIENCE:
                raise self._never()
            when_s, _, _, act = heappop(self._heap)
            here = here + 1 if when_s == self._now_s else 0
            if here > _PATIENCE + total:
                raise self._restless()
            self._pass_time(when_s)
            act()
            self._settle_events()
            handled += 1
            if progress is not None and not handled % _PROGRESS_EVERY:
                progress(len(self._ranks) - len(self._unfinished), total)
        self.outcome.events = handled

    def _begin(self) -> None:
        """Put off all arrivals and everything about devices."""
        first_s = self.trace.submit_s[0]
        self._happens(Clocked(self._now_s))
        names = [str(device) for device in self._core.devices]
        for number, window in enumerate(self._windows):
            devices = tuple(names[device] for device in window.devices)
            begin_s = max(window.begin_s, first_s)
            if window.end_s <= first_s:
                continue
            event: Event
            if window.what == "reserve":
                event = Reserved(f"r{number + 1}", devices, begin_s, begin_s, window.end_s, window.user)
            elif window.what == "pause":
                event = Paused(devices, begin_s, window.end_s)
            else:
                event = Drained(devices)
                self._at(window.end_s, _PUT_OFF, self._event(Undrained(devices)))
            self._at(begin_s, _PUT_OFF, self._event(event))
        for number, submit_s in enumerate(self.trace.submit_s):
            self._at(submit_s, _ARRIVES, partial(self._submit, number))
        self._settle_events()

    def _pass_time(self, now_s: float) -> None:
        if now_s > self._now_s:
            self._job_s += (now_s - self._now_s) * len(self._unfinished)
            self._now_s = now_s

    def _at(self, when_s: float, rank: int, act: Callable[[], object]) -> None:
        heappush(self._heap, (max(when_s, self._now_s), rank, next(self._order), act))

    def _event(self, event: Event) -> Callable[[], None]:
        return lambda: self._happens(event)

    def _happens(self, event: Event) -> None:
        self._queue.append(event)

    def _submit(self, number: int) -> None:
        spec = self.trace.spec(number)
        held_until_s = self.trace.hold_until_s[number] if self.trace.hold_until_s else 0.0
        changes: dict[str, object] = {"max_restarts": 0, "boundary_timeout_s": 0.0}
        if self.policy.needs_durations and not spec.expected_s:
            changes["expected_s"] = self.trace.duration_s[number]
        if held_until_s > self._now_s:
            changes["hold"] = True
            self._at(held_until_s, _PUT_OFF, lambda: self._let_start(spec))
        ranks = self._ranks[spec.id] = Ranks(number)
        ranks.born_job_s = self._job_s
        self._unfinished[spec.id] = None
        self._happens(Submitted(msgspec.structs.replace(spec, **changes), _PROGRAM))

    def _let_start(self, spec: JobSpec) -> None:
        if not self._core.jobs[spec.id].state.ended:
            self._happens(Released(spec.id))

    # The core, and what it orders.

    def _settle_events(self) -> None:
        """Tell the core all that has happened, and do what it says, until nothing more happens now."""
        while self._queue:
            event = self._queue.popleft()
            commands = self._core.handle(event, self._now_s)
            named = {str(getattr(event, "job", "")), *(self._perform(command) for command in commands)}
            for job in named & self._unfinished.keys():
                self._note_end(job)

    def _perform(self, command: Command) -> str:
        """Carry out ``command``. Return the job that it is about; empty if it is about none."""
        match command:
            case Launch():
                self._launch(command)
            case Tell():
                self._tell(command)
            case Kill():
                self._kill(command)
            case Bring():
                self._happens(Brought(command.job, command.attempt))
            case FindPort():
                self._happens(PortFound(command.job, command.attempt, _PORT))
            case Compute():
                self._happens(Computed(command.number, answer=command.task.compute()))
            case WakeAt():
                self._wake_at(command.when_s)
            case Notice():
                if command.what == "policy_failed":
                    raise PolicyError(str(command.details["error"]))
        return str(getattr(command, "job", ""))

    def _wake_at(self, when_s: float | None) -> None:
        self._wakes += 1
        if when_s is not None:
            number = self._wakes
            self._at(when_s, _WAKES, lambda: self._wake(number))

    def _wake(self, number: int) -> None:
        if number == self._wakes:
            busy = any(one.on for one in self._ranks.values()) if self._idle_wakes else False
            self._idle_wakes = 0 if busy else self._idle_wakes + 1
            self._happens(Woken())

    def _launch(self, command: Launch) -> None:
        ranks, job = self._ranks[command.job], self._core.jobs[command.job]
        ranks.attempt, ranks.epoch = command.attempt, 0
        ranks.pids = {rank: next(self._next_pid) for rank in range(len(job.ranks))}
        for rank, pid in ranks.pids.items():
            hello = wire.Hello(
                version=wire.PROTOCOL_VERSION,
                job=job.id,
                rank=rank,
                world_size=len(ranks.pids),
                pid=pid,
                attempt=command.attempt,
            )
            self._happens(Reported(job.id, rank, hello))

    def _tell(self, command: Tell) -> None:
        ranks = self._ranks[command.job]
        match command.message:
            case wire.Resume() as order if order.epoch > ranks.epoch:
                self._come(self._core.jobs[command.job], ranks, order)
            case wire.Suspend() as order if order.epoch == ranks.epoch and order.stop_at < _NEVER:
                ranks.stop_at = max(order.stop_at, ranks.stop_at or 0)
                if ranks.since_s < inf:
                    self._put_off(ranks, lambda: self._park(command.job, ranks))
            case wire.Suspend() as order if order.epoch == ranks.epoch:
                ranks.stop_at = None
            case wire.Dismiss():
                self._gone(command.job, ranks, (command.rank,))
                if not ranks.pids:
                    self._happens(Exited(command.job, 0, attempt=ranks.attempt))
            case _:
                pass

    def _put_off(self, ranks: Ranks, act: Callable[[], object]) -> None:
        """Do ``act`` once all ranks have been told the same, unless something else happens to the job."""
        ranks.edition += 1
        self._at(self._now_s, _COMPLETES, _unless_void(ranks, act))

    def _come(self, job: Gang, ranks: Ranks, order: wire.Resume) -> None:
        """The ranks of ``job`` are told to come to their devices: they train once they are there."""
        first = isnan(self.outcome.first_start_s[ranks.number])
        if first:
            self.outcome.first_start_s[ranks.number] = self._now_s
        resume_s = 0.0 if first else self.cost.resume_s(job)
        devices = job.lease
        ranks.migrations += bool(ranks.devices) and set(devices) != set(ranks.devices)
        ranks.epoch, ranks.stop_at, ranks.width = order.epoch, None, order.width or len(ranks.pids)
        ranks.devices, ranks.holds, ranks.granted_s = devices, True, self._now_s
        ranks.edition += 1
        self._at(self._now_s + resume_s, _PUT_OFF, _unless_void(ranks, lambda: self._train(job, ranks)))

    def _train(self, job: Gang, ranks: Ranks) -> None:
        """The ranks are on their devices, and train from now on."""
        resume_s = self._now_s - ranks.granted_s
        ranks.switching_s += resume_s
        ranks.lost_s += resume_s * len(ranks.devices)
        members = range(ranks.width)
        ranks.on = set(members)
        for rank in members:
            resumed = wire.Resumed(epoch=ranks.epoch, boundary=ranks.boundary, stages_s={})
            self._happens(Reported(job.id, rank, resumed))
        ranks.boundary += 1
        for rank in members:
            beat = wire.Progress(epoch=ranks.epoch, boundary=ranks.boundary, step=ranks.boundary)
            self._happens(Reported(job.id, rank, beat))
        ranks.since_s, ranks.rate = self._now_s, self.speed.rate(job, (), self.cluster)
        left_s = (self.trace.duration_s[ranks.number] - ranks.progress_s) / ranks.rate
        ends = _unless_void(ranks, lambda: self._complete_job(job.id, ranks))
        self._at(self._now_s + max(0.0, left_s), _COMPLETES, ends)
        if ranks.stop_at is not None:
            self._put_off(ranks, lambda: self._park(job.id, ranks))

    def _park(self, job: str, ranks: Ranks) -> None:
        members, stop_at = sorted(ranks.on), max(ranks.stop_at or 0, ranks.boundary)
        self._leave(ranks)
        ranks.preemptions += 1
        ranks.boundary, ranks.stop_at = stop_at, None
        for rank in members:
            parked = wire.Suspended(
                epoch=ranks.epoch, boundary=stop_at, step=stop_at, nbytes=1, stages_s={}, restartable=True
            )
            self._happens(Reported(job, rank, parked))

    def _complete_job(self, job: str, ranks: Ranks) -> None:
        """The work of ``job`` is done."""
        members = sorted(ranks.on)
        self._leave(ranks)
        failed = self.trace.failed(ranks.number)
        for rank in members if not failed else ():
            bye = wire.Bye(epoch=ranks.epoch, boundary=ranks.boundary, step=ranks.boundary)
            self._happens(Reported(job, rank, bye))
        self._gone(job, ranks, ranks.pids.keys() if failed else members)
        if not ranks.pids:
            self._happens(Exited(job, int(failed), attempt=ranks.attempt))

    def _kill(self, command: Kill) -> None:
        ranks = self._ranks[command.job]
        if command.attempt == ranks.attempt and ranks.pids:
            self._leave(ranks)
            self._gone(command.job, ranks, ranks.pids.keys())
            self._happens(Exited(command.job, -15, attempt=ranks.attempt))

    def _gone(self, job: str, ranks: Ranks, gone: Iterable[int]) -> None:
        for rank in [rank for rank in gone if rank in ranks.pids]:
            self._happens(RankGone(job, rank, pid=ranks.pids.pop(rank), attempt=ranks.attempt))

    def _leave(self, ranks: Ranks) -> None:
        if ranks.holds and self.keep_spans:
            self.outcome.spans.add(ranks.number, ranks.granted_s, self._now_s, ranks.devices)
        ranks.leave(self._now_s)

    # What is known at the end.

    def _note_end(self, name: str) -> None:
        job, ranks = self._core.jobs.get(name), self._ranks[name]
        if job is None or not job.over:
            return
        del self._unfinished[name]
        number, outcome = ranks.number, self.outcome
        outcome.finish_s[number] = self._now_s
        done = job.state is JobState.SUCCEEDED or (self.trace.failed(number) and job.command.exit_code == 1)
        outcome.stopped[number] = not done
        life_s = self._now_s - self.trace.submit_s[number]
        crowd = (self._job_s - ranks.born_job_s) / life_s if life_s > 0 else len(self._unfinished) + 1
        outcome.contention[number] = crowd
        self._note_ranks(job, ranks)

    def _note_ranks(self, job: Gang, ranks: Ranks) -> None:
        outcome, number = self.outcome, ranks.number
        outcome.preemptions[number], outcome.migrations[number] = ranks.preemptions, ranks.migrations
        outcome.executed_s[number] = ranks.executed_s
        outcome.service_s[number] = ranks.progress_s * self.trace.demand[number]
        outcome.fair_share_s[number], outcome.fragmented_s[number] = job.fair_share_s, job.fragmentation_s
        outcome.busy_s[number], outcome.lost_s[number] = ranks.busy_s, ranks.lost_s
        outcome.switching_s[number] = ranks.switching_s

    def _restless(self) -> PolicyError:
        names = sorted(name for name in self._unfinished if self._ranks[name].holds)[:5]
        return PolicyError(
            f"policy {self.policy.name} suspends and resumes jobs without end at {self._now_s:g}; the devices"
            f" are with {', '.join(names) or 'none'} now",
            "simulate another policy, or leave out priorities",
        )

    def _never(self) -> UsageError:
        names = [*self._unfinished][:5]
        states = ", ".join(f"{name} ({self._core.jobs[name].state.value})" for name in names)
        return UsageError(
            f"jobs never end: {states}; nothing is running and nothing else will happen",
            "see that they have an end of their hold, and that the policy can place them on this cluster",
        )


def _unless_void(ranks: Ranks, act: Callable[[], object]) -> Callable[[], object]:
    """Return ``act``, which does nothing once something else has happened to the job of ``ranks``."""
    edition = ranks.edition
    return lambda: act() if ranks.edition == edition else None
