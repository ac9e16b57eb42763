"""From what a user hands in to a job: what is impossible is refused here, in the user's words."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from gpuslice.config import variable
from gpuslice.errors import UsageError
from gpuslice.types import DeviceName, Route
from gpuslice.verbs import Submit

from .job import JobSpec


def check(request: Submit, devices: Sequence[DeviceName]) -> None:
    """Refuse what no job can be, or none on these ``devices``.

    Raises
    ------
    UsageError
        Naming the value.
    """
    if not request.argv:
        raise UsageError("nothing to run", "give a script, -m module, or -- and a command")
    if not 0 < request.weight < inf:
        raise UsageError(f"weight {request.weight} is no share", "1 is the usual weight")
    if request.max_restarts < 0:
        raise UsageError(f"max_restarts {request.max_restarts} is below 0", "0 is the usual number")
    if request.steps < 0:
        raise UsageError(f"{request.steps} steps are none", "give a positive number, or leave it out")
    if request.max_steps < 0:
        raise UsageError(f"{request.max_steps} steps are none", "give a positive number, or leave it out")
    if not 0 <= request.expected_s < inf:
        raise UsageError(f"{request.expected_s} s are no duration", "leave it out if it is not known")
    if not 0 <= request.deadline_s < inf:
        raise UsageError(f"a deadline after {request.deadline_s} s is none", "give a positive time")
    if request.guaranteed and not request.deadline_s:
        raise UsageError("there is no deadline to be guaranteed", "state it: --deadline 2h")
    if request.guaranteed and not (request.steps or request.max_steps or request.expected_s):
        raise UsageError(
            "without the number of its steps nobody can tell how long it takes, nor guarantee a deadline",
            "state it: --steps N; or how long it takes: --duration 40m",
        )
    if request.trial_batches < 0:
        raise UsageError(f"a trial of {request.trial_batches} mini-batches is none", "give a positive number")
    if request.memory_bytes < 0:
        raise UsageError(f"{request.memory_bytes} bytes are no memory", "leave it out if it is not known")
    if not request.boundary_timeout_s >= 0:
        raise UsageError(
            f"the boundary timeout {request.boundary_timeout_s} s is below 0", "0 means for ever"
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


def make_spec(request: Submit, name: str, now_s: float) -> JobSpec:
    """The job that ``request``, which was checked, asks for."""
    return JobSpec(
        id=name,
        submit_s=now_s,
        demand=request.devices,
        tenant=request.tenant,
        weight=request.weight,
        iterations=request.steps or request.max_steps,
        expected_s=request.expected_s,
        max_steps=request.max_steps,
        deadlines=((request.deadline_s, 1.0),) if request.deadline_s else (),
        only_guaranteed=request.guaranteed,
        device_memory_bytes=request.memory_bytes,
        max_restarts=request.max_restarts,
        trial_batches=request.trial_batches,
        boundary_timeout_s=request.boundary_timeout_s,
        kill_when_late=request.on_boundary_timeout == "kill",
    )
