"""Jobs made from what users submit. What is impossible is refused here, in the user's words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from gpuslice.errors import UsageError
from gpuslice.job_request import JobRequest
from gpuslice.sched_core.job import DEFAULTS, JobDefaults, JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import ArraySubmitted, Point
from gpuslice.types import DeviceName, Route, job_id, shortened
from gpuslice.verbs import Submit, SubmitArray

#: More jobs are refused in one array: their ids have to fit into one answer.
MOST_JOBS = 10_000
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?(?:%([1-9][0-9]{0,8}))?")
_GRID_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def check(request: Submit | SubmitArray, devices: Sequence[DeviceName]) -> None:
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


def make_spec(
    request: Submit | SubmitArray,
    name: str,
    now_s: float,
    defaults: JobDefaults = DEFAULTS,
    *,
    places: int = 0,
) -> JobSpec:
    """Return the job of ``request``, which was checked.

    ``defaults`` are for what it does not state. ``places`` is how many jobs of its array may have devices at
    a time.
    """
    asked: dict[str, Any] = {
        field: getattr(request, field)
        for field in JobRequest.__struct_fields__
        if field not in Program.__struct_fields__
    }
    assigned: dict[str, Any] = {
        "at_once": places,
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


def make_array(
    request: SubmitArray, name: str, now_s: float, defaults: JobDefaults = DEFAULTS
) -> ArraySubmitted:
    """Return the event that submits the array ``name`` of ``request``, which was checked.

    Raises
    ------
    UsageError
        If it does not say which jobs, or too many.
    """
    at_once, environs = request.at_once, list[dict[str, str]]()
    if request.array:
        numbers, behind = _numbers(request.array)
        if behind and at_once not in (0, behind):
            raise UsageError(
                f"--array {request.array} and --at-once {at_once} differ", "state the number once"
            )
        at_once = at_once or behind
    else:
        numbers, environs = _combinations(request.grid)
    points = []
    for place, number in enumerate(numbers):
        values = {f"{{{key}}}": value for key, value in environs[place].items()} if environs else {}
        argv = tuple(_filled(word, values or {"{}": str(number)}) for word in request.argv)
        variables = {f"GPUSLICE_GRID_{key[1:-1].upper()}": value for key, value in values.items()}
        variables["GPUSLICE_ARRAY_INDEX"] = str(number)
        points.append(Point(job_id(f"{name}-{number}"), argv, variables))
    spec = make_spec(request, name, now_s, defaults, places=at_once)
    program = Program(request.argv, request.directory, dict(request.environ or {}))
    return ArraySubmitted(spec, program, tuple(points))


def _numbers(text: str) -> tuple[range, int]:
    """Return the numbers that ``0-99%8`` names, and the most at once; 0: not stated."""
    found = _RANGE.fullmatch(text)
    if found is None:
        raise UsageError(f"--array {text} is no range of numbers", "write for instance --array 0-99%8")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise UsageError(f"--array {text} ends before it begins", f"write --array {last}-{first}")
    _check_count(last - first + 1)
    return range(first, last + 1), int(found[3] or 0)


def _combinations(grid: Mapping[str, str]) -> tuple[range, list[dict[str, str]]]:
    """Return the number and the values by name of each combination. The last name changes fastest."""
    values = {name: text.split(",") for name, text in grid.items()}
    count = 1
    for name, found in values.items():
        if _GRID_NAME.fullmatch(name) is None:
            raise UsageError(
                f"--grid {name} is no name", "use letters, digits and _, as in --grid lr=0.1,0.01"
            )
        if "" in found:
            raise UsageError(f"--grid {name} has an empty value", "separate values by single commas")
        count *= len(found)
    if len({name.upper() for name in values}) < len(values):
        raise UsageError(
            f"two of the names {', '.join(values)} of --grid have the same variable", "rename one of them"
        )
    _check_count(count)
    return range(count), [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def _check_count(count: int) -> None:
    if count > MOST_JOBS:
        raise UsageError(f"an array of {count} jobs has more than {MOST_JOBS}", "submit it in parts")


def _filled(word: str, values: Mapping[str, str]) -> str:
    """Return ``word`` with ``values`` in the place of their keys. Braces around anything else stay."""
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], word)
