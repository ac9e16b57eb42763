"""Requests of the scheduler's owner to change its settings while it runs: all of a request, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuslice.errors import UsageError
from gpuslice.sched_core.allocation.allocation import Allocation
from gpuslice.sched_core.lifecycle.events import SettingsChanged
from gpuslice.sched_core.lifecycle.state import State
from gpuslice.sched_core.policy import Policy
from gpuslice.sched_core.priorities import Priorities

#: Makes the policy of a name with its options. Raises ``UsageError`` if there is none such.
MakePolicy = Callable[[str, Mapping[str, str]], Policy]


def change(
    state: State, allocation: Allocation, make_policy: MakePolicy | None, event: SettingsChanged, now: float
) -> None:
    """Change the settings that ``event`` names. Jobs keep what they have attained.

    Raises
    ------
    UsageError
        If one of the changes is impossible; nothing was changed.
    """
    policy = None if event.policy is None else _made(state, make_policy, event.policy, event.options or {})
    quotas = event.quotas
    if quotas is not None:
        _check_quotas(state, quotas)
    if event.switch_share is not None and not 0 <= event.switch_share < 1:
        raise UsageError(
            f"switch-share {event.switch_share} is not a share of the time", "give a number from 0 to below 1"
        )
    if event.switch_share is not None:
        state.switch_costs.share = event.switch_share
    if quotas is not None:
        allocation.eligibility.use_quotas(quotas, now)
    if policy is not None:
        allocation.use_policy(policy, now)
    state.plan_due = True


def _made(state: State, make_policy: MakePolicy | None, name: str, options: Mapping[str, str]) -> Policy:
    """Return the new policy. Raise ``UsageError`` if it cannot be made, or cannot plan for these jobs."""
    if make_policy is None:
        raise UsageError("this scheduler has one policy only", "start another one to have another policy")
    policy = make_policy(name, options)
    if not Priorities(policy).possible:
        for job in state.jobs.values():
            if job.spec.priority and not job.state.ended:
                raise UsageError(
                    f"job {job.id} has a priority, and policy {name} cannot plan by priority",
                    f"`gpuslice set --job {job.id} priority=0` first, or choose another policy",
                )
    return policy


def _check_quotas(state: State, quotas: Mapping[str, int]) -> None:
    """Raise ``UsageError`` if a job that has not ended could never run under ``quotas``."""
    for job in state.jobs.values():
        quota = quotas.get(job.spec.tenant)
        if quota is not None and job.spec.ranks > quota and not job.state.ended:
            raise UsageError(
                f"job {job.id} asks for {job.spec.ranks} devices; the quota of tenant {job.spec.tenant}"
                f" would be {quota}",
                f"give a larger quota, or `gpuslice cancel {job.id}` first",
            )
