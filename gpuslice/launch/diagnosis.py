"""The facts behind ``gpuslice doctor``: what works on this machine, and why not. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError, GpusliceError
from gpuslice.kernels.compiler import find_compiler
from gpuslice.kernels.nvml import Gpu
from gpuslice.kernels.routes import Ground, verdicts
from gpuslice.launch import measured_rates
from gpuslice.launch.measured_rates import Peer, Rates
from gpuslice.launch.visible_gpus import cautions, visible
from gpuslice.memory import cgroup_limit_bytes
from gpuslice.types import Route
from gpuslice.version import __version__

_CHECK_DEADLINE_S = 300


class RouteState(msgspec.Struct, frozen=True):
    """The state of a route on a device: available, or the reason why not and a remedy."""

    available: bool
    reason: str
    remedy: str


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a device, under the name that jobs use.

    Attributes
    ----------
    slots
        Number of slots ``cpu:N`` into which the host is divided; 0 for a GPU.
    check
        With ``--check``: what the self-test found wrong, empty if nothing; ``None`` if it was not run.
    slower
        With ``--check``: why copies take slower paths than they could.
    notes
        For a GPU: why jobs cannot share it, or why its name is not certain.
    """

    name: str
    model: str
    uuid: str | None = None
    capability: str | None = None
    slots: int = 0
    total_bytes: int | None = None
    used_bytes: int | None = None
    routes: dict[str, RouteState]
    check: str | None = None
    slower: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """True if a job can be suspended here by the tensor route."""
        return self.routes[Route.TENSOR.value].available and not self.check


class SelfTest(msgspec.Struct, frozen=True):
    """The result of ``selftest`` for a device."""

    problem: str
    slower: tuple[str, ...] = ()


class DriverState(msgspec.Struct, frozen=True):
    """NVIDIA's driver and the newest CUDA version that it supports, or the problem with the driver."""

    version: str | None
    cuda: str | None
    problem: str


class TorchState(msgspec.Struct, frozen=True):
    """The installed torch and the CUDA it was built for."""

    version: str
    cuda: str | None


class CupyState(msgspec.Struct, frozen=True):
    """The installed CuPy. ``matches_torch`` is True if both are for the same CUDA major version."""

    version: str
    cuda_major: int
    matches_torch: bool


