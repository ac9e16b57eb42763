"""What is refused when a job is handed in."""

from __future__ import annotations

import pytest

from gpuslice.config import variable
from gpuslice.errors import UsageError
from gpuslice.sched_core.live.submission import check
from gpuslice.types import DeviceName, Route
from gpuslice.verbs import Submit

GPUS = [DeviceName("cuda", 0), DeviceName("cuda", 1)]
SLOTS = [DeviceName("cpu", 0)]


def request(route: str = "") -> Submit:
    environ = {variable("route"): route} if route else {}
    return Submit(name="x", numbered=False, argv=("true",), directory="/", environ=environ)


@pytest.mark.parametrize("route", ["", *(route.value for route in Route)])
def test_any_route_may_be_taken_where_there_are_only_gpus(route: str) -> None:
    check(request(route), GPUS)


@pytest.mark.parametrize("devices", [SLOTS, [*GPUS, *SLOTS]])
@pytest.mark.parametrize("route", ["vmm", "driver"])
def test_a_route_for_gpus_is_refused_where_the_job_may_come_to_another_device(
    route: str, devices: list[DeviceName]
) -> None:
    with pytest.raises(UsageError, match=f"{route} is for GPUs only, and this scheduler has cpu:0"):
        check(request(route), devices)


@pytest.mark.parametrize("route", ["", "auto", "tensor"])
def test_other_routes_are_for_all_devices(route: str) -> None:
    check(request(route), [*GPUS, *SLOTS])


def test_there_are_no_other_routes() -> None:
    with pytest.raises(UsageError, match="no route 'teleport'"):
        check(request("teleport"), GPUS)
