"""The routes by which a device can be emptied, and the choice of one for a job (docs/gpus.md). No torch."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.types import DeviceName, Route

from . import driver as driver_route
from .compiler import find_compiler, shared_library
from .vmm.shim import SOURCE, allocator_conflict

if TYPE_CHECKING:  # a job that takes the tensor route has no use for NVML
    from .nvml import Driver

#: A constant of ``torch/version.py`` and its text; ``cuda = None`` does not match.
_CONSTANT = re.compile(r"""^(\w+)[^=\n]*= *['"]([^'"]*)['"]$""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """An installed torch: its version, ``2.13.0+cpu``, and the CUDA it was built for, ``13.0``, if any."""

    version: str
    cuda: str | None

    @property
    def cuda_major(self) -> int | None:
        """Major version of CUDA, ``13`` of ``"13.0"``; None without CUDA."""
        return int(self.cuda.split(".")[0]) if self.cuda else None


def installed_torch() -> TorchBuild | None:
    """Return the torch that ``import torch`` would load, or None. It is not imported: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return read_version_file(Path(spec.origin).with_name("version.py"))
    except OSError:
        return None


def read_version_file(path: Path) -> TorchBuild:
    """Read the constants of a ``torch/version.py`` without running it, and return the build."""
    constants = dict(_CONSTANT.findall(path.read_text(encoding="utf-8")))
    return TorchBuild(constants.get("__version__", "unknown"), constants.get("cuda"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer whether a route can be taken on a device; if not, the reason and a remedy."""

    reason: str = ""
    remedy: str = ""

    @property
    def available(self) -> bool:
        """True if the route can be taken."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class Ground:
    """The facts about a machine by which routes are judged: driver, compiler, torch's settings.

    Attributes
    ----------
    torch
        The installed torch, or ``None``.
    driver
        What NVML says.
    environ
        The job's environment.
    """

    torch: TorchBuild | None
    driver: Driver
    environ: Mapping[str, str]

    @classmethod
    def here(cls, environ: Mapping[str, str] | None = None) -> Ground:
        """Return the facts about this machine."""
        from .nvml import read_driver

        return cls(installed_torch(), read_driver(), os.environ if environ is None else environ)


def verdicts(kind: str, ground: Ground) -> dict[Route, Verdict]:
    """Return the verdict on each of the three routes for a kind of device (``cpu``, ``cuda``, ``null``)."""
    judges = {Route.TENSOR: _tensor, Route.VMM: _vmm, Route.DRIVER: _driver}
    return {route: Verdict(*judge(kind, ground)) for route, judge in judges.items()}


def choose(wanted: Route, device: DeviceName, ground: Ground | None = None) -> Route:
    """Return the route that a job takes: the one asked for, or ``tensor`` for ``auto``.

    The tensor route needs nothing and runs on every device. A route that the user names is never replaced by
    another.

    Raises
    ------
    EnvironmentUnusableError
        If the route that was asked for cannot be taken; says why. Nothing was touched.
    """
    if wanted in (Route.AUTO, Route.TENSOR):
        return Route.TENSOR
    verdict = verdicts(device.kind, ground or Ground.here())[wanted]
    if verdict.available and wanted is Route.DRIVER:
        raise EnvironmentUnusableError(
            f"the route driver cannot be taken on {device} by a job itself, only by another process",
            "use `gpuslice run --route driver` or `gpuslice adopt`, or --route tensor",
        )
    if not verdict.available:
        raise EnvironmentUnusableError(
            f"the route {wanted.value} cannot be taken on {device}: {verdict.reason}", verdict.remedy
        )
    if wanted is Route.VMM:
        shared_library(SOURCE)  # a shim that does not compile must be reported before the job starts
    return wanted


def _tensor(kind: str, ground: Ground) -> tuple[str, str]:
    if ground.torch is None:
        return "torch is not installed", "install torch 2.6 or newer"
    return _gpu(ground) if kind == "cuda" else ("", "")


def _vmm(kind: str, ground: Ground) -> tuple[str, str]:
    if kind != "cuda":
        return "it needs CUDA's virtual memory, so it is for GPUs only", "use --route tensor"
    reason, remedy = _tensor(kind, ground)
    if reason:
        return reason, remedy
    conflict = allocator_conflict(ground.environ)
    if conflict:
        return f"it does not work with {conflict}", "unset it, or use --route tensor"
    if find_compiler(ground.environ) is None:
        return "its shim is compiled at first use, and there is no C compiler", "install gcc, or set CC"
    return "", ""


def _driver(kind: str, ground: Ground) -> tuple[str, str]:
    if kind != "cuda":
        return "it is done by NVIDIA's driver, so it is for GPUs only", "use --route tensor"
    reason = driver_route.unavailable(ground.driver.major)
    if reason:
        return reason, f"install driver {driver_route.MINIMUM_DRIVER} or newer, or use --route tensor"
    if not ground.driver.gpus:
        return "the driver finds no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return "", ""


def _gpu(ground: Ground) -> tuple[str, str]:
    if ground.torch is not None and ground.torch.cuda is None:
        return f"torch {ground.torch.version} is built without CUDA", "install a CUDA build of torch"
    if ground.driver.version is None:
        return ground.driver.problem or "there is no NVIDIA driver", "install NVIDIA's driver"
    if not ground.driver.gpus:
        return "the driver finds no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return "", ""
