"""Which device is a job's: named, or found by where its memory is."""

from __future__ import annotations

import pytest

from gpuslice.errors import UsageError
from gpuslice.launch.device_choice import found_device, named_device
from gpuslice.types import Route


@pytest.mark.parametrize(
    ("device", "route", "named"),
    [
        ("cpu", Route.AUTO, "cpu"),
        ("cpu:1", Route.TENSOR, "cpu:1"),
        ("cuda", Route.AUTO, "cuda:0"),
        ("cuda:3", Route.VMM, "cuda:3"),
        ("", Route.AUTO, None),
        ("", Route.TENSOR, None),
        ("", Route.VMM, "cuda:0"),
        ("", Route.DRIVER, "cuda:0"),
    ],
)
def test_a_device_is_named_by_its_setting_or_by_a_route_for_gpus(
    device: str, route: Route, named: str | None
) -> None:
    found = named_device(device, route)
    assert (found and str(found)) == named


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(UsageError, match="'gpu'"):
        named_device("gpu", Route.AUTO)


@pytest.mark.parametrize(
    ("current", "allocated_bytes", "found"),
    [
        (0, [], "cpu"),  # CUDA was asked for, and there is no GPU
        (0, [0], "cpu"),  # initialized, but nothing lives there yet
        (0, [5], "cuda:0"),
        (1, [0, 5], "cuda:1"),  # LOCAL_RANK 1, after set_device
        (0, [0, 5], "cuda:1"),  # LOCAL_RANK 1, by .to("cuda:1") alone
        (0, [5, 900, 5], "cuda:1"),  # a stray context does not make it the device
        (2, [5, 0, 5], "cuda:2"),
        (1, [5, 0, 5], "cuda:0"),
    ],
)
def test_the_gpu_that_holds_most_is_the_job_s(current: int, allocated_bytes: list[int], found: str) -> None:
    assert str(found_device(current, allocated_bytes)) == found
