"""Which device is a job's: named, or found by where its memory is."""

from __future__ import annotations

import re

import pytest

from gpuslice.errors import UsageError
from gpuslice.launch.device_choice import found_device, named_device
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.types import DeviceName, Route


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


@pytest.mark.parametrize("text", ["gpu", "cuda:0+", "cuda:0+0", "cuda+1", "cpu:0+1", "cuda:0,1"])
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(text))):
        named_device(text, Route.AUTO)


def test_several_gpus_of_one_process_are_a_device_only_where_that_is_meant() -> None:
    named = named_device("cuda:0+2", Route.AUTO)
    assert named is not None
    assert (str(named), named.indices) == ("cuda:0+2", (0, 2))
    with pytest.raises(UsageError, match="one device"):
        DeviceName.parse("cuda:0+2")


def test_each_rank_has_as_many_gpus_as_the_first() -> None:
    first = DeviceName.parse("cuda:0+1", several=True)
    assert str(RankIdentity(1, 1, 2, 2).device(first)) == "cuda:2+3"


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