class MeasuredState(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of the GPUs' links, from the cache or measured now.

    Attributes
    ----------
    age_s
        Seconds since the measurement; ``None`` if there is none for these GPUs and this driver.
    problems
        What could not be measured, or why there is no measurement.
    """

    age_s: float | None = None
    rates: dict[str, Rates] = {}
    peers: list[Peer] = []
    problems: list[str] = []


class SpaceState(msgspec.Struct, frozen=True):
    """The space of a file system."""

    path: str
    total_bytes: int
    free_bytes: int


class MemoryState(msgspec.Struct, frozen=True):
    """The host's memory; ``cgroup_limit_bytes`` is ``None`` without a limit."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None


class HugePagesState(msgspec.Struct, frozen=True):
    """Settings of transparent huge pages (``None`` where the kernel has none), and the reserved ones."""

    transparent: str | None
    shared_memory: str | None
    reserved: int
    page_bytes: int


class RamDiskState(msgspec.Struct, frozen=True):
    """The RAM disk: ``state`` is ``ready``, ``absent`` (made at first use) or ``unusable``."""

    directory: str
    state: str
    problem: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``gpuslice doctor --json``. docs/json.md explains the keys.

    Attributes
    ----------
    ok
        True if the tensor route works on some device.
    page_lock_limit_bytes
        ``RLIMIT_MEMLOCK``; ``None`` without a limit.
    """

    ok: bool
    gpuslice: str
    python: str
    devices: list[DeviceState]
    driver: DriverState
    torch: TorchState | None
    cupy: CupyState | None
    cuda_bindings: str | None
    compiler: str | None
    page_lock_limit_bytes: int | None
    shm: SpaceState | None
    memory: MemoryState
    huge_pages: HugePagesState
    ramdisk: RamDiskState
    measured: MeasuredState


def diagnose(
    settings: Settings, environ: Mapping[str, str], *, check: bool = False, measure: bool = False
) -> Diagnosis:
    """Return the facts about this machine.

    Parameters
    ----------
    check
        Also try the tensor route on every device, in a child process that imports torch.
    measure
        Also measure the GPUs' links anew, and keep the result in the user's cache.
    """
    ground = Ground.here(environ)
    memory = _memory()
    devices = [_host(settings, ground, memory)]
    gpus = ground.driver.gpus
    devices += [
        _gpu(number, gpu, ground, notes)
        for number, (gpu, notes) in enumerate(
            zip(visible(gpus, environ), cautions(gpus, environ), strict=True)
        )
    ]
    if check:
        tested = _self_test([device.name for device in devices if device.works])
        devices = [_tested(device, tested.get(device.name)) for device in devices]
    torch, driver, compiler = ground.torch, ground.driver, find_compiler(environ)
    return Diagnosis(
        ok=any(device.works for device in devices),
        gpuslice=__version__,
        python=platform.python_version(),
        devices=devices,
        driver=DriverState(driver.version, driver.cuda, driver.problem),
        torch=None if torch is None else TorchState(torch.version, torch.cuda),
        cupy=_cupy(torch.cuda_major if torch else None),
        cuda_bindings=_version("cuda-bindings"),
        compiler=compiler[0] if compiler else None,
        page_lock_limit_bytes=_page_lock_limit(),
        shm=_space("/dev/shm"),
        memory=memory,
        huge_pages=_huge_pages(),
        ramdisk=_ramdisk(settings),
        measured=_measured(devices, driver.version or "", environ, measure=measure),
    )


def _measured(
    devices: list[DeviceState], driver: str, environ: Mapping[str, str], *, measure: bool
) -> MeasuredState:
    uuids = {device.name: device.uuid or "" for device in devices if not device.slots and device.works}
    if not uuids:
        return MeasuredState()
    now_s = time.time()
    try:
        if measure:
            found = measured_rates.measure(driver, uuids, now_s)
            measured_rates.save(found, environ)
        else:
            kept = measured_rates.load(environ)
            if kept is None or not kept.is_of(driver, uuids):
                return MeasuredState(problems=["not measured for these GPUs and this driver"])
            found = kept
    except EnvironmentUnusableError as error:
        return MeasuredState(problems=[str(error)])
    return MeasuredState(
        age_s=max(0.0, now_s - found.measured_at_s),
        rates=found.rates,
        peers=found.peers,
        problems=found.problems,
    )


def _host(settings: Settings, ground: Ground, memory: MemoryState) -> DeviceState:
    cores = len(os.sched_getaffinity(0))
    return DeviceState(
        name="cpu",
        model=f"{platform.machine()} host, {cores} core{'s' if cores > 1 else ''}",
        slots=settings.cpu_slots or cores,
        total_bytes=memory.total_bytes,
        used_bytes=memory.total_bytes - memory.available_bytes,
        routes=_routes("cpu", ground),
    )


def _gpu(number: int, gpu: Gpu, ground: Ground, notes: tuple[str, ...]) -> DeviceState:
    return DeviceState(
        name=f"cuda:{number}",
        model=gpu.name or "GPU",
        uuid=gpu.uuid,
        capability=gpu.capability,
        total_bytes=gpu.total_bytes,
        used_bytes=gpu.used_bytes,
        routes=_routes("cuda", ground),
        notes=notes,
    )


def _routes(kind: str, ground: Ground) -> dict[str, RouteState]:
    return {
        route.value: RouteState(verdict.available, verdict.reason, verdict.remedy)
        for route, verdict in verdicts(kind, ground).items()
    }


def _tested(device: DeviceState, outcome: SelfTest | None) -> DeviceState:
    if outcome is None:
        return device
    return msgspec.structs.replace(device, check=outcome.problem, slower=outcome.slower)


def _self_test(names: list[str]) -> dict[str, SelfTest]:
    command = [sys.executable, "-m", "gpuslice.launch.selftest", *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_DEADLINE_S, check=False)
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=dict[str, SelfTest])
        last = done.stderr.strip().splitlines()[-1:]
        problem = f"the self-test ended with {done.returncode}: {''.join(last)}"
    except subprocess.TimeoutExpired:
        problem = f"the self-test did not end within {_CHECK_DEADLINE_S} s"
    return dict.fromkeys(names, SelfTest(problem))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cupy(torch_major: int | None) -> CupyState | None:
    for major in (12, 13):
        version = _version(f"cupy-cuda{major}x")
        if version is not None:
            return CupyState(version, major, major == torch_major)
    return None


def _page_lock_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _space(path: str) -> SpaceState | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return SpaceState(path, status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def _meminfo() -> dict[str, int]:
    """Return the numbers in ``/proc/meminfo`` by name: sizes in bytes, and page counts."""
    found = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, value, *unit = line.replace(":", " ").split()
        found[name] = int(value) * (1024 if unit else 1)
    return found


def _memory() -> MemoryState:
    meminfo, limit_bytes = _meminfo(), cgroup_limit_bytes()
    total_bytes = meminfo["MemTotal"]
    return MemoryState(
        total_bytes, meminfo["MemAvailable"], limit_bytes if limit_bytes < total_bytes else None
    )


def _huge_pages() -> HugePagesState:
    base, meminfo = Path("/sys/kernel/mm/transparent_hugepage"), _meminfo()
    return HugePagesState(
        _chosen(_read(base / "enabled")),
        _chosen(_read(base / "shmem_enabled")),
        meminfo.get("HugePages_Total", 0),
        meminfo.get("Hugepagesize", 0),
    )


def _chosen(choices: str | None) -> str | None:
    """Return the word in brackets of ``always [madvise] never``."""
    match = re.search(r"\[(\w+)\]", choices or "")
    return match[1] if match else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None


def _ramdisk(settings: Settings) -> RamDiskState:
    directory = settings.ramdisk_directory
    if not os.path.lexists(directory):
        return RamDiskState(str(directory), "absent", "")
    try:
        RamDisk.from_settings(settings)
    except GpusliceError as error:
        return RamDiskState(str(directory), "unusable", str(error))
    return RamDiskState(str(directory), "ready", "")


def as_json(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as JSON."""
    return json.dumps(msgspec.to_builtins(diagnosis), indent=2)
