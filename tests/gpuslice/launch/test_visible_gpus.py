"""How a process numbers the GPUs of its scheduler."""

from __future__ import annotations

import pytest

from gpuslice.errors import SuspendRefusedError
from gpuslice.launch.visible_gpus import VisibleGpus, all_visible, cautions, hides_all, visible
from gpuslice.types import DeviceName

from ...fakes.gpus import gpu, mig

ALL = "0,1,2,3"


@pytest.mark.parametrize(
    ("leased", "local_rank", "own", "variable"),
    [
        (0, 0, ALL, "0,1,2,3"),
        (2, 0, ALL, "2,0,1,3"),
        (3, 1, ALL, "0,3,1,2"),
        (0, 3, ALL, "1,2,3,0"),
        (3, 1, "1", "3,0,1,2"),  # a rank that shows itself one GPU computes on cuda:0
        (7, 0, ALL, ""),
    ],
)
def test_the_leased_gpu_comes_where_the_script_looks_for_it(
    leased: int, local_rank: int, own: str, variable: str
) -> None:
    assert VisibleGpus.for_lease(ALL, leased, local_rank=local_rank, own=own).variable == variable


@pytest.mark.parametrize("leased", range(4))
@pytest.mark.parametrize("local_rank", range(4))
def test_every_gpu_of_the_scheduler_has_one_name_inside_and_back(leased: int, local_rank: int) -> None:
    gpus = VisibleGpus.for_lease(ALL, leased, local_rank=local_rank, own=ALL)
    names = [DeviceName("cuda", number) for number in range(4)]
    assert gpus.inside(names[leased]) == DeviceName("cuda", local_rank)
    assert [gpus.outside(gpus.inside(name)) for name in names] == names
    assert sorted(gpus.inside(name) for name in names) == names


def test_numbers_of_the_scheduler_stand_for_what_it_was_shown_itself() -> None:
    uuids = "GPU-a,GPU-b"
    assert all_visible([0, 1, 2], None) == "0,1,2"
    assert all_visible([0, 1, 2], "GPU-a, GPU-b") == uuids
    assert VisibleGpus.for_lease(uuids, 1, local_rank=0, own=uuids).variable == "GPU-b,GPU-a"


def test_a_process_that_has_begun_cuda_keeps_its_numbers() -> None:
    gpus = VisibleGpus.as_begun(ALL, "2,0")
    assert gpus.inside(DeviceName("cuda", 2)) == DeviceName("cuda", 0)
    assert gpus.outside(DeviceName("cuda", 1)) == DeviceName("cuda", 0)
    with pytest.raises(SuspendRefusedError, match="cuda:3 is hidden"):
        gpus.inside(DeviceName("cuda", 3))
    assert VisibleGpus.as_begun(ALL, None).inside(DeviceName("cuda", 3)) == DeviceName("cuda", 3)


def test_without_gpus_of_a_scheduler_names_mean_what_they_say() -> None:
    gpus = VisibleGpus()
    assert gpus.inside(DeviceName("cuda", 1)) == gpus.outside(DeviceName("cuda", 1)) == DeviceName("cuda", 1)
    assert gpus.inside(DeviceName("cpu", None)) == DeviceName("cpu", None)


@pytest.mark.parametrize(("value", "hides"), [("", True), ("-1", True), ("0", False), ("GPU-a", False)])
def test_a_script_may_hide_all_gpus(value: str, hides: bool) -> None:
    assert hides_all(value) is hides


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2, 0", [2, 0]),
        ("0,7,1", [0]),
        ("GPU-00000000-0000-0000-0000-000000000001", [1]),
        ("GPU-0", []),
        ("-1", []),
    ],
)
def test_visible_devices(value: str | None, indices: list[int]) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [found.index for found in visible([gpu(0), gpu(1), gpu(2)], environ)] == indices


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, [gpu(0).uuid, mig(1, 0).uuid]),
        ("1", [mig(1, 0).uuid]),
        (str(mig(1, 1).uuid), [mig(1, 1).uuid]),
        (f"{mig(1, 1).uuid},{mig(1, 0).uuid}", [mig(1, 1).uuid]),
        ("MIG-00000000-0000-0000-0001", []),
        ("MIG-7", []),
    ],
)
def test_of_mig_instances_one_is_visible(value: str | None, uuids: list[str]) -> None:
    gpus = [gpu(0), gpu(1, instances=(mig(1, 0), mig(1, 1)))]
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [found.uuid for found in visible(gpus, environ)] == uuids
    assert len(cautions(gpus, environ)) == len(uuids)


def test_cautions() -> None:
    same = [gpu(0, name="A"), gpu(1, name="A", compute_mode="exclusive_process")]
    assert cautions(same, {})[0] == ()
    assert "nvidia-smi -i 1 -c 0" in cautions(same, {"CUDA_VISIBLE_DEVICES": "1"})[0][0]
    mixed = [gpu(0, name="A"), gpu(1, name="B")]
    assert all("CUDA_DEVICE_ORDER=PCI_BUS_ID" in own[0] for own in cautions(mixed, {}))
    assert cautions(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [(), ()]
