"""The devices that ``up --devices`` names."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.launch import command
from gpuslice.launch.visible_gpus import VISIBLE, visible
from gpuslice.types import DeviceName


def parse_devices(text: str) -> tuple[DeviceName, ...]:
    """Return the devices that ``cuda:0,cuda:1`` names, or for ``cpu:2`` alone so many slots of the host.

    Raises
    ------
    UsageError
        If one is no device or is named twice, or if they come to no device.
    EnvironmentUnusableError
        If one is not here.
    """
    names = _named(text)
    for name in names:
        command.check(Settings(device=str(name), cpu_slots=(name.index or 0) + 1))
    if any(name.kind == "cuda" for name in names):
        _check_gpus(names)
    return tuple(names)


def parse_devices_of_nodes(text: str) -> tuple[str, ...]:
    """Return the devices that ``--devices`` names if there are several nodes: ``cuda:0``, ``b/cuda:0``.

    Those without a node's name are of each node. Whether a node has them is not checked.

    Raises
    ------
    UsageError
        As ``parse_devices`` does.
    """
    by_node: dict[str, list[str]] = {}
    for part in text.split(","):
        node, _, device = part.strip().rpartition("/")
        by_node.setdefault(node, []).append(device)
    found = [str(name.on(node)) for node, parts in by_node.items() for name in _named(",".join(parts))]
    return tuple(found)


def _named(text: str) -> list[DeviceName]:
    """Return the devices that ``text`` names, here or elsewhere."""
    names = [DeviceName.parse(part.strip()) for part in text.split(",")]
    if len(names) == 1 and names[0].kind != "cuda":
        (name,) = names
        if name.index == 0 and ":" in text:
            raise UsageError(
                f"--devices {text} names no device: {name.kind}:N alone means N devices",
                f"write {name.kind}:1 for one",
            )
        names = [DeviceName(name.kind, index) for index in range(name.index or 1)]
    names = [DeviceName(name.kind, name.index or 0) for name in names]
    if len(set(names)) != len(names):
        raise UsageError(f"--devices {text} names a device twice", "name each once")
    return names


def _check_gpus(names: Sequence[DeviceName]) -> None:
    """Raise an error for GPUs that no job could use, as far as the driver knows."""
    from gpuslice.kernels.nvml import read_driver

    first = next(name for name in names if name.kind == "cuda")
    there = read_driver().gpus
    gpus = visible(there, os.environ)
    if there and not gpus:
        raise EnvironmentUnusableError(
            f"{first} is not here: {VISIBLE}={os.environ[VISIBLE]} shows none of the driver's GPUs",
            f"unset {VISIBLE}, or share slots of the host: --devices cpu:1",
        )
    for name in names:
        if gpus and name.kind == "cuda" and (name.index or 0) >= len(gpus):
            raise EnvironmentUnusableError(
                f"{name} is not here: the driver shows {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}",
                f"see `gpuslice doctor`, and {VISIBLE} if it is set",
            )
