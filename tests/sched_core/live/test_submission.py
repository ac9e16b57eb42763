"""What is refused when a job is handed in, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.errors import UsageError
from gpuslice.job_request import JobRequest
from gpuslice.sched_core.job import JobDefaults
from gpuslice.sched_core.live.submission import MOST_JOBS, check, make_array, make_spec
from gpuslice.types import DeviceName, Route
from gpuslice.verbs import Submit, SubmitArray

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


def points(*words: str, **fields: Any) -> list[tuple[str, tuple[str, ...], dict[str, str]]]:
    """The jobs of an array of the command ``words``: id, command and variables of each."""
    started: dict[str, Any] = {"stem": "x", "argv": words, "directory": "/", "environ": {"A": "b"}}
    asked = SubmitArray(**started, **fields)
    check(asked, SLOTS)
    return [(one.id, one.argv, dict(one.environ)) for one in make_array(asked, "s", 1.0).points]


def test_each_job_of_an_array_has_its_number_and_other_braces_stay() -> None:
    assert points("t.py", "--out={}/{}", "{lr}", "{ }", "{{}}", array="2-3") == [
        (f"s-{n}", ("t.py", f"--out={n}/{n}", "{lr}", "{ }", f"{{{n}}}"), {"GPUSLICE_ARRAY_INDEX": str(n)})
        for n in (2, 3)
    ]


def test_each_job_of_a_grid_has_its_values_and_other_braces_stay() -> None:
    found = points("t.py", "{lr}", "{wd}{lr}", "{}", "{x}", grid={"lr": "{wd},1", "wd": "0,1e-4"})
    assert [argv[1:3] for _, argv, _ in found] == [
        ("{wd}", "0{wd}"),
        ("{wd}", "1e-4{wd}"),
        ("1", "01"),
        ("1", "1e-41"),
    ]
    assert {argv[3:] for _, argv, _ in found} == {("{}", "{x}")}
    assert found[3][0] == "s-3"
    assert found[3][2] == {
        "GPUSLICE_GRID_LR": "1",
        "GPUSLICE_GRID_WD": "1e-4",
        "GPUSLICE_ARRAY_INDEX": "3",
    }


@pytest.mark.parametrize(
    ("fields", "at_once"),
    [
        ({"array": "0-9%3"}, 3),
        ({"array": "0-9%3", "at_once": 3}, 3),
        ({"array": "0-9", "at_once": 2}, 2),
        ({"array": "7"}, 0),
        ({"grid": {"a": "1"}, "at_once": 5}, 5),
    ],
)
def test_how_many_at_once_is_said_in_either_way(fields: dict[str, Any], at_once: int) -> None:
    started: dict[str, Any] = {"stem": "x", "argv": ("true",), "directory": "/", "environ": {}}
    event = make_array(SubmitArray(**started, **fields), "s", 1.0)
    assert (event.spec.at_once, event.spec.id) == (at_once, "s")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "neither --array nor --grid"),
        ({"array": "0-1", "grid": {"a": "1"}}, "--array and --grid are both given"),
        ({"array": "0-1", "guaranteed": True, "deadline_s": 9.0, "steps": 5}, "--guaranteed is for one job"),
        ({"array": "1,2"}, "--array 1,2 is no range"),
        ({"array": "0-3%0"}, "--array 0-3%0 is no range"),
        ({"array": "\u0663"}, "is no range"),
        ({"array": "9-0"}, "ends before it begins"),
        ({"array": "0-9%3", "at_once": 2}, "differ"),
        ({"array": f"1-{MOST_JOBS + 1}"}, f"an array of {MOST_JOBS + 1} jobs"),
        ({"grid": {"a": ",".join("abcdefghij"), "b": ",".join(["1"] * 1001)}}, "an array of 10010 jobs"),
        ({"grid": {"a b": "1"}}, "--grid a b is no name"),
        ({"grid": {"a": "1,,2"}}, "--grid a has an empty value"),
        ({"grid": {"lr": "1", "LR": "2"}}, "names lr, LR of --grid have the same variable"),
    ],
)
def test_an_array_that_does_not_say_which_jobs_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        points("t.py", **fields)


def test_an_array_whose_ids_would_be_too_long_is_refused() -> None:
    started: dict[str, Any] = {"stem": "x", "argv": ("true",), "directory": "/", "environ": {}}
    with pytest.raises(UsageError, match="is not a job name"):
        make_array(SubmitArray(**started, array="0-1"), "n" * 63, 1.0)
