"""What ``up`` makes of its options."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from gpuslice.daemon.device_lists import parse_devices
from gpuslice.daemon.scheduler_setup import Setup, options, oversubscription_warning
from gpuslice.errors import ConfigError, EnvironmentUnusableError, UsageError
from gpuslice.kernels.nvml import Driver, Gpu
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Submitted
from gpuslice.types import DeviceName

PACKS = {"pack": "true", "pack_slice_s": "2.0"}


def test_defragmenting_and_sockets_reach_the_core() -> None:
    made = options("fifo", ["apart_sockets=1.5"], None, defragment=True)
    assert made == {"apart_sockets": "1.5", "defragment": "true"}
    devices = tuple(DeviceName("cpu", index) for index in range(4))
    assert Setup(devices, "fifo", made, sockets=2).make_core().devices == devices
    with pytest.raises(UsageError, match="4 devices do not lie on 3 sockets"):
        Setup(devices, "fifo", made, sockets=3).make_core()
    with pytest.raises(ConfigError, match="gandiva places jobs itself"):
        Setup(devices, "gandiva", {"defragment": "true"}).make_core()


def test_a_placement_reaches_policy_and_core() -> None:
    made = options("fifo", ["placement.threshold=0.4"], None, placement="skew")
    assert made == {"placement": "skew", "placement.threshold": "0.4"}
    devices = tuple(DeviceName("cpu", 0).on(node) for node in ("", "b"))
    core = Setup(devices, "fifo", options("fifo", [], None, placement="spread")).make_core()
    core.handle(Submitted(JobSpec(id="g", submit_s=0.0, devices=2), Program(("true",), "/")), 0.0)
    assert core.jobs["g"].nodes == (0, 1)
    with pytest.raises(ConfigError, match="gandiva places jobs itself"):
        Setup(devices, "gandiva", {"placement": "spread"}).make_core()


@pytest.mark.parametrize(
    ("text", "cores", "said"),
    [
        ("cpu:2", 2, ""),
        ("null", 1, ""),
        ("cpu:99", 2, "99 slots share 2 cores: jobs that run at the same time slow each other down"),
        ("cpu:0,cpu:2", 1, "3 slots share 1 core: jobs that run at the same time slow each other down"),
    ],
)
def test_more_slots_than_cores_are_told_of(text: str, cores: int, said: str) -> None:
    assert oversubscription_warning(parse_devices(text), cores) == said


@pytest.mark.parametrize(
    ("here", "shown", "refused"),
    [
        (2, None, ""),
        (1, None, "cuda:1 is not here: the driver shows 1 GPU"),
        (3, "0", "cuda:1 is not here: the driver shows 1 GPU"),
        (0, None, ""),  # whose driver tells of none may have some
    ],
)
def test_gpus_that_are_not_here_are_refused(
    monkeypatch: pytest.MonkeyPatch, here: int, shown: str | None, refused: str
) -> None:
    gpus = tuple(Gpu(index, "GPU", f"GPU-{index}", "9.0", 1, 0) for index in range(here))
    monkeypatch.setattr("gpuslice.kernels.nvml.read_driver", lambda: Driver("580.1", "13.0", gpus))
    monkeypatch.setattr("gpuslice.launch.command.check", lambda settings: None)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    with pytest.raises(EnvironmentUnusableError, match=refused) if refused else nullcontext():
        assert len(parse_devices("cuda:0,cuda:1")) == 2


@pytest.mark.parametrize(
    ("devices", "error", "named"),
    [
        ("cpu:0", UsageError, "cpu:1"),
        ("null:0", UsageError, "null:1"),
        ("cuda:0", EnvironmentUnusableError, ""),
    ],
)
def test_what_comes_to_no_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, devices: str, error: type[UsageError], named: str
) -> None:
    gpus = (Gpu(0, "GPU", "GPU-0", "9.0", 1, 0),)
    monkeypatch.setattr("gpuslice.kernels.nvml.read_driver", lambda: Driver("580.1", "13.0", gpus))
    monkeypatch.setattr("gpuslice.launch.command.check", lambda settings: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(error) as caught:
        parse_devices(devices)
    assert named in caught.value.remedy


def test_the_whole_host_among_others_is_its_first_slot() -> None:
    assert parse_devices("cpu,cpu:1") == (DeviceName("cpu", 0), DeviceName("cpu", 1))
    with pytest.raises(UsageError, match="twice"):
        parse_devices("cpu,cpu:0")


@pytest.mark.parametrize("policy", ["srtf", "srsf", "sjf", "chronus", "themis"])
def test_policies_that_must_know_running_times_go_by_what_jobs_tell(policy: str) -> None:
    assert Setup((DeviceName("cpu", 0),), policy).make_policy().needs_durations


@pytest.mark.parametrize(
    ("policy", "settings", "pack", "found"),
    [
        ("rr", [], False, {}),
        ("rr", [], True, PACKS),
        ("gandiva", [], False, PACKS),
        ("gandiva", ["packing=false"], False, {}),
        ("gandiva", ["mode=reactive"], False, {}),
        ("gandiva", ["packing=false"], True, PACKS),
    ],
)
def test_who_packs(policy: str, settings: list[str], pack: bool, found: dict[str, str]) -> None:
    made = options(policy, settings, None, pack=pack)
    assert {
        name: value for name, value in made.items() if name.startswith("pack_") or name == "pack"
    } == found
