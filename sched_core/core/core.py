"""The core of the scheduler: events in, commands out. No sockets, no processes, no clock.

Policies decide which job is to hold which devices (``Ledger``). The processes follow more slowly: a job stops
at a boundary, then parks, and a device changes hands only when all ranks of its job have parked. The core
keeps a list of the jobs whose devices differ from the plan, and reconciles them after every event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import inf
from types import MappingProxyType

from gpuslice.errors import IllegalTransitionError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.jobs.failures import Kind
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState, Trigger
from gpuslice.sched_core.ledger import Ledger
from gpuslice.sched_core.policy import Policy, placement_of
from gpuslice.sched_core.switch_cost_model import SWITCH_SHARE
from gpuslice.types import DeviceName
from gpuslice.wire import Dismiss, Progress, Resume, Withdraw
from gpuslice.wire import Suspend as SuspendMessage

from . import launching, owner_requests, restarts
from .deadlines import Deadlines
from .events import (
    Brought,
    Cancelled,
    Command,
    Computed,
    Event,
    Exited,
    Held,
    Kill,
    Limited,
    Measured,
    Moved,
    NodeFound,
    NodeLost,
    Noted,
    Notice,
    PortFound,
    RankGone,
    Released,
    Reported,
    StateWaits,
    Submitted,
    Tell,
    Weighted,
    Woken,
)
from .invariants import check
from .planning import Planning
from .prestart import Prestart
from .rank_processes import RankProcesses
from .rank_reports import RankReports
from .reconciliation import Reconciliation
from .relocation import Relocations
from .switch_costs import SwitchCosts
from .trials import Trials


class Core:
    """The state of all jobs and devices, and the rules by which events change it.

    Parameters
    ----------
    devices
        The devices to schedule, node by node.
    policy
        The policy that decides which job has which devices.
    switch_share
        The share of time that switching may take. The policy is told how long a slice must last for that.
    quotas
        How many devices the jobs of a tenant may ask for together; tenants without one have no limit.
    device_memory_bytes
        The memory of each device; 0: not known.
    sockets
        The number of CPU sockets of each node. The node's devices belong to them in equal parts, in order.
    """

    def __init__(
        self,
        devices: Sequence[DeviceName],
        policy: Policy,
        *,
        switch_share: float = SWITCH_SHARE,
        quotas: Mapping[str, int] | None = None,
        device_memory_bytes: int = 0,
        sockets: int = 1,
    ) -> None:
        self.devices = tuple(devices)
        #: For each device, the jobs whose processes may be using it, by id.
        self.occupants: list[dict[str, Gang]] = [{} for _ in devices]
        self.device_memory_bytes = device_memory_bytes
        cluster = _cluster(self.devices, sockets)
        self.relocations = Relocations(self, cluster, placement_of(policy))
        self.planning = Planning(self, cluster, policy, quotas or {})
        self.switch_costs = SwitchCosts(switch_share, self.devices)
        self.deadlines = Deadlines(self)
        self.trials = Trials(self)
        self.reports = RankReports(self)
        self.processes = RankProcesses(self)
        self.prestart = Prestart(self, policy)
        self.reconciliation = Reconciliation(self)
        self._jobs: dict[str, Gang] = {}
        self._commands: list[Command] = []

    @property
    def ledger(self) -> Ledger:
        """The devices that each job is to have by the policy's plan; for reading."""
        return self.planning.ledger

    @property
    def jobs(self) -> Mapping[str, Gang]:
        """All jobs ever submitted, by id, in order of submission; for reading."""
        return MappingProxyType(self._jobs)

    @property
    def unreconciled(self) -> Mapping[str, Gang]:
        """The jobs that are not yet where the policy wants them, by id; for reading."""
        return self.reconciliation.jobs

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply ``event`` and return the commands that the shell must carry out.

        Raises
        ------
        IllegalTransitionError
            If ``event`` cannot happen now; nothing was changed.
        UsageError
            If a submitted job could never run, or a request is impossible; nothing was changed.
        """
        plans = self.planning.plans
        match event:
            case Submitted():
                self._submit(event, now)
            case Reported():
                self.reports.take(self._known(event.job, event), event.rank, event.message, now)
            case RankGone():
                self.processes.gone(self._known(event.job, event), event, now)
            case Exited():
                launching.exited(self, self._known(event.job, event), event, now)
            case Brought() | StateWaits() | PortFound():
                launching.take(self, self._known(event.job, event), event, now)
            case Cancelled() | Held() | Released() | Moved() | Weighted():
                owner_requests.apply(self, self._known(event.job, event), event, now)
            case Woken():
                self.reconciliation.woken()
                self.planning.due = True
            case Computed():
                self.planning.learn_answer(event)
            case Measured():
                self._known(event.job, event)
                self.planning.throughput.take(event, self._jobs, now)
                self.planning.due = True
            case Limited():
                self.prestart.set_limit(event.prestart)
            case NodeLost() | NodeFound():
                self.relocations.take(event, now)
                self.planning.use(self.relocations.cluster)
            case Noted():
                return []
        self.reconciliation.update(now)
        self.planning.waits.update(now)
        if not self._commands and self.planning.plans != plans:
            self._keep(event)
        commands, self._commands = self._commands, []
        return commands

    def become(self, other: Core) -> None:
        """Take over the state of ``other``, for good: both cores share all of it."""
        self.__dict__ = other.__dict__

    def check(self) -> None:
        """Raise ``InvariantError`` if an invariant of the core is broken."""
        check(self)

    # What the handlers of reports use.

    def order(self, command: Command) -> None:
        """Add ``command`` to those that ``handle`` returns to the shell."""
        self._commands.append(command)

    def tell(self, job: Gang, rank: int, message: Resume | SuspendMessage | Dismiss | Withdraw) -> None:
        """Order the shell to send ``message`` to rank ``rank`` of ``job``."""
        self.order(Tell(job.id, rank, message))

    def resume_rank(self, job: Gang, rank: int) -> None:
        """Tell a parked rank of ``job`` to come, or come back, to its device."""
        job.ranks[rank].come()
        device = str(self.devices[job.lease[rank]].on(""))
        width, world = (job.width, job.world) if job.spec.joined else (0, 0)
        self.tell(job, rank, Resume(epoch=job.epoch, device=device, width=width, world=world))

    def announce(self, job: Gang, now: float) -> None:
        """Show ``job``, which is ready to run, to the policy, or enter it for its trial if it had none.

        Nothing happens if its owner holds it, if it has made all its steps, or if the policy knows it
        already.
        """
        if job.held or job.finishing or self.planning.knows(job):
            return
        if job.tried:
            self.planning.announce(job, now)
        else:
            self.trials.enter(job)

    def holders(self, device: int) -> list[Gang]:
        """Return the jobs that the policy's plan puts on ``device``."""
        return [self._jobs[holder.id] for holder in self.ledger.holders(device)]

    def settle(self, job: Gang, now: float) -> None:
        """Complete the start, resume or suspend of ``job`` if all its ranks have arrived or parked."""
        job.book(now)
        if job.all_on() and job.allows(Trigger.ALL_ON):
            job.move(Trigger.ALL_ON, now)
            job.refusals.resume.succeeded()
            if job.placed and not job.lent:
                job.progress_from(job.counts_from(now))
                self.planning.begun(job)
            job.first_start_s = now if job.first_start_s is None else job.first_start_s
            if (notice := self.switch_costs.ended(job)) is not None:
                self.order(notice)
            self.planning.due = True
        elif job.all_parked() and job.allows(Trigger.ALL_PARKED):
            job.stand_still()
            job.count_leaving()
            job.refusals.suspend.succeeded()
            if job.needs_relaunch and not job.reached_max_steps:
                restarts.end_to_relaunch(self, job, now)
                return
            job.move(Trigger.ALL_PARKED, now)
            self.vacate(job)
            self.planning.parked(job, now)
            self.relocations.confine(job)
            if job.reached_max_steps:
                self.end(job, Trigger.SUCCEED, f"it has made its {job.spec.max_steps} steps", now)

    def grant(self, job: Gang, devices: tuple[int, ...], now: float) -> None:
        """Give ``job`` a lease on ``devices``, which it can enter now, and tell its ranks to come."""
        job.move(Trigger.GRANT, now)
        self.prestart.leave(job)
        job.begin_epoch()
        self._occupy(job, devices)
        job.change_rate(self.planning.throughput.rate(job, len(devices)), now)
        job.book(now)
        for rank in job.present(RankPhase.PARKED):
            self.resume_rank(job, rank.number)

    def _occupy(self, job: Gang, devices: tuple[int, ...]) -> None:
        """Enter ``job`` as an occupant of ``devices``: its processes may be on them from now on."""
        if job.width and job.width != len(devices):
            self.order(Notice("resized", job.id, {"from": job.width, "to": len(devices)}))
        job.occupy(devices)
        for device in devices:
            self.occupants[device][job.id] = job

    def vacate(self, job: Gang) -> None:
        """Remove ``job`` from the occupants of its devices: nothing of it is on them any more."""
        for device in job.lease:
            del self.occupants[device][job.id]
        job.vacate()

    def begin(self, job: Gang, now: float) -> None:
        """Note that ``job`` trains: its set-up is over, and attained service counts from now on."""
        job.end_setup(now)
        job.lateness.trained()
        job.state_nodes = job.nodes
        self.relocations.confine(job)
        self.order(Notice("began", job.id, {"setup_s": job.setup_s}))
        self.relocations.arrived(job, now)
        if job.placed and job.since_s < inf:
            job.progress_from(now)
            self.planning.begun(job)

    def finish(self, job: Gang, now: float) -> None:
        """Have ``job``, which has made all its steps, stop at its next boundary, where it succeeds."""
        if not job.finishing:
            job.finish()
            job.history.append((now, "all its steps are made"))
            self.planning.withhold(job, now)
            self.reconcile_later(job)

    def reconcile_later(self, job: Gang) -> None:
        """Reconcile ``job`` after this event and the next ones, until nothing is left to do."""
        self.reconciliation.add(job)

    def end(self, job: Gang, trigger: Trigger, reason: str, now: float, blame: Kind | None = None) -> None:
        """End ``job`` as succeeded, failed or cancelled, as ``trigger`` says; kill the processes it has left.

        Parameters
        ----------
        blame
            The class of the failure, if it is known before the command has ended.

        Raises
        ------
        IllegalTransitionError
            If it has ended before.
        """
        job.move(trigger, now)
        job.verdict.conclude(reason, now, blame)
        self.deadlines.judge(job, now)
        self.reconciliation.forget(job)
        self.planning.moves.forget(job)
        self.switch_costs.forget(job)
        self.planning.withdraw(job, now, well=trigger is Trigger.SUCCEED)
        if trigger is Trigger.SUCCEED:
            self.planning.learn(job)
        if job.processes_gone:
            self.close_if_gone(job, now)
        else:
            self.order(Kill(job.id, reason or job.state.value))
            self.reports.let_run_to_the_end(job)

    # The other events.

    def _submit(self, event: Submitted, now: float) -> None:
        spec = event.spec
        if spec.id in self._jobs:
            raise self._jobs[spec.id].illegal("submitted again")
        owner_requests.check_submission(self, spec)
        job = self._jobs[spec.id] = Gang(spec, len(self._jobs), event.program)
        job.history.append((now, "submitted"))
        self.relocations.restrict(job)
        self.planning.quotas.enter(job)
        self.deadlines.add(job)
        self.prestart.offer(job, now)

    def command_ended(self, job: Gang, code: int, said: str, now: float) -> None:
        """Act on the end of the command of ``job``, which has ended with exit code ``code`` on all nodes."""
        job.command.end(code, said)
        if job.state.ended or job.relocation.ending:
            self.close_if_gone(job, now)
        elif job.state is JobState.RELAUNCHING:
            restarts.relaunch_if_gone(self, job, now)
        elif code == 0:
            self.end(job, Trigger.SUCCEED, "", now)
        else:
            self.end(job, Trigger.FAIL, f"it ended with exit code {code}", now)

    def _keep(self, event: Event) -> None:
        """Send a notice if ``event``, at which the policy was asked, is a heartbeat.

        The journal leaves out heartbeats from which nothing follows, and a policy that is asked at another
        moment may decide otherwise.
        """
        if isinstance(event, Reported) and isinstance(event.message, Progress):
            self.order(Notice("planned", event.job))

    def _known(self, name: str, event: Event) -> Gang:
        job = self._jobs.get(name)
        if job is None:
            raise IllegalTransitionError(
                f"there is no job {name!r}", f"it was named in a {type(event).__name__}"
            )
        return job

    def close_if_gone(self, job: Gang, now: float) -> None:
        """Finish with the processes of ``job``, which has ended or is to change its node, once all are gone.

        A job that changes its node is started there. An ended job frees its devices, and a failure is judged.
        """
        if job.processes_gone and not job.state.ended:
            self.relocations.go_on(job, now)
        elif job.processes_gone:
            self.vacate(job)
            if job.state is JobState.FAILED:
                restarts.close(self, job, now)


def _cluster(devices: Sequence[DeviceName], sockets: int) -> Cluster:
    """Return the cluster of the nodes that ``devices``, listed node by node, belong to."""
    sizes = [len(list(run)) for _, run in groupby(devices, key=lambda device: device.node)]
    nodes = [Cluster.one_node(size, sockets) for size in sizes or [0]]
    return Cluster(sizes, socket_sizes=[size for node in nodes for size in node.socket_sizes])
