"""From what a user hands in to a job: what is impossible is refused here, in the user's words."""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.config import variable
from gpuslice.errors import UsageError
from gpuslice.sched_core.job import GRACE_S, JobSpec
from gpuslice.types import DeviceName, Route, shortened
from gpuslice.verbs import Submit


def check(request: Submit, devices: Sequence[DeviceName]) -> None:
    """Refuse what no job can be, or none on these ``devices``; each value is within its range already.

    Raises
    ------
    UsageError
        Naming the value.
    """
    if not request.argv:
        raise UsageError("nothing to run", "give a script, -m module, or -- and a command")
    if request.guaranteed and not request.deadline_s:
        raise UsageError("there is no deadline to be guaranteed", "state it: --deadline 2h")
    if request.guaranteed and not (request.steps or request.max_steps or request.expected_s):
        raise UsageError(
            "without the number of its steps nobody can tell how long it takes, nor guarantee a deadline",
            "state it: --steps N; or how long it takes: --duration 40m",
        )
    if (
        request.most_device_memory_bytes
        and not 0 < request.device_memory_bytes <= request.most_device_memory_bytes
    ):
        raise UsageError(
            f"a memory limit of {request.device_memory_bytes} bytes cannot grow to"
            f" {request.most_device_memory_bytes}",
            "write the smaller one first: --memory 3G:6G",
        )
    if request.most_devices and request.most_devices < request.devices:
        raise UsageError(
            f"{request.devices} to {request.most_devices} devices are not possible",
            "write the smaller number first: --devices 1:4",
        )
    _check_route(request.environ.get(variable("route"), Route.AUTO.value), devices)


def _check_route(name: str, devices: Sequence[DeviceName]) -> None:
    """Refuse a route that cannot be taken on one of ``devices``: the job may come to any of them."""
    known = [route.value for route in Route]
    if name not in known:
        raise UsageError(f"there is no route {name!r}", f"choose of {', '.join(known)}")
    others = [device for device in devices if device.kind != "cuda"]
    if Route(name).needs_gpu and others:
        raise UsageError(
            f"the route {name} is for GPUs only, and this scheduler has {others[0]}", "leave out --route"
        )


def make_spec(request: Submit, name: str, now_s: float, grace_s: float = GRACE_S) -> JobSpec:
    """Return the job of ``request``, which was checked; ``grace_s`` is for one that states none."""
    return JobSpec(
        id=name,
        model=shortened(" ".join(request.argv[1:] or request.argv)),
        submit_s=now_s,
        demand=request.devices,
        min_demand=request.devices if request.most_devices else 0,
        max_demand=request.most_devices,
        relaunch=request.relaunch and request.most_devices > request.devices,
        tenant=request.tenant,
        app=request.app,
        weight=request.weight,
        iterations=request.steps or request.max_steps,
        expected_s=request.expected_s,
        max_steps=request.max_steps,
        deadlines=((request.deadline_s, 1.0),) if request.deadline_s else (),
        only_guaranteed=request.guaranteed,
        device_memory_bytes=request.device_memory_bytes,
        most_device_memory_bytes=request.most_device_memory_bytes,
        max_restarts=request.max_restarts,
        trial_batches=request.trial_batches,
        boundary_timeout_s=request.boundary_timeout_s,
        grace_s=grace_s if request.grace_s is None else request.grace_s,
        kill_when_late=request.on_boundary_timeout == "kill",
    )
