"""Instruments: GPUs through the real pynvml over a fake NVML in C, host slots, the thread that reads them."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from gpuslice.cli import main, smi
from gpuslice.profiler import hosts, sampler
from gpuslice.profiler.devices import Reading
from gpuslice.profiler.hosts import HostReader
from gpuslice.profiler.sampler import DeviceUse, Sampler

from ..fakes.build import build, python
from ..patience import PATIENCE_S

READ_TWICE = """
import json, msgspec
from gpuslice.profiler.gpus import GpuReader
reader = GpuReader()
print(json.dumps([msgspec.to_builtins(reader.read()) for _ in range(2)]))
reader.close()
"""


def read_twice(libraries: Path, **environ: str) -> Any:
    done = python(READ_TWICE, libraries, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_gpus_show_what_the_driver_says(nvml_library: Path) -> None:
    first, second = read_twice(nvml_library, FAKE_NVML_GPUS="2", FAKE_NVML_PID=str(os.getpid()))
    gpu, other = first
    expected = {
        "index": 0,
        "device": "cuda:0",
        "name": "Fake GPU 0",
        "utilization.gpu": 87.0,
        "temperature.gpu": 61,
        "power.draw": pytest.approx(305.5),
        "enforced.power.limit": pytest.approx(700.0),
        "memory.used": pytest.approx(10**9 / 2**20),
        "memory.total": pytest.approx(80 * 10**9 / 2**20),
        "clocks.sm": 1980.0,
        "clocks.mem": 2619.0,
        "pcie.tx": 1000,
        "pcie.rx": 2000,
        "throttle.reasons": ["sw_power_cap", "sw_thermal_slowdown"],
        "mig.mode": False,
        "mps": False,
    }
    assert {key: gpu[key] for key in expected} == expected
    (process,) = gpu["processes"]
    assert (process["pid"], process["gpu_memory_usage"]) == (os.getpid(), 512.0)
    assert process["command"]
    assert (other["mig.mode"], other["mps"], other["power.draw"]) == (True, True, None)
    assert other["unavailable"]["power.draw"] == "Not Supported"
    assert set(gpu["unavailable"]) == {"nvlink.tx", "nvlink.rx"}, "rates take two readings"
    assert second[0]["nvlink.tx"] > 0
    assert second[0]["unavailable"] == {}


def test_an_old_driver_says_what_it_lacks(tmp_path: Path) -> None:
    build(tmp_path, "libnvidia-ml.c", "libnvidia-ml.so.1", "-DOLD_DRIVER")
    ((gpu,), _) = read_twice(tmp_path)
    assert gpu["memory.used"] is not None
    missing = {key for key, value in gpu.items() if value is None}
    assert missing == set(gpu["unavailable"]) - {"processes"}
    assert {"utilization.gpu", "throttle.reasons", "mig.mode", "pcie.tx", "nvlink.rx"} <= missing
    assert "Function Not Found" in gpu["unavailable"]["utilization.gpu"]


class Times(NamedTuple):
    """Of a core, as psutil has them."""

    user: float
    idle: float
    iowait: float = 0.0
    guest: float = 0.0


def test_a_slot_is_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    answers = [
        [Times(0, 0)] * 4,
        [Times(1.0, 1.0), Times(0.5, 1.0, 0.5), Times(2.0, 0.0), Times(4.0, 0.0, 0.0, 2.0)],
    ]
    monkeypatch.setattr(hosts.psutil, "cpu_times", lambda percpu: answers.pop(0))
    first, second = HostReader(2).read()
    assert (first.device, second.device) == ("cpu:0", "cpu:1")
    assert first.name is not None
    assert first.name.endswith("cores 0-1")
    assert first.utilization == pytest.approx((50 + 25) / 2)
    assert second.utilization == pytest.approx(100.0)
    assert first.power_draw is None
    assert first.unavailable["power.draw"] == "only GPUs have it"


class Pinned(NamedTuple):
    """A process as ``psutil.process_iter`` yields it: what may not be read is ``None``."""

    pid: int
    info: dict[str, Any]


def test_processes_of_others_may_hide_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    told: dict[str, Any] = {"username": None, "name": "other", "memory_info": None, "cpu_affinity": [0]}
    own = {**told, "name": "own", "memory_info": hosts.psutil.Process().memory_info()}
    found = [Pinned(7, told), Pinned(8, own)]
    monkeypatch.setattr(hosts.psutil, "process_iter", lambda _: found)
    first, _ = HostReader(2).read()
    assert [process.pid for process in first.processes] == [8]


class Instruments:
    """Shows what it is told to."""

    def __init__(self, *utilization: float) -> None:
        self._left = list(utilization)
        self.empty = threading.Event()

    def read(self) -> Sequence[Reading]:
        if not self._left:
            self.empty.set()
            return []
        value = self._left.pop(0)
        return [Reading(index=0, device="cuda:0", utilization=value, memory_used=value * 10)]

    def close(self) -> None:
        """Nothing is held."""


def test_the_sampler_keeps_count() -> None:
    instruments = Instruments(10.0, 50.0, 30.0)
    with Sampler([instruments], 0.001) as sampler:
        assert instruments.empty.wait(PATIENCE_S)
        assert sampler.use() == [DeviceUse("cuda:0", pytest.approx(30.0), 500.0, None, 3)]


class Watched(Reading, weakref=True):
    """A reading of which one can tell whether it is still kept."""


def test_the_sampler_keeps_no_readings() -> None:
    kept: list[weakref.ref[Watched]] = []

    class Watching(Instruments):
        def read(self) -> Sequence[Reading]:
            found = [Watched(index=one.index, device=one.device) for one in super().read()]
            kept.extend(map(weakref.ref, found))
            return found

    instruments = Watching(10.0, 50.0, 30.0)
    with Sampler([instruments], 0.001) as sampler:
        assert instruments.empty.wait(PATIENCE_S)
    assert sampler.use() == [DeviceUse("cuda:0", None, None, None, 3)]
    assert [reference() for reference in kept] == [None] * 3


def test_what_goes_wrong_in_the_thread_is_raised() -> None:
    class Broken(Instruments):
        def read(self) -> Sequence[Reading]:
            self.empty.set()
            raise ValueError("the cable is out")

    instruments = Broken()
    with pytest.raises(ValueError, match="the cable is out"), Sampler([instruments], 0.001):
        assert instruments.empty.wait(PATIENCE_S)


def test_smi_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["smi", "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"hostname", "driver_version", "driver_problem", "query_time", "gpus", "cpus"}
    assert len(found["cpus"]) == len(os.sched_getaffinity(0))
    reading = msgspec.convert(found["cpus"][0], Reading)
    assert reading.device == "cpu:0"
    assert reading.memory_total


def test_smi_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["smi"])
    assert ended.value.code == 0
    heading, header, *rows = capsys.readouterr().out.splitlines()
    assert "no GPUs" in heading or "driver" in heading
    assert header.split("\t")[:4] == ["DEVICE", "NAME", "UTIL", "MEMORY"]
    assert any(row.startswith("cpu:0\t") for row in rows)


def test_smi_watches_without_asking_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Noted(threading.Event):
        changed = 0
        answered = 0

        def set(self) -> None:
            type(self).changed += 1
            super().set()

        def wait(self, timeout: float | None = None) -> bool:
            happened = super().wait(timeout)
            type(self).answered += happened
            return happened

    class Instruments:
        """They are read once, and are there for three more questions."""

        def __init__(self, readers: object, every_s: float, show: Callable[[list[Reading]], None]) -> None:
            self._show, self._left = show, 4

        def __enter__(self) -> Instruments:
            return self

        def __exit__(self, *failure: object) -> None:
            pass

        @property
        def running(self) -> bool:
            if self._left == 4:
                self._show([])
            self._left -= 1
            return self._left > 0

    monkeypatch.setattr(smi.threading, "Event", Noted)
    monkeypatch.setattr(sampler, "Sampler", Instruments)
    with pytest.raises(SystemExit) as ended:
        main(["smi", "--watch", "--json"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert (Noted.changed, Noted.answered) == (1, 1)
