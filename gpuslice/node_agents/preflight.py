"""The preflight of a node: what it has, compared with what the scheduler's own node has."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from gpuslice import config
from gpuslice.errors import GpusliceError, last_line
from gpuslice.nodes.device_users import Users
from gpuslice.nodes.plan import Found, Remark, Wanted
from gpuslice.types import Label, PathText, Word
from gpuslice.version import __version__

#: Difference of two clocks that is worth a remark.
CLOCK_S = 1.0
#: A RAM disk with less room has hardly any for snapshots.
_SMALL_BYTES = 1 << 30


class Facts(msgspec.Struct, frozen=True):
    """What a node has.

    Attributes
    ----------
    python, python_version
        The interpreter that answered, and its version without the last number.
    gpuslice, torch
        Their versions; empty: it is not installed.
    ramdisk, ramdisk_bytes
        Directory of the RAM disk and how much room its file system has.
    devices
        What it has of the devices that were asked for.
    problems
        What keeps it from being used, with a remedy each.
    lacks
        Why it does not have the other devices.
    has_directory
        True if it has the directory that was asked for.
    unix_s
        Its clock, when it answered.
    spills
        True if snapshots of parked jobs go to a disk there when the RAM disk is full.
    users
        Who else uses its devices, by device.
    """

    python: PathText
    python_version: Word
    gpuslice: Word
    torch: Word
    ramdisk: PathText
    ramdisk_bytes: int
    devices: tuple[Word, ...]
    problems: tuple[tuple[Word, Word], ...]
    lacks: tuple[Word, ...]
    has_directory: bool
    unix_s: float
    spills: bool = False
    users: Users = {}


def look(devices: Sequence[str], directory: str) -> Facts:
    """Return what this node has.

    Parameters
    ----------
    devices
        What is to be shared here, such as ``cuda:0``.
    directory
        Where jobs are likely to be submitted.
    """
    problems: list[tuple[str, str]] = []
    ramdisk, nbytes = "", 0
    try:
        ramdisk, nbytes = _ramdisk(needed=any(not one.startswith("null") for one in devices))
    except GpusliceError as error:
        problems.append((error.message, error.remedy or ""))
    there, lacks = _devices(devices) if devices else ((), ())
    return Facts(
        python=sys.executable,
        python_version=".".join(platform.python_version_tuple()[:2]),
        gpuslice=__version__,
        torch=_version("torch"),
        ramdisk=ramdisk,
        ramdisk_bytes=nbytes,
        devices=there,
        problems=tuple(problems),
        lacks=lacks,
        has_directory=os.path.isdir(directory),
        unix_s=time.time(),
        spills=bool(ramdisk and config.load().spill_dir),
    )


class PresentFacts:
    """What this node has, again and again: looked at in full once, then as far as it may change.

    Parameters
    ----------
    devices, directory
        As for ``look``.
    """

    def __init__(self, devices: Sequence[str], directory: str) -> None:
        self._devices, self._directory = devices, directory
        self._facts: Facts | None = None

    def now(self) -> Facts:
        """Return what this node has now."""
        if self._facts is None:
            self._facts = look(self._devices, self._directory)
        else:
            self._facts = _look_again(self._facts, self._directory)
        return self._facts


def _look_again(facts: Facts, directory: str) -> Facts:
    """Return ``facts``, with what may have changed meanwhile: room, clock, versions and ``directory``."""
    status = None
    with suppress(OSError):
        status = os.statvfs(facts.ramdisk)
    return replace(
        facts,
        torch=_version("torch"),
        ramdisk_bytes=0 if status is None else status.f_bavail * status.f_frsize,
        has_directory=os.path.isdir(directory),
        unix_s=time.time(),
    )


def _ramdisk(*, needed: bool) -> tuple[str, int]:
    """Return the RAM disk's directory, and how much room its file system has."""
    from gpuslice.checkpoint.files import store_directory

    directory = config.load().ramdisk_directory
    if needed:
        store_directory(directory)
    try:
        status = os.statvfs(directory if directory.exists() else directory.parent)
    except OSError:
        return str(directory), 0
    return str(directory), status.f_bavail * status.f_frsize


