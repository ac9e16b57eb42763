"""Locality for any policy with a placement, given up step by step while a job waits.

Source: the Philly study (Jeon et al., ATC 2019, sections 2.3 and 6): waiting for a good place is worth while,
but not for ever.
"""

from __future__ import annotations

from math import floor

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.nodes import fewest_nodes
from gpuslice.sched_core.policy import Plan, Policy, View

from .wrapper import Wrapper


class RelaxingPlacement:
    """A placement on as few nodes as possible, and on one more for every ``after_s`` that a job has waited.

    Parameters
    ----------
    after_s
        Waiting time per step.
    """

    name = "relaxing"

    def __init__(self, after_s: float) -> None:
        if not after_s > 0:
            raise ConfigError(f"relax_after_s={after_s} is not a time", "give a positive number of seconds")
        self._after_s = after_s
        #: The present; set by ``Relaxing``, because placements have no clock.
        self.now_s = 0.0

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        devices = fewest_nodes(job.demand, free)
        if devices is None:
            return None
        fewest = -(-job.demand // max(free.cluster.node_sizes))
        return devices if len(free.cluster.nodes(devices)) <= fewest + self.steps(job) else None

    def kind(self, job: Job) -> str:
        """Return the job's id: what a job accepts depends on how long it has waited."""
        return job.id

    def placed(self, job: Job, devices: tuple[int, ...]) -> None:
        """Do nothing: no placement is remembered."""

    def steps(self, job: Job) -> int:
        """Return how many more nodes than at first ``job`` accepts."""
        return floor(job.waited_at(self.now_s) / self._after_s + 1e-9)

    def next_step_s(self, job: Job) -> float:
        """Return when ``job`` accepts one more node if it still waits."""
        return job.since_s + (self.steps(job) + 1) * self._after_s


class Relaxing(Wrapper):
    """A wrapper that tells the placement the time and wakes ``policy`` when a waiting job accepts more nodes.

    Parameters
    ----------
    policy
        Uses ``placement``.
    """

    def __init__(self, policy: Policy, placement: RelaxingPlacement) -> None:
        super().__init__(policy)
        self._placement = placement

    def plan(self, view: View) -> Plan:
        """Return the policy's plan, with a wake-up at the next change of what waiting jobs accept."""
        self._placement.now_s = view.now_s
        plan = self.policy.plan(view)
        # A job lies on one node per device at most: then there is nothing left to give up.
        picky = (job for job in view.waiting() if self._placement.steps(job) < job.demand - 1)
        times = [self._placement.next_step_s(job) for job in picky]
        if plan.wake_at_s is not None:
            times.append(plan.wake_at_s)
        return Plan(plan.decisions, min(times, default=None))
