"""The holders of all devices: the one place where plans are checked, for the live core and the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from .cluster import Cluster
from .job import Job
from .policy import Migrate, Plan, PolicyError, Start, Stop, Suspend

J = TypeVar("J", bound=Job)


class _Overlay:
    """The holders of devices, with changes that the original does not see."""

    __slots__ = ("_changed", "_original")

    def __init__(self, original: list[Job | None] | _Overlay) -> None:
        self._original = original
        self._changed: dict[int, Job | None] = {}

    def __getitem__(self, device: int) -> Job | None:
        return self._changed[device] if device in self._changed else self._original[device]

    def __setitem__(self, device: int, holder: Job | None) -> None:
        self._changed[device] = holder


class Ledger:
    """The devices and their holders. It refuses every plan that would break a promise.

    Parameters
    ----------
    cluster
        The cluster whose devices they are.
    policy
        Name of the policy, for messages; kept as ``policy``.
    """

    def __init__(self, cluster: Cluster, policy: str) -> None:
        self._cluster = cluster
        #: The number of devices that no job holds.
        self.free = cluster.size
        self.policy = policy
        nobody: list[Job | None] = [None] * len(cluster.node_of)
        #: Devices that no job can have.
        self._absent: frozenset[int] = frozenset()
        self._holder: list[Job | None] | _Overlay = nobody
        #: Further holders of devices that are shared, by device.
        self._sharers: dict[int, list[Job]] = {}
        #: Jobs that allowed sharing of their devices, by id.
        self._shares: set[str] = set()

    def copy(self) -> Ledger:
        """Return a copy to try a plan on, for as long as this ledger does not change.

        It costs nothing for each device, because it keeps only the devices that it changes.
        """
        twin = object.__new__(Ledger)
        twin._cluster, twin.policy, twin._absent = self._cluster, self.policy, self._absent
        twin.free = self.free
        twin._holder = _Overlay(self._holder)
        twin._sharers = {device: list(jobs) for device, jobs in self._sharers.items()}
        twin._shares = set(self._shares)
        return twin

    def use(self, cluster: Cluster) -> None:
        """Set which devices of the same cluster can be had from now on. No job may hold one that cannot."""
        self.free += cluster.size - self._cluster.size
        self._cluster = cluster
        usable = {device for node in range(len(cluster.node_sizes)) for device in cluster.on(node)}
        self._absent = frozenset(range(len(cluster.node_of))) - usable

    def grow(self, count: int) -> None:
        """Add ``count`` devices at the end, which nobody has. A call of ``use`` must follow."""
        assert isinstance(self._holder, list)
        self._holder += [None] * count

    def holders(self, device: int) -> tuple[Job, ...]:
        """Return the jobs on ``device``, the one that came first at the front."""
        first = self._holder[device]
        return () if first is None else (first, *self._sharers.get(device, ()))

    def shares(self, job: Job) -> bool:
        """Return True if ``job`` allows other jobs on its devices."""
        return job.id in self._shares

    def release(self, job: Job) -> None:
        """Take back all devices that ``job`` holds."""
        if job.id not in self._shares:
            for device in job.placement:
                self._holder[device] = None
            self.free += len(job.placement)
            return
        self._shares.discard(job.id)
        for device in job.placement:
            others = self._sharers.get(device)
            if others is None:
                self._holder[device] = None
                self.free += 1
                continue
            if self._holder[device] is job:
                self._holder[device] = others.pop(0)
            else:
                others.remove(job)
            if not others:
                del self._sharers[device]

    def grant(self, job: Job, devices: Sequence[int], *, shared: bool, plan: Plan) -> None:
        """Give ``devices`` to ``job``.

        Raises
        ------
        PolicyError
            If a device does not exist or cannot be had, is named twice, or is held by another job and not
            shared by all; if there are not as many devices as the job asks for; or if a job that needs one
            node would have devices of several.
        """
        if len(devices) != job.demand:
            self._check_size(job, len(devices), plan)
        if self._absent and (absent := self._absent.intersection(devices)):
            raise self._impossible(
                f"device {min(absent)} cannot be had: its node is lost, or it is paused", plan
            )
        holder = self._holder
        for position, device in enumerate(devices):
            if not 0 <= device < len(self._cluster.node_of):
                raise self._impossible(f"device {device} does not exist", plan)
            present = holder[device]
            if present is None:
                holder[device] = job
                self.free -= 1
            elif present is job or device in devices[:position]:
                raise self._impossible(f"device {device} is named twice for job {job.id}", plan)
            elif shared and all(other.id in self._shares for other in self.holders(device)):
                self._sharers.setdefault(device, []).append(job)
            else:
                raise self._impossible(
                    f"device {device} is given to {job.id} but {present.id} holds it", plan
                )
        if job.within and len(self._cluster.nodes(devices)) > 1:
            raise self._impossible(f"elastic job {job.id} is given devices of several nodes", plan)
        if shared:
            self._shares.add(job.id)

    def check_names(self, plan: Plan) -> None:
        """Raise if ``plan`` has two decisions on the same job.

        Raises
        ------
        PolicyError
            Naming the job.
        """
        if len({decision.job for decision in plan.decisions}) == len(plan.decisions):
            return
        seen: set[str] = set()
        for decision in plan.decisions:
            if decision.job in seen:
                raise self._impossible(f"there are two decisions on job {decision.job}", plan)
            seen.add(decision.job)

    def check(self, jobs: Mapping[str, J], name: str, plan: Plan, *, running: bool | None) -> J:
        """Return the job ``name``, checked to be running or waiting as a decision on it requires.

        Raises
        ------
        PolicyError
            If there is no such unfinished job or it is in the other state.
        """
        job = jobs.get(name)
        if job is None:
            raise self._impossible(f"there is no unfinished job {name!r}", plan)
        if running is not None and job.running is not running:
            state = "running" if job.running else "waiting"
            raise self._impossible(f"job {name} is {state} already", plan)
        return job

    def _check_size(self, job: Job, count: int, plan: Plan) -> None:
        least = job.spec.least_devices or job.demand
        most = job.spec.most_devices or job.demand
        if not least <= count <= most:
            asked = str(job.demand) if least == most else f"{least} to {most}"
            raise self._impossible(f"job {job.id} asks for {asked} devices and is given {count}", plan)

    def _impossible(self, what: str, plan: Plan) -> PolicyError:
        return PolicyError(
            f"policy {self.policy} returned an impossible plan: {what}; the plan: {summary(plan)}"
        )


def summary(plan: Plan, most: int = 6) -> str:
    """Return the decisions of ``plan`` in one line, at most ``most`` of them."""
    shown = ", ".join(_decision(decision) for decision in plan.decisions[:most])
    more = len(plan.decisions) - most
    return f"[{shown}{f', and {more} more' if more > 0 else ''}]"


def _decision(decision: Start | Suspend | Migrate | Stop) -> str:
    verb = type(decision).__name__.lower()
    if isinstance(decision, Start | Migrate):
        return f"{verb} {decision.job} on {list(decision.devices)}"
    return f"{verb} {decision.job}"
