"""What is refused when a job is handed in, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.errors import UsageError
from gpuslice.job_request import JobRequest
from gpuslice.sched_core.job import JobDefaults
from gpuslice.sched_core.live.submission import check, make_spec
from gpuslice.types import DeviceName, Route
from gpuslice.verbs import Submit

GPUS = [DeviceName("cuda", 0), DeviceName("cuda", 1)]
SLOTS = [DeviceName("cpu", 0)]


def request(**fields: Any) -> Submit:
    started: dict[str, Any] = {"argv": ("true",), "directory": "/", "environ": {"A": "b"}}
    return Submit(**{"stem": "x", **started, **fields})


@pytest.mark.parametrize("route", [None, *(route.value for route in Route)])
def test_any_route_may_be_taken_where_there_are_only_gpus(route: str | None) -> None:
    check(request(route=route), GPUS)


@pytest.mark.parametrize("devices", [SLOTS, [*GPUS, *SLOTS]])
@pytest.mark.parametrize("route", ["vmm", "driver"])
def test_a_route_for_gpus_is_refused_where_the_job_may_come_to_another_device(
    route: str, devices: list[DeviceName]
) -> None:
    with pytest.raises(UsageError, match=f"{route} is for GPUs only, and this scheduler has cpu:0"):
        check(request(route=route), devices)


@pytest.mark.parametrize("route", [None, "auto", "tensor"])
def test_other_routes_are_for_all_devices(route: str | None) -> None:
    check(request(route=route), [*GPUS, *SLOTS])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"argv": ()}, "nothing to run"),
        ({"environ": None}, "its environment or its directory is not stated"),
        ({"directory": ""}, "its environment or its directory is not stated"),
        ({"guaranteed": True, "steps": 5}, "is given without a deadline"),
        ({"guaranteed": True, "deadline_s": 5.0}, "without the number of its steps"),
        (
            {"device_memory_bytes": 2, "most_device_memory_bytes": 1},
            "a memory limit of 2 bytes cannot grow to 1",
        ),
        ({"most_device_memory_bytes": 1}, "a memory limit of 0 bytes cannot grow to 1"),
        ({"devices": 4, "most_devices": 1}, "4 to 1 devices are not possible"),
    ],
)
def test_values_that_contradict_each_other_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check(request(**fields), SLOTS)


def test_a_job_is_what_was_asked_for_and_what_the_scheduler_assigns() -> None:
    asked: dict[str, Any] = {"devices": 2, "tenant": "t", "deadline_s": 9.0, "trial": True, "relaunch": True}
    spec = make_spec(request(argv=("python", "x.py", "1"), **asked), "x-1", 5.0, JobDefaults(7.0, 8.0))
    assert (spec.id, spec.submit_s, spec.model, spec.due_s) == ("x-1", 5.0, "x.py 1", 14.0)
    assert (spec.devices, spec.tenant, spec.trial_batches, spec.relaunch) == (2, "t", 5, False)
    assert (spec.grace_s, make_spec(request(grace_s=1.0), "x", 0.0).grace_s) == (7.0, 1.0)
    own = make_spec(request(wait_for_node_s=1.0), "x", 0.0)
    assert (spec.wait_for_node_s, own.wait_for_node_s) == (8.0, 1.0)
    assert make_spec(request(), "x", 0.0).trial_batches == 0
    assert [make_spec(request(max_steps=9, steps=n), "x", 0.0).steps for n in (0, 5)] == [9, 5]


def test_the_command_of_a_job_is_not_kept_twice() -> None:
    spec = make_spec(request(), "x", 0.0)
    assert (spec.environ, spec.directory) == (JobRequest().environ, JobRequest().directory)