def _devices(devices: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return those of ``devices`` that are here, and why the others are not."""
    from gpuslice.kernels.nvml import read_driver
    from gpuslice.launch import command
    from gpuslice.launch.visible_gpus import visible

    there: list[str] = []
    lacks: list[str] = []
    for device in devices:
        number = int(device.partition(":")[2] or 0)
        try:
            command.check(config.Settings(device=device, cpu_slots=number + 1))
            gpus = visible(read_driver().gpus, os.environ) if device.startswith("cuda") else None
            if gpus is not None and number >= len(gpus):
                lacks.append(f"it has no {device}: its driver shows {len(gpus)} GPUs")
                continue
        except GpusliceError as error:
            lacks.append(f"it has no {device}: {error.message}")
            continue
        there.append(device)
    return tuple(there), tuple(lacks)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def judge(
    wanted: Wanted, node: Found, here: Facts, there: Facts | Exception, heard_s: float
) -> tuple[Found | None, list[Remark]]:
    """Return ``node`` with the devices that it has, or None if it is left out, and remarks on it.

    Parameters
    ----------
    here
        What the scheduler's own node has, which is used in any case.
    there
        What the node has, or the error that it met.
    heard_s
        When that was heard, on the clock of this node.
    """
    if not node.name:
        found = [Remark("", lack, left_out=False) for lack in here.lacks]
        return replace(node, devices=here.devices, python=here.python), found
    if isinstance(there, GpusliceError):
        return None, [Remark.of(node.name, there)]
    if isinstance(there, Exception):
        remedy = f"install gpuslice {here.gpuslice} in the Python that is used there"
        return None, [Remark(node.name, f"gpuslice cannot run there: {last_line(there)}", remedy)]
    remarks = compare(node.name, here, there, wanted.working_directory, there.unix_s - heard_s)
    if any(one.left_out for one in remarks):
        return None, remarks
    return replace(node, devices=there.devices, python=there.python), remarks


def compare(name: Label, here: Facts, there: Facts, directory: str, clock_s: float) -> list[Remark]:
    """Return what people should know about node ``name``: the first that leaves it out, or all that do not.

    Parameters
    ----------
    here, there
        What the scheduler's node and this one have.
    directory
        Where jobs are likely to be submitted.
    clock_s
        How far the node's clock is ahead.
    """
    same = "install the same there: " + there.python
    for what, ours, theirs in (
        ("gpuslice", here.gpuslice, there.gpuslice),
        ("torch", here.torch, there.torch),
    ):
        if ours != theirs:
            have = f"its {what} is {theirs}" if theirs else f"its Python has no {what}"
            remedy = f"{same} -m pip install {what}=={ours}" if ours else f"install {what} {theirs} here, too"
            return [Remark(name, f"{have}, here it is {ours or 'not installed'}", remedy)]
    if there.problems:
        return [Remark(name, *problem) for problem in there.problems]
    if not there.devices:
        lacks = "; ".join(there.lacks) or "no device of --devices is for it"
        return [Remark(name, lacks, "name devices that it has: --devices")]
    found = [(lack, "") for lack in there.lacks]
    if here.python_version != there.python_version:
        what = f"its Python is {there.python_version}, here it is {here.python_version}"
        found.append((what, "use the same there, or name another: --node NAME=HOST:PYTHON"))
    if not there.has_directory:
        found.append((f"it has no directory {directory}", "jobs from there are not started on it"))
    if there.ramdisk_bytes < _SMALL_BYTES and any(not one.startswith("null") for one in there.devices):
        room = f"its RAM disk {there.ramdisk} has room for {config.format_size(there.ramdisk_bytes)} only"
        found.append((room, "make room there, or choose another: GPUSLICE_RAMDISK_DIR"))
    if abs(clock_s) > CLOCK_S:
        how = f"{abs(clock_s):.1f} s {'ahead of' if clock_s > 0 else 'behind'}"
        found.append((f"its clock is {how} this node's", "set both by NTP"))
    return [Remark(name, *one, left_out=False) for one in found]
