"""Requests of the scheduler's owner to change its settings while it runs: all of a request, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpuslice.errors import UsageError
from gpuslice.sched_core.allocation.allocation import Allocation
from gpuslice.sched_core.lifecycle.events import SettingsChanged
from gpuslice.sched_core.lifecycle.state import State
from gpuslice.sched_core.policy import Policy
from gpuslice.sched_core.priorities import Priorities
from gpuslice.types import DeviceName

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
    devices = None if event.devices is None else _devices(state, allocation, event.devices)
    if event.switch_share is not None:
        state.switch_costs.share = event.switch_share
    if quotas is not None:
        allocation.eligibility.use_quotas(quotas, now)
    if devices is not None:
        state.add_devices(devices.added)
        state.closed.remove(devices.removed)
        allocation.use_open_devices(now)
    if event.prestart is not None:
        allocation.prestart.set_limit(event.prestart)
    if policy is not None:
        allocation.use_policy(policy, now)
    state.plan_due = True


class _Devices(NamedTuple):
    """New devices, and the numbers of those that are to be no more."""

    added: tuple[DeviceName, ...]
    removed: frozenset[int]


def _devices(state: State, allocation: Allocation, names: Sequence[str]) -> _Devices:
    """Return what is to change so that ``names`` are all devices. Raise ``UsageError`` if that cannot be."""
    if not state.nodes.own_only:
        raise UsageError("devices cannot be changed while the scheduler has other nodes", "pause them")
    wanted, there = tuple(map(DeviceName.parse, names)), state.devices
    if not wanted or len(set(wanted)) < len(wanted):
        raise UsageError("no device is named, or one is named twice", "name each once")
    added = tuple(device for device in wanted if device not in there)
    removed = frozenset(number for number, device in enumerate(there) if device not in wanted)
    if (job := allocation.open_devices.could_not_run_without(removed, len(wanted))) is not None:
        gone = ", ".join(str(there[number]) for number in sorted(removed))
        raise UsageError(
            f"job {job.id} could never run without {gone}",
            f"`gpuslice cancel {job.id}` first, or keep the device until it has ended",
        )
    return _Devices(added, removed)


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
