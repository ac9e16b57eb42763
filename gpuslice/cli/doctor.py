"""``gpuslice doctor``: what works on this machine, and why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import typer

from gpuslice import config
from gpuslice.config import format_size
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.launch.diagnosis import DeviceState, Diagnosis, as_json, diagnose


def command(
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the keys are documented and stay.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Also empty and refill each device, with torch, and --measure (seconds)."
        ),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure the GPUs' links anew; else they are shown as last measured."),
    ] = False,
) -> None:
    """Show what works on this machine, and what is missing.

    Exits with 0 if jobs can be suspended by the tensor route on some device, else with 3.
    """
    diagnosis = diagnose(config.load(), os.environ, check=check, measure=measure or check)
    print(as_json(diagnosis) if json else "\n".join(_lines(diagnosis)))
    if not diagnosis.ok:
        raise typer.Exit(EnvironmentUnusableError.exit_code)


def _lines(found: Diagnosis) -> Iterator[str]:
    yield f"gpuslice {found.gpuslice}, Python {found.python}"
    yield _row("torch", _torch(found))
    yield _row("driver", _driver(found))
    yield _row("CuPy", _cupy(found))
    yield _row("C compiler", found.compiler or "none; only the route vmm needs one")
    yield _row("page locking", _page_lock(found))
    yield _row("memory", _memory(found))
    shm = found.shm
    free = f"{format_size(shm.free_bytes)} free of {format_size(shm.total_bytes)}" if shm else "there is none"
    yield _row("/dev/shm", free)
    yield _row("RAM disk", _ramdisk(found))
    pages = found.huge_pages
    yield _row(
        "huge pages",
        f"transparent {pages.transparent}, on tmpfs {pages.shared_memory}, {pages.reserved} reserved",
    )
    for device in found.devices:
        yield ""
        yield from _device(device)
    yield from _links(found)
    yield ""
    yield (
        "Jobs can be suspended here." if found.ok else "No job can be suspended here, see the reasons above."
    )


def _links(found: Diagnosis) -> Iterator[str]:
    measured = found.measured
    if measured.age_s is None and not measured.problems:
        return  # there is no GPU
    yield ""
    age = "" if measured.age_s is None else f", measured {_age(measured.age_s)} ago; --measure renews it"
    yield f"links{age}"
    for name, rates in measured.rates.items():
        cost = rates.page_lock_s_per_gb
        locking = "memory cannot be page-locked" if cost is None else f"page-locking {cost:.2g} s/GB"
        yield _row(name, f"out {rates.out_gb_per_s:.1f} GB/s, in {rates.in_gb_per_s:.1f} GB/s, {locking}")
    for peer in measured.peers:
        way = "directly" if peer.direct else "through the host"
        yield f"  {peer.source} to {peer.target}: {peer.gb_per_s:.1f} GB/s, {way}"
    for problem in measured.problems:
        yield _row("unknown", f"{problem}; --measure tries it")


def _age(seconds: float) -> str:
    for unit_s, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} s"


def _row(name: str, text: str) -> str:
    return f"  {name + ':':14}{text}"


def _torch(found: Diagnosis) -> str:
    if found.torch is None:
        return "not installed; install torch 2.6 or newer"
    return f"{found.torch.version}, " + (
        f"for CUDA {found.torch.cuda}" if found.torch.cuda else "without CUDA"
    )


def _driver(found: Diagnosis) -> str:
    driver = found.driver
    if driver.version is None:
        return f"none ({driver.problem})" if driver.problem else "none"
    return f"{driver.version}, serves CUDA up to {driver.cuda or 'an unknown version'}"


def _cupy(found: Diagnosis) -> str:
    if found.cupy is None:
        return "not installed; only the GPU kernels need it"
    text = f"{found.cupy.version}, for CUDA {found.cupy.cuda_major}"
    return text if found.cupy.matches_torch else f"{text}, which is not torch's: install the other one"


def _page_lock(found: Diagnosis) -> str:
    limit = found.page_lock_limit_bytes
    return "no limit" if limit is None else f"at most {format_size(limit)} (ulimit -l)"


def _memory(found: Diagnosis) -> str:
    memory = found.memory
    text = f"{format_size(memory.available_bytes)} available of {format_size(memory.total_bytes)}"
    limit = memory.cgroup_limit_bytes
    return text if limit is None else f"{text}, this process's group has at most {format_size(limit)}"


def _ramdisk(found: Diagnosis) -> str:
    disk = found.ramdisk
    explanation = {"absent": "made at first use", "ready": "ready", "unusable": f"unusable: {disk.problem}"}
    return f"{disk.directory}, {explanation[disk.state]}"


def _device(device: DeviceState) -> Iterator[str]:
    slots = f", {device.slots} slots: cpu:0 to cpu:{device.slots - 1}" if device.slots else ""
    memory = ""
    if device.total_bytes is not None and device.used_bytes is not None and not device.slots:
        memory = f", {format_size(device.used_bytes)} of {format_size(device.total_bytes)} used"
    yield f"{device.name}: {device.model}{slots}{memory}"
    for name, state in device.routes.items():
        verdict = "works" if state.available else f"no: {state.reason}; {state.remedy}"
        yield _row(name, verdict)
    if device.check is not None:
        yield _row("self-test", device.check or "emptied and refilled, same bytes")
    for note in device.notes:
        yield _row("note", note)
    for reason in device.slower:
        yield _row("slower", reason)
