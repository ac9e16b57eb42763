"""Who uses a device beside gpuslice's jobs, by what NVML tells, and what the core is told of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from msgspec.structs import replace

from gpuslice.errors import UsageError
from gpuslice.kernels.nvml import ProcessReader
from gpuslice.nodes.device_users import UserLook
from gpuslice.nodes.foreign_use import Foreign, ForeignUse, Mode, parse_foreign, preferred
from gpuslice.sched_core.lifecycle.events import DevicesUsed
from gpuslice.sched_core.nodes.local_node import rank_endpoint
from gpuslice.types import DeviceName
from gpuslice.verbs import DeviceUser

from ...fakes.gpus import gpu, mig
from ...sched_core.core.test_device_requests import Box

HOLD = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
#: Starts another process with an empty environment, and stays.
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env={})\n"
    "print(child.pid, flush=True)\n"
    "child.wait()",
]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        with process:
            os.killpg(process.pid, 9)


def start(started: list[subprocess.Popen[str]], command: list[str], **environ: str) -> str:
    """Start ``command`` as a group of its own. Return its first line."""
    environ = {**os.environ, **environ}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    started.append(process)
    assert process.stdout is not None
    return process.stdout.readline().strip()


def look(directory: Path, on_device: Mapping[int, int | None]) -> UserLook:
    return UserLook(["cuda:0", "cpu:0"], directory, lambda device: on_device)


def test_another_process_is_found_and_keeps_the_time_since_when(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    start(started, HOLD)
    on_device: dict[int, int | None] = {started[0].pid: 5}
    looking = look(tmp_path, on_device)
    (user,) = looking.look()["cuda:0"]
    assert (user.pid, user.nbytes) == (started[0].pid, 5)
    assert user.command.startswith("python")
    on_device[started[0].pid] = None
    (again,) = looking.look()["cuda:0"]
    assert (again.nbytes, again.since_unix_s) == (None, user.since_unix_s)


def test_processes_of_jobs_and_their_children_are_no_others(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    own = {"GPUSLICE_SOCKET": rank_endpoint(tmp_path)}
    start(started, HOLD, **own)
    child = int(start(started, PARENT, **own))
    assert not look(tmp_path, {started[0].pid: 1, child: 1, os.getpid(): 1}).look()
    other = look(tmp_path / "other", {started[0].pid: 1, child: 1})
    assert [user.pid for user in other.look()["cuda:0"]] == sorted((started[0].pid, child))


def test_a_process_that_is_gone_or_was_never_seen_is_left_out(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not look(tmp_path, {ended.pid: 1, 0: 1, 2**22 + 1: 1}).look()


def test_a_device_that_nvml_cannot_tell_of_has_no_users(tmp_path: Path) -> None:
    assert not UserLook(["cpu:0", "null:0"], tmp_path).devices


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[SimpleNamespace]]:
    """NVML, whose answers are the lists of processes by handle."""
    told: dict[str, list[SimpleNamespace]] = {}
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: f"index {index}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: f"uuid {uuid}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: told[handle])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMPSComputeRunningProcesses", lambda handle: told["MPS"])
    return told


def process(pid: int, nbytes: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=nbytes)


def test_nvml_tells_processes_of_whole_gpus_of_instances_and_of_mps(
    nvml: dict[str, list[SimpleNamespace]],
) -> None:
    instance = mig(0, 1)
    nvml["index 1"] = [process(7, 70), process(8, None), process(9, (1 << 64) - 1)]
    nvml["MPS"] = [process(10, 100)]
    nvml[f"uuid {instance.uuid}"] = []
    reader = ProcessReader()
    assert reader.read(gpu(1)) == {7: 70, 8: None, 9: None, 10: 100}
    assert reader.read(instance) == {10: 100}


def test_an_nvml_that_cannot_answer_tells_of_nobody(
    nvml: dict[str, list[SimpleNamespace]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", refuse)
    assert ProcessReader().read(gpu(0)) == {}
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert ProcessReader().read(gpu(0)) == {}


class Told:
    """What the core of a box is told, by a clock that the test sets."""

    def __init__(self, foreign: Foreign, device_count: int = 2) -> None:
        self.box = Box(device_count)
        self.events: list[DevicesUsed] = []
        self.use = ForeignUse(
            self.box.core, foreign, self._tell, lambda: self.box.now_s, lambda: self.box.unix_s
        )

    def _tell(self, event: DevicesUsed) -> bool:
        self.events.append(event)
        self.box.do(event)
        return True

    def take(self, **found: tuple[DeviceUser, ...]) -> list[DevicesUsed]:
        """Return what the core was told when ``null_0=users`` was found."""
        before = len(self.events)
        self.use.take("", {name.replace("_", ":"): users for name, users in found.items()})
        return self.events[before:]


USER = DeviceUser(pid=4711, user="u1003", command="python", nbytes=21 << 30, since_unix_s=1.7e9)


def test_jobs_leave_after_the_grace_and_only_changes_are_told() -> None:
    told = Told(Foreign(grace_s=10.0))
    (event,) = told.take(null_0=(USER,))
    assert (list(event.users), event.left) == (["null:0"], ())
    assert not told.take(null_0=(replace(USER, nbytes=(21 << 30) + 1000),))
    told.box.now_s += 10.0
    (event,) = told.take(null_0=(USER,))
    assert event.left == ("null:0",)
    assert not told.take(null_0=(USER,))
    (event,) = told.take()
    assert (event.users, event.left) == ({}, ())
    (event,) = told.take(null_0=(USER,))
    assert event.left == (), "the grace begins anew"


@pytest.mark.parametrize(
    ("mode", "by_device", "expected"),
    [("share", {}, True), ("ignore", {}, False), ("wait", {"null:0": "ignore"}, False)],
)
def test_a_mode_is_of_all_devices_or_of_one(mode: Mode, by_device: dict[str, Mode], expected: bool) -> None:
    told = Told(Foreign(mode, by_device, grace_s=0.0))
    events = told.take(null_0=(USER,))
    assert [event.left for event in events] == ([()] if expected else [])


def test_displays_and_monitors_do_not_count_nor_what_is_named() -> None:
    told = Told(parse_foreign([], 0.0, ["python"], []))
    monitor = replace(USER, user="root", command="nv-hostengine", nbytes=None)
    assert not told.take(null_0=(USER, monitor))


def test_words_that_are_no_mode_are_named() -> None:
    devices = [DeviceName.parse("cuda:2")]
    found = parse_foreign(["share", "cuda:2=ignore"], 1.0, [], devices)
    assert (found.mode, found.by_device) == ("share", {"cuda:2": "ignore"})
    for word, why in (
        ("never", "is not wait"),
        ("cuda:2=", "is not wait"),
        ("cuda:3=wait", "no device cuda:3"),
    ):
        with pytest.raises(UsageError, match=why):
            parse_foreign([word], 1.0, [], devices)


def test_preferred_devices_come_first() -> None:
    devices = tuple(DeviceName("cuda", number) for number in range(4))
    assert [one.index for one in preferred(devices, "cuda:3,cuda:2")] == [3, 2, 0, 1]
    assert preferred(devices, "") == devices
    for text, why in (("cuda:4", "not shared"), ("cuda:1,cuda:1", "twice"), ("x", "not shared")):
        with pytest.raises(UsageError, match=why):
            preferred(devices, text)
