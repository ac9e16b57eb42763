"""Jobs made from what users submit. What is impossible is refused here, in the user's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuslice.errors import UsageError
from gpuslice.job_request import JobRequest
from gpuslice.sched_core.job import DEFAULTS, JobDefaults, JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.types import DeviceName, Route, shortened
from gpuslice.verbs import Submit


def check(request: Submit, devices: Sequence[DeviceName]) -> None:
    """Raise if ``request`` cannot be a job, or not on ``devices``. Each value is within its range already.

    Raises
    ------
    UsageError
        Naming the value.
    """
    if not request.argv:
        raise UsageError("nothing to run", "give a script, -m module, or -- and a command")
    if request.environ is None or not request.directory:
        raise UsageError("its environment or its directory is not stated", "use Client.submit, which does")
    request.check()
    others = [device for device in devices if device.kind != "cuda"]
    if request.route and Route(request.route).needs_gpu and others:
        raise UsageError(
            f"the route {request.route} is for GPUs only, and this scheduler has {others[0]}",
            "leave out --route",
        )


def make_spec(request: Submit, name: str, now_s: float, defaults: JobDefaults = DEFAULTS) -> JobSpec:
    """Return the job of ``request``, which was checked. ``defaults`` are for what it does not state."""
    asked: dict[str, Any] = {
        field: getattr(request, field)
        for field in JobRequest.__struct_fields__
        if field not in Program.__struct_fields__
    }
    assigned = {
        "steps": request.steps or request.max_steps,
        "grace_s": defaults.grace_s if request.grace_s is None else request.grace_s,
        "wait_for_node_s": (
            defaults.wait_for_node_s if request.wait_for_node_s is None else request.wait_for_node_s
        ),
        "trial_batches": request.trial_batches if request.trial else 0,
        "deadlines": ((request.deadline_s, 1.0),) if request.deadline_s else (),
    }
    return JobSpec(
        **asked | assigned,
        id=name,
        submit_s=now_s,
        model=shortened(" ".join(request.argv[1:] or request.argv)),
        relaunch=request.relaunch and request.most_devices > request.devices,
    )
